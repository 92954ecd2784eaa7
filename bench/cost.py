"""What the client itself takes: CPU time and lateness, so that nobody takes its limits for the server's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_TICK_S = 0.1
BUSY_SHARE = 0.7  # of a core: beyond that, chunks wait for the client
LATE_SHARE = 0.1  # of the median gap: beyond that, the client's lateness shows in the figures


class CostMeter:
    """CPU time of this process and lateness of its event loop, from `start` to `stop`."""

    def __init__(self, clock: Callable[[], float], *, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._late: list[float] = []

    def start(self) -> None:
        self._began, self._cpu_began = self._clock(), self._cpu_clock()
        self._late.clear()
        self._ticker = asyncio.ensure_future(self._tick())

    async def stop(self, *, num_events: int, num_tokens: int, gap_ms: float | None) -> dict[str, Any]:
        """Return the figures, and as `problem` what makes the client a part of what it measures.

        gap_ms: the median gap between tokens, against which lateness is judged.
        """
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        wall_s, cpu_s = self._clock() - self._began, self._cpu_clock() - self._cpu_began
        late_ms = float(np.percentile(self._late, 99)) * 1000 if self._late else 0.0
        share = cpu_s / wall_s if wall_s > 0 else 0.0
        problem = ""
        if share > BUSY_SHARE:
            problem = f"the client used {share:.0%} of a core: it may be what limits these figures"
        elif gap_ms is not None and late_ms > max(1.0, LATE_SHARE * gap_ms):
            problem = f"the client read up to {late_ms:.1f} ms late (p99), against {gap_ms:.1f} ms between tokens"
        return {
            "cpu_s": cpu_s,
            "share_of_core": share,
            "events": num_events,
            "events_per_core_s": num_events / cpu_s if cpu_s > 0 else None,
            "tokens_per_core_s": num_tokens / cpu_s if cpu_s > 0 else None,
            "late_p99_ms": late_ms,
            "problem": problem,
        }

    async def _tick(self) -> None:
        while True:
            wanted = self._clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._late.append(max(0.0, self._clock() - wanted))
