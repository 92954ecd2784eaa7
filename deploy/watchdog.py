"""Watchdog: kills processes that are stopped or mute, so that their group is started again like any that dies.

A stopped process (SIGSTOP, a hung kernel call) is no death that anybody could wait for; and while it lives, what it was
writing may still arrive. What the kernel shows as stopped is killed at any age; what is mute, once it has answered, for
a process that still loads answers nobody. A running leader watches its ranks' pulse too, over shared memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

import httpx
import psutil

LOOK_EVERY_S = 0.5
ASK_S = 1.0
# A router's clients hear nothing until it is dead, and are promised an end within 5 s; a leader that sees its own rank
# stopped acts first (engine/loop.py).
STOPPED_AFTER_S = 3.5
# Not stopped and yet mute: hung, or starved by a busy machine. One that listens before it has loaded is slower still.
MUTE_AFTER_S = 10.0
MUTE_AT_START_AFTER_S = 60.0


class Watchdog:
    """targets: (name, pid, url to ask) of every local process; url "" for one that is not asked.

    say: where to report a kill.
    """

    def __init__(self, targets: Callable[[], Iterable[tuple[str, int, str]]], *, say: Callable[[str], None]) -> None:
        self._targets, self._say = targets, say
        self._heard: dict[int, float] = {}
        self._ran: dict[int, float] = {}
        self._answered: set[int] = set()
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
            while not self._stop.wait(LOOK_EVERY_S):
                self.look(lambda url: http.get(url).status_code)

    def look(self, ask: Callable[[str], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Look at every target once; kill those that have been stopped or mute for too long."""
        targets = list(self._targets())
        for times in (self._heard, self._ran):
            for pid in times.keys() - {pid for _, pid, _ in targets}:
                del times[pid]  # pids are used again
        self._answered &= {pid for _, pid, _ in targets}
        for name, pid, url in targets:
            now = clock()
            if not _is_stopped(pid):
                self._ran[pid] = now
            else:
                # Not asked: it cannot answer, and waiting for it would put off the next look at everybody.
                if now - self._ran.setdefault(pid, now) >= STOPPED_AFTER_S:
                    self._kill(name, pid, f"has been stopped for {now - self._ran[pid]:.1f} s")
                continue
            if not url:
                continue
            try:
                ask(url)
                self._heard[pid] = clock()
                self._answered.add(pid)
            except httpx.TimeoutException:
                mute = clock() - self._heard.setdefault(pid, now)
                if mute >= (MUTE_AFTER_S if pid in self._answered else MUTE_AT_START_AFTER_S):
                    self._kill(name, pid, f"has not answered for {mute:.1f} s")
            except httpx.HTTPError:
                # Refused or reset: not listening yet, or dead, which is seen elsewhere; but who has answered before and
                # lives on with its port closed serves nobody, and holds up its successor.
                if pid not in self._answered:
                    self._heard[pid] = now
                elif clock() - self._heard.setdefault(pid, now) >= MUTE_AFTER_S:
                    self._kill(name, pid, f"has refused connections for {clock() - self._heard[pid]:.1f} s")

    def _kill(self, name: str, pid: int, reason: str) -> None:
        if not self._stop.is_set():
            self._say(f"{name} (pid {pid}) {reason}: killed")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
