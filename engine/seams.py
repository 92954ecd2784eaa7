"""Seams: named moments of a request's life where a test may hold it, or strike its worker down.

    reserve                           a landing has its blocks, no slot yet              decode (fail only)
    prefill_queued                    accepted, no chunk scheduled                       prefill
    prefill_mid(n)                    n chunks computed, more to come                    prefill
    kv_mid(n)                         n-1 pushes ordered, the n-th held back             prefill
    prefill_done_untold               first token sampled, nobody told                   prefill
    kv_done_unnotified                first token told, the last push held back          prefill
    kv_notified_before_first_token    landed, not in the batch yet                       decode
    decode_step(n)                    n tokens decoded here                              decode

While decode_step is armed for a sequence that runs, no step is planned ahead: what is struck is where the test says.
Nothing is armed, and no route can arm anything, unless the worker was started with `test_seams`; an unarmed seam just
goes on. Engine loop's thread only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from engine.plan import StepPlan

Point = Literal[
    "reserve",
    "prefill_queued",
    "prefill_mid",
    "kv_mid",
    "prefill_done_untold",
    "kv_done_unnotified",
    "kv_notified_before_first_token",
    "decode_step",
]
POINTS = get_args(Point)


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do the first time that a request gets to a point.

    request: part of the request id, "" is any.   n: which time, 0 is any.
    hold: wait for /seams/release.   kill, stop: SIGKILL or SIGSTOP to leader or rank 0.   fail: this request fails; at
    reserve for want of memory, at kv_mid and kv_done_unnotified because the transfer's call raises.   exhaust: memory
    fails at operation `at` of the next step.
    """

    point: Point
    request: str = ""
    n: int = 0
    action: Literal["hold", "kill", "stop", "fail", "exhaust"] = "hold"
    target: Literal["leader", "rank"] = "rank"
    at: int = 1


class Seams:
    def __init__(self) -> None:
        self.rank_pid = 0
        self._armed: list[Fault] = []
        self._held: list[tuple[Fault, Callable[[], None]]] = []
        self._reached: list[str] = []
        self._exhaust = 0

    def arm(self, fault: Fault) -> None:
        self._armed.append(fault)

    def is_armed(self, point: Point, request_id: str) -> bool:
        """Whether this request may be struck at a point yet, now or later."""
        return any(fault.point == point and fault.request in request_id for fault in self._armed)

    def reached(self) -> list[str]:
        """Return "point request_id" of every fault that came to pass, oldest first."""
        return list(self._reached)

    def release(self) -> int:
        """Let everything held go on, disarm the rest, and forget; returns how many were held."""
        held, self._held = self._held, []
        self._armed, self._reached = [], []
        for _, go_on in held:
            go_on()
        return len(held)

    def of_step(self, plan: StepPlan) -> StepPlan:
        """Return the plan as the ranks shall get it."""
        if self._exhaust and plan.steps:
            plan, self._exhaust = msgspec.structs.replace(plan, exhaust=self._exhaust), 0
        return plan

    def at(
        self,
        point: Point,
        request_id: str,
        go_on: Callable[[], None],
        *,
        n: int = 0,
        fail: Callable[[str], None] | None = None,
    ) -> None:
        """Call `go_on`, at once or when released; go_on must look whether the request is still there."""
        for fault in self._armed:
            if fault.point == point and fault.n in (0, n) and fault.request in request_id:
                self._armed.remove(fault)
                self._reached.append(f"{point} {request_id}")
                self._strike(fault, go_on, fail)
                return
        go_on()

    def _strike(self, fault: Fault, go_on: Callable[[], None], fail: Callable[[str], None] | None) -> None:
        if fault.action == "fail":
            if fail is not None:
                fail(f"a test asked it to fail at {fault.point}")
            return
        if fault.action == "exhaust":
            self._exhaust = fault.at
            go_on()
            return
        self._held.append((fault, go_on))
        if fault.action != "hold":
            number = signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP
            os.kill(self.rank_pid if fault.target == "rank" else os.getpid(), number)
