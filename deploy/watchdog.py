"""Watchdog: kills a leader that has stopped answering, so that its group is started again like any that dies.

A stopped process (SIGSTOP, a hung kernel call) is no death that anybody could wait for; and while it lives, what it was
writing may still arrive. Ranks are watched by their leader, over shared memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

import httpx

ASK_S = 1.0
STOPPED_AFTER_S = 4.0


class Watchdog:
    """targets: (name, pid, url to ask) of every leader that has answered before. say: where to report a kill."""

    def __init__(self, targets: Callable[[], Iterable[tuple[str, int, str]]], *, say: Callable[[str], None]) -> None:
        self._targets, self._say = targets, say
        self._heard: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing will be killed any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=ASK_S, trust_env=False) as http:
            while not self._stop.wait(ASK_S):
                self.look(lambda url: http.get(url).status_code)

    def look(self, ask: Callable[[str], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask every target once; kill those that have been mute for STOPPED_AFTER_S."""
        for name, pid, url in list(self._targets()):
            now = clock()
            try:
                ask(url)
                self._heard[pid] = clock()
            except httpx.TimeoutException:
                mute = clock() - self._heard.setdefault(pid, now)
                if mute >= STOPPED_AFTER_S and not self._stop.is_set():
                    self._say(f"{name} (pid {pid}) has not answered for {mute:.1f} s: killed")
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            except httpx.HTTPError:
                self._heard[pid] = now  # refused or reset: not listening yet, or dead; both are seen elsewhere
