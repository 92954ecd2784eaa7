"""An event loop whose clock stands still while anything is to be done, and jumps to the next timer when nothing is.

Real sockets work in it as long as both ends live in the loop: what one end sends is there for the other at once, so
that time passes only when everybody waits. Hours go by in seconds, and no load of the machine shows in any moment.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

# the kernel may hand a loopback packet over a little later when the machine is busy
_GRACE_S = 0.0002


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            return super().select(None)
        deadline = time.perf_counter() + _GRACE_S  # polled: a wait of epoll's is a millisecond at least
        while not ready and time.perf_counter() < deadline:
            ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Any) -> Any:
    """Run a coroutine in a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
