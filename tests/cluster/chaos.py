"""Chaos: clients whose answers are known beforehand, and a killer that strikes their cluster at random.

The killer knows the processes from what `isthmus up` prints of each start, so it also meets those that still load.
"""

from __future__ import annotations

import collections
import os
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

TARGETS = ("prefill-0 leader", "prefill-0 rank 0", "decode-0 leader", "decode-0 rank 0", "router")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
READY_TIMEOUT_S = 60.0
AGAIN_AT_ONCE = 0.25  # of the strikes
AT_BIRTH = 0.3  # of those that follow at once: the next process that Ray starts, before anybody knows it
PAUSE_S = (2.0, 8.0)  # between being ready and the next strike
LEAVERS = 0.15  # of the requests


@dataclass
class Strike:
    """at: time.monotonic.   seconds_to_ready: of a strike that nothing came after; None if another did."""

    target: str
    signal: str
    at: float
    seconds_to_ready: float | None = None


def processes_of(output: str) -> dict[str, int]:
    """Return the newest pid of every target that `isthmus up` has told of."""
    pids: dict[str, int] = {}
    for group, members in re.findall(r"(\w+-\d+): (leader pid .*)", output):
        for name, pid in re.findall(r"(leader|rank \d+) pid (\d+)", members):
            pids[f"{group} {name}"] = int(pid)
    for pid in re.findall(r"router: pid (\d+)", output):
        pids["router"] = int(pid)
    return pids


class Killer:
    """Strikes until told to stop; then waits until the cluster is ready. `faults` is what it found wrong."""

    def __init__(self, cluster: Any, seed: int, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.strikes: list[Strike] = []
        self.faults: list[str] = []
        self._cluster, self._rng, self._say = cluster, random.Random(seed), say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # every pair once, in random order, before any comes again
        todo: list[tuple[str, signal.Signals]] = []
        while not self._stop.is_set() and not self.faults:
            if not todo:
                todo = [(target, number) for target in TARGETS for number in SIGNALS]
                self._rng.shuffle(todo)
            before = processes_of(self._cluster.output)
            target, number = todo.pop()
            if not self._strike(target, number, before.get(target, 0)):
                self._stop.wait(0.05)
                todo.insert(0, (target, number))
                continue
            if self._rng.random() < AGAIN_AT_ONCE and not self._stop.is_set():
                if self._rng.random() < AT_BIRTH:
                    self._strike_newborn()
                self._stop.wait(self._rng.uniform(0, 1.5))
                continue
            self._await_ready(target, before)
            self._stop.wait(self._rng.uniform(*PAUSE_S))

    def _strike(self, target: str, number: signal.Signals, pid: int) -> bool:
        """Signal a process of ours; return False if it is gone, or stopped already."""
        try:
            process = psutil.Process(pid)
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                return False
            if self._cluster.process.pid not in [parent.pid for parent in process.parents()]:
                return False
            os.kill(pid, number)
        except (psutil.NoSuchProcess, ProcessLookupError, ValueError):
            return False
        self.strikes.append(Strike(target, number.name, time.monotonic()))
        self._say(f"{number.name} {target} (pid {pid})")
        return True

    def _strike_newborn(self) -> None:
        """Kill the next leader or rank that is born within 10 s and that `isthmus up` has not told of."""
        known = set(processes_of(self._cluster.output).values())
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not self._stop.is_set():
            for process in self._cluster.family():
                try:
                    if process.pid in known or process.name() not in ("ray::LeaderProcess", "ray::RankProcess"):
                        continue
                except psutil.NoSuchProcess:
                    continue
                self._strike("newborn", signal.SIGKILL, process.pid)
                return
            time.sleep(0.02)

    def _await_ready(self, target: str, before: dict[str, int]) -> None:
        strike = self.strikes[-1]
        while time.monotonic() - strike.at < READY_TIMEOUT_S:
            if self._cluster.process.poll() is not None:
                self.faults.append(f"the cluster ended after {strike}")
                return
            if processes_of(self._cluster.output).get(target) != before[target] and self._cluster.is_ready():
                strike.seconds_to_ready = time.monotonic() - strike.at
                self._say(f"ready after {strike.seconds_to_ready:.1f} s")
                return
            time.sleep(0.1)
        self.faults.append(f"not ready {READY_TIMEOUT_S:g} s after {strike}")


@dataclass
class Report:
    """What became of the requests: every one is in exactly one count, or in `faults`."""

    right: int = 0
    resumed: int = 0
    left: int = 0
    longest_s: float = 0.0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.right + self.left + self.errors.total() + len(self.faults)


def judge(
    report: Report, outcome: Any, expected: Any, *, router_outages: list[tuple[float, float]], resumed: set[str]
) -> None:
    """Count one outcome, or call it a fault. expected: the outcome of the same request, undisturbed."""
    where = f"{outcome.request_id} ({outcome.ended - outcome.began:.1f} s, {len(outcome.tokens)} tokens)"
    report.longest_s = max(report.longest_s, outcome.ended - outcome.began)
    was_struck = any(outcome.began <= until and outcome.ended >= since for since, until in router_outages)
    if outcome.tokens != expected.tokens[: len(outcome.tokens)]:
        report.faults.append(f"{where}: wrong tokens: {outcome.tokens}, expected {expected.tokens}")
    elif outcome.kind == "whole":
        if (outcome.tokens, outcome.finish_reason) != (expected.tokens, expected.finish_reason):
            report.faults.append(
                f"{where}: ended early: {outcome.finish_reason}, expected {len(expected.tokens)} tokens "
                f"and {expected.finish_reason}"
            )
        else:
            report.right += 1
            report.resumed += outcome.request_id in resumed
    elif outcome.kind == "left":
        report.left += 1
    elif outcome.kind == "error":
        if outcome.finish_reason is not None or not outcome.detail.startswith(("5", "event ")):
            report.faults.append(f"{where}: no clear error: {outcome}")
        else:
            report.errors[outcome.detail] += 1
    elif outcome.kind == "closed" and was_struck:
        report.errors["closed by the router's death"] += 1
    else:
        report.faults.append(f"{where}: {outcome.kind} {outcome.detail} though the router was not struck")


def router_outages(strikes: list[Strike], *, until: float) -> list[tuple[float, float]]:
    """Return when the router may have been away: from each strike at it until the cluster was ready."""
    outages = []
    for n, strike in enumerate(strikes):
        if strike.target == "router":
            ends = [s.at + s.seconds_to_ready for s in strikes[n:] if s.seconds_to_ready is not None]
            outages.append((strike.at, min(ends, default=until)))
    return outages


def table(report: Report, strikes: list[Strike]) -> dict[str, Any]:
    """Return the counts, as they are printed and kept."""
    times = {
        name: [s.seconds_to_ready for s in strikes if s.seconds_to_ready is not None and s.signal == name]
        for name in ("SIGKILL", "SIGSTOP")
    }
    kinds = collections.Counter(f"{s.signal} {s.target}" for s in strikes)
    return {
        "requests": report.num_requests,
        "right": report.right,
        "right_after_resume": report.resumed,
        "client_left": report.left,
        "seconds_of_longest_request": round(report.longest_s, 1),
        "errors": dict(sorted(report.errors.items())),
        "faults": len(report.faults),
        "strikes": len(strikes),
        "strikes_by_kind": dict(sorted(kinds.items())),
        "strikes_followed_at_once": sum(s.seconds_to_ready is None for s in strikes),
        "seconds_to_ready": {
            name: {"p50": round(statistics.median(seconds), 1), "max": round(max(seconds), 1)}
            for name, seconds in times.items()
            if seconds
        },
    }
