"""How often something may be started again, and after how long; and what ends a cluster."""

from __future__ import annotations

import time
from collections import deque

from deploy.config import SupervisorSettings
from kernels.table import counted

MAX_BACKOFF_S = 4.0


class ClusterFailed(RuntimeError):
    """The cluster can't go on; the text says why."""


class Stopped(Exception):
    """Somebody asked the cluster to stop."""


class GivenUp(ClusterFailed):
    """What died is not started again: it has died too often, or nothing can be started."""


def admit_restart(restarts: deque[float], name: str, limits: SupervisorSettings) -> float:
    """Count one more restart; return the seconds to wait before it. Raises GivenUp.

    restarts: times of those within the window, changed here.
    """
    now = time.monotonic()
    while restarts and now - restarts[0] > limits.restart_window_s:
        restarts.popleft()
    if len(restarts) >= limits.max_restarts:
        raise GivenUp(
            f"{name} ended {counted(len(restarts) + 1, 'time')} within {limits.restart_window_s:g} s: given up "
            f"(supervisor: max_restarts = {limits.max_restarts})"
        )
    restarts.append(now)
    return min(float(limits.restart_backoff_s * 2 ** (len(restarts) - 1)), MAX_BACKOFF_S)
