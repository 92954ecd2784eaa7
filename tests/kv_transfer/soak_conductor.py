"""Soak: starts the two processes of the soak, gives them transfers, and strikes them with faults.

What it decides, router and leaders decide in a cluster. Whoever dies is started again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kv_transfer.landing import Endpoint, Landing

from .conftest import Lane, child_environment
from .soak_content import BLOCK_TOKENS, DEADLINE_S, MAX_BLOCKS

PATIENCE_S = 60.0
NUM_AT_ONCE = 3
FAULTS = ("writer killed", "receiver killed", "receiver stopped", "cancelled", "connection broken")


class Child:
    """One of the two processes. generation: how often it was started."""

    def __init__(self, script: str, lane: Lane, generation: int) -> None:
        self.connection, other = Pipe()
        self.generation = generation
        self.num_begun = 0
        words = [lane.transport, lane.memory, str(generation), str(other.fileno())]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *words],
            pass_fds=[other.fileno()],
            env=child_environment(UCX_TLS=lane.ucx_tls),
        )
        other.close()

    def send(self, *order: Any) -> None:
        self.connection.send(order)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.connection.close()

    def leave(self) -> int:
        """Have it end by itself; return its exit code."""
        self.connection.close()
        return self.process.wait(PATIENCE_S)


@dataclasses.dataclass
class Request:
    """A transfer under way. writer: generation of the prefill process that it was given to."""

    number: int
    tokens: int
    writer: int
    landing: Landing | None = None
    is_written: bool = False
    has_landed: bool = False


@dataclasses.dataclass
class Counts:
    landed: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0
    """Ended by the death of either process."""
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    hit: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Transfers that did not land, by the fault that came last."""


class Soak:
    """Drives both processes through `total` transfers.

    fault_at: which fault comes with which transfer, see FAULTS.
    samples: of memory and descriptors along the way: (transfers begun in that life, state) for each role.
    """

    def __init__(self, lane: Lane, *, total: int, fault_at: dict[int, str], seed: int = 1) -> None:
        self.counts = Counts()
        self.corrupt: list[str] = []
        self.samples: dict[str, list[tuple[int, dict[str, int]]]] = {"prefill": [], "decode": []}
        self.lanes: set[str] = set()
        self._lane, self._total, self._fault_at = lane, total, fault_at
        self._random = random.Random(seed)
        self._generations = {"prefill": 0, "decode": 0}
        self._children: dict[str, Child] = {}
        self._requests: dict[int, Request] = {}
        self._num_begun = 0
        self._is_linked = False
        self._fault = self._last_fault = ""
        self._heard = time.monotonic()
        self._endpoint: Endpoint | None = None
        self.start("decode")
        self.start("prefill")

    def start(self, role: str) -> None:
        self._generations[role] += 1
        self._is_linked = False
        self._children[role] = Child(f"soak_{role}.py", self._lane, self._generations[role])
        self.samples[role].clear()
        if role == "decode":
            self._endpoint = None
        elif self._endpoint is not None:
            self._children["prefill"].send("connect", self._endpoint)

    def close(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(OSError):
                child.process.send_signal(signal.SIGCONT)
            child.kill()

    # ------------------------------------------------------------ what tests call

    def run(self, until: int, *, report: Callable[[str], None] = lambda line: None) -> None:
        """Begin transfers until there were `until`, and see all of them to their end."""
        begun, last = time.monotonic(), self._num_begun
        self._heard = begun
        while self._num_begun < until or self._requests or not self._is_linked or self._fault:
            while self._is_linked and not self._fault and self._num_begun < until and len(self._requests) < NUM_AT_ONCE:
                self._begin()
            self._listen(0.5)
            if self._num_begun - last >= max(1, self._total // 20):
                last = self._num_begun
                for child in self._children.values():
                    child.send("state")
                report(
                    f"{self._lane.transport}: {self._num_begun:,} of {self._total:,} transfers in "
                    f"{time.monotonic() - begun:.0f} s: {self.counts.landed:,} landed, {self.counts.failed} failed, "
                    f"{self.counts.cancelled} cancelled, {self.counts.lost} lost, "
                    f"{sum(self.counts.faults.values())} faults, {len(self.corrupt)} corrupt"
                )

    def settle(self) -> dict[str, dict[str, int]]:
        """Return what both processes hold when everything has ended; blocks of dead writers take a second."""
        self._children["decode"].send("settle")
        until = time.monotonic() + 10
        while True:
            for samples in self.samples.values():
                samples.append((-1, {}))
            for child in self._children.values():
                child.send("state")
            while any(not samples[-1][1] for samples in self.samples.values()):
                self._listen(0.5)
            states = {role: samples[-1][1] for role, samples in self.samples.items()}
            for samples in self.samples.values():
                samples[:] = [sample for sample in samples if sample[1]]
            if time.monotonic() > until or not any(state["held"] for state in states.values()):
                return states

    def leave(self) -> dict[str, int]:
        """Have both processes end by themselves, the writer first; return their exit codes."""
        return {role: self._children[role].leave() for role in ("prefill", "decode")}

    # ------------------------------------------------------------ transfers

    def _begin(self) -> None:
        self._num_begun += 1
        number = self._num_begun
        blocks = MAX_BLOCKS if number in self._fault_at else int(MAX_BLOCKS ** self._random.random())
        tokens = (blocks - 1) * BLOCK_TOKENS + self._random.randint(1, BLOCK_TOKENS)
        request = Request(number, tokens, self._generations["prefill"])
        self._requests[number] = request
        for child in self._children.values():
            child.num_begun += 1
        self._children["decode"].send("reserve", number, tokens, request.writer)

    def _on_landing(self, number: int, landing: Landing | None) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        if landing is None:  # blocks of dead writers are not free yet
            self._children["decode"].send("reserve", number, request.tokens, request.writer)
            return
        request.landing = landing
        fault = self._fault_at.get(number, "")
        chunk = self._random.choice((4, 16, 64))
        after = self._random.choice((1, 2, 5)) if fault == "cancelled" else None
        self._children["prefill"].send("push", number, landing, 16 if fault else chunk, after)
        if fault:
            self._strike(fault)

    def _on_event(self, number: int, landing: Landing, status: str, is_last: bool, error: str) -> None:
        decode = self._children["decode"]
        is_there = landing.generation == decode.generation and self._endpoint is not None
        request = self._requests.get(number)
        if status == "failed" and is_there:
            decode.send("abort", landing)
        if status == "undelivered" and is_there:
            decode.send("drained", landing)
        if self._fault == "receiver stopped" and status == "failed":
            self._resume()
        if request is None:
            return
        if status == "done" and landing.generation == decode.generation:
            request.is_written = True
            self._end_if_landed(request)
        elif status == "done":
            self._lose(lambda other: other is request)
        elif status in ("drained", "undelivered"):
            was_cancelled = self._fault_at.get(number) == "cancelled"
            self.counts.cancelled += was_cancelled
            self.counts.failed += not was_cancelled
            self._drop(request)

    def _on_landed(self, number: int, faults: list[str]) -> None:
        self.corrupt += faults
        if (request := self._requests.get(number)) is not None:
            request.has_landed = True
            self._end_if_landed(request)

    def _end_if_landed(self, request: Request) -> None:
        if request.is_written and request.has_landed:
            self.counts.landed += 1
            del self._requests[request.number]

    def _drop(self, request: Request) -> None:
        del self._requests[request.number]
        self.counts.hit[self._last_fault] += 1

    # ------------------------------------------------------------ faults

    def _strike(self, fault: str) -> None:
        self.counts.faults[fault] += 1
        self._last_fault = fault
        prefill, decode = self._children["prefill"], self._children["decode"]
        match fault:
            case "connection broken":
                prefill.send("break", self._random.uniform(0, 0.01))
            case "receiver stopped":
                decode.process.send_signal(signal.SIGSTOP)
                self._fault, self._stopped = fault, time.monotonic()
            case "receiver killed":
                time.sleep(self._random.uniform(0, 0.01))
                decode.kill()
                self._lose(lambda request: request.landing is None or request.is_written)
                self.start("decode")
            case "writer killed":
                time.sleep(self._random.uniform(0, 0.01))
                prefill.kill()
                decode.send("writer lost", prefill.generation)
                self._lose(lambda request: True)
                self.start("prefill")

    def _lose(self, is_lost: Callable[[Request], bool]) -> None:
        for request in list(self._requests.values()):
            if is_lost(request):
                self.counts.lost += 1
                self._drop(request)

    def _resume(self) -> None:
        self._children["decode"].process.send_signal(signal.SIGCONT)
        self._fault = ""

    # ------------------------------------------------------------ hearing

    def _listen(self, timeout_s: float) -> None:
        """Take in what both processes say, for a while or until something came."""
        if self._fault == "receiver stopped" and time.monotonic() - self._stopped > 4 * DEADLINE_S:
            self._resume()
        roles = {child.connection: role for role, child in self._children.items()}
        for connection in wait(list(roles), timeout_s):
            assert isinstance(connection, Connection)
            role = roles[connection]
            if self._children[role].connection is not connection:
                continue  # killed meanwhile
            self._heard = time.monotonic()
            try:
                self._take(role, connection.recv())
            except (EOFError, ConnectionError):
                raise AssertionError(f"{role} ended by itself, code {self._children[role].process.wait(10)}") from None
        silent = time.monotonic() - self._heard
        assert silent < PATIENCE_S, f"nothing was heard for {silent:.0f} s; under way: {self._requests}"

    def _take(self, role: str, message: tuple[Any, ...]) -> None:
        match message:
            case ("endpoint", endpoint):
                self._endpoint = endpoint
                self._children["prefill"].send("connect", endpoint)
            case ("linked", agent, lane):
                assert self._endpoint is not None
                self._is_linked = agent == self._endpoint.agent
                self.lanes.add(lane)
            case ("landing", number, landing):
                self._on_landing(number, landing)
            case ("event", *event):
                self._on_event(*event)
            case ("landed", number, faults):
                self._on_landed(number, faults)
            case ("late", faults):
                self.corrupt += faults
            case ("state", state):
                self.samples[role].append((self._children[role].num_begun, state))
            case _:
                raise AssertionError(message)
