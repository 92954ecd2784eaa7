"""Whether Ray's head answers. While it does not, nothing of Ray that needs it may be called: such a call blocks until
the reconnect timeout (local_ray.py), and with it the thread that should stop the cluster.
"""

from __future__ import annotations

import socket
import time

ASK_S = 1.0
_CONNECT_S = 1.0
_TRIES = 3


class RayHead:
    """address: of Ray's control service (GCS), "host:port"; "" asks Ray, which must be running, at first use."""

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._asked_at = 0.0
        self._is_alive = True

    def is_alive(self) -> bool:
        """Return whether it accepted a connection within the last second; one that was lost is asked each time."""
        now = time.monotonic()
        if not self._is_alive or now - self._asked_at >= ASK_S:
            self._asked_at = now
            # a busy machine may be late once
            self._is_alive = any(self._accepts() for _ in range(_TRIES))
        return self._is_alive

    def _accepts(self) -> bool:
        if not self._address:
            import ray

            self._address = ray.get_runtime_context().gcs_address
        host, port = self._address.rsplit(":", 1)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
                return True
        except OSError:
            return False
