"""EngineLoop: the thread of a leader that plans steps, sends them to the ranks and takes in what comes back.

It owns the worker and its books; nobody else touches them. The HTTP side hands it functions with `call`; the
ranks' messages arrive over the rings. Two steps may be under way: the ranks have the next before they end the one
before, so that they never wait for this thread.

    call / rank message -> worker -> schedule -> StepPlan -> ranks -> StepResult -> commit -> outputs
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec
import psutil

from engine import plan as messages
from engine.profiles import Profiles
from engine.ring import LeaderEnd, PeerGone, Waiter
from engine.seams import Seams
from router.protocol import SequenceOutput, WorkerState, WorkerStats

log = logging.getLogger(__name__)

STEPS_UNDER_WAY = 2
_TICK_S = 0.25
STOPPED_AFTER_S = 3.0
CAUSE_WITHIN_S = 1.0
"""So long after a rank has lost the others the loop looks for the rank that was lost, to say why the group ends."""
MUTE_AFTER_S = 10.0
"""A rank whose pulse has not moved for so long is killed, never waited for: sooner if the kernel shows it as stopped,
later if it may be starved by a busy machine."""


class Worker(Protocol):
    """What a role (prefill, decode) adds to the loop. Called on the loop's thread only."""

    seams: Seams

    def on_ready(self, ranks: list[messages.RankReady]) -> None:
        """Every rank can take plans; called once, before anything is scheduled."""

    def schedule(self) -> messages.StepPlan | None:
        """Return the next step, None if there is nothing to tell the ranks yet. A step may be under way."""

    def commit(self, plan: messages.StepPlan, result: messages.StepResult) -> None:
        """Take in the tokens of `plan`, the oldest step under way."""

    def on_rank_message(self, message: messages.RankMessage) -> None:
        """Take in anything but progress and step results."""

    def tick(self, now: float) -> None:
        """Look at deadlines; called at least every quarter of a second."""

    def take_outputs(self) -> list[SequenceOutput]:
        """Return what the router should hear, and forget it."""

    def stats(self) -> WorkerStats: ...

    def abort_all(self, reason: str) -> None:
        """End every request with an error: the ranks are gone, or nobody listens."""

    def router_lost(self, router: str) -> None:
        """End every request of a router that has not read its stream for a while: nobody wants the answers."""

    @property
    def is_idle(self) -> bool:
        """No request is here and no transfer is pending."""


class Listener(Protocol):
    """Who hears of the loop; called on the loop's thread."""

    def on_progress(self, rank: int, state: WorkerState, detail: str) -> None: ...

    def on_ready(self, ranks: list[messages.RankReady]) -> None: ...

    def on_outputs(self, outputs: list[SequenceOutput], stats: WorkerStats) -> None: ...

    def on_failed(self, reason: str) -> None: ...


W = TypeVar("W", bound=Worker)
T = TypeVar("T")


class EngineLoop(Generic[W]):
    """`worker` is set before `run`, since workers send through this loop."""

    worker: W

    def __init__(self, end: LeaderEnd, listener: Listener, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._listener, self._clock = end, listener, clock
        self._waiter = Waiter(end.bell)
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._ready: dict[int, messages.RankReady] = {}
        self._pids: dict[int, int] = {}
        self._pulses: dict[int, tuple[int, float]] = {}
        self._steps: collections.deque[messages.StepPlan] = collections.deque()  # under way, oldest first
        self._results: dict[int, dict[int, messages.StepResult]] = {}  # of those, by number and rank
        self._has_news = False
        self._followers: dict[int, str] = {}  # ranks that lost the others, and how they tell it
        self._followed_at: float | None = None
        self._stopping = self._has_ended = False
        self.num_steps = 0
        self.is_refused = False  # by a rank, which would refuse again: see RankFailed
        self.profiles = Profiles(self.send)

    # ------------------------------------------------------------ from any thread

    def call(self, function: Callable[[W], T]) -> concurrent.futures.Future[T]:
        """Run `function(worker)` on the loop's thread, or here once that has ended: every caller gets an answer."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has been cancelled
            try:
                future.set_result(function(self.worker))
            except Exception as e:
                future.set_exception(e)

        self._calls.append(run)
        self._end.bell.ring()
        if self._has_ended:
            self._run_calls()
        return future

    def watch(self, pid: int, rank: int) -> None:
        """Fail as soon as this process ends (ranks that the leader spawned, from their first moment on)."""
        self.call(lambda _: self._watch(pid, rank))

    def stop(self) -> None:
        """Tell the ranks to shut down and let `run` return."""

        def stop(_: W) -> None:
            self._stopping = True
            for channel in self._end.channels:
                with contextlib.suppress(PeerGone):
                    channel.send(messages.encode(messages.Shutdown()))

        self.call(stop)

    # ------------------------------------------------------------ the loop's thread

    def send(self, message: messages.LeaderMessage) -> None:
        """Send to every rank; to none once the loop stops. Raises PeerGone if one is dead and its ring is full."""
        if self._stopping:
            return
        data = messages.encode(message)
        for rank, channel in enumerate(self._end.channels):
            try:
                channel.send(data)
            except PeerGone as e:
                raise PeerGone(f"rank {rank} ended while it was sent a {type(message).__name__}") from e

    def run(self) -> None:
        """Loop until stopped or failed; never raises."""
        try:
            while not self._stopping:
                self._listen()
                self._plan()
                outputs = self.worker.take_outputs()
                if outputs or self._has_news:
                    self._has_news = False
                    self._listener.on_outputs(outputs, self.worker.stats())
                if not self._calls and not self._stopping:
                    self._wait()
        except PeerGone as e:
            self._fail(str(e))
        except Exception as e:
            log.exception("the engine loop ended")
            self._fail(f"engine loop: {type(e).__name__}: {e}")
        finally:
            self._has_ended = True
            self._run_calls()
            self.profiles.give_up("the engine loop has ended")

    def _wait(self) -> None:
        ended = self._waiter.wait(_TICK_S)
        now = self._clock()
        self.worker.tick(now)
        self._feel_pulses(now)
        if ended and not self._stopping:
            self._listen()  # a last word may say why
            # One that lost the others ends as well: its end is no cause.
            causes = [pid for pid in ended if self._pids[pid] not in self._followers]
            if causes:
                raise PeerGone(", ".join(f"rank {self._pids[pid]} (pid {pid})" for pid in causes) + " ended")
        if self._followed_at is not None and now - self._followed_at > CAUSE_WITHIN_S:
            raise PeerGone("; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(self._followers.items())))

    def _is_alive(self, rank: int) -> bool:
        """Say so of a rank whose ring is full: while a send waits for it, nothing else looks after it."""
        self._feel_pulses(self._clock())
        return not self._waiter.has_ended(self._ready[rank].pid)

    def _feel_pulses(self, now: float) -> None:
        """Kill a rank that has stopped: its death is then noticed, and told, like any other."""
        for rank, ready in self._ready.items():
            pulse = self._end.channels[rank].peer_pulse
            known, since = self._pulses.get(rank, (-1, now))
            if pulse != known:
                self._pulses[rank] = (pulse, now)
            elif now - since > (STOPPED_AFTER_S if _is_stopped(ready.pid) else MUTE_AFTER_S):
                log.error("rank %d (pid %d) has not moved for %.1f s: killed", rank, ready.pid, now - since)
                self._pulses[rank] = (pulse, now)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ready.pid, signal.SIGKILL)

    def _run_calls(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self._calls:
                self._calls.popleft()()

    def _listen(self) -> None:
        self._run_calls()
        for rank, channel in enumerate(self._end.channels):
            for data in channel.receive():
                self._on_message(rank, messages.decode_rank_message(data))

    def _on_message(self, rank: int, message: messages.RankMessage) -> None:
        match message:
            case messages.StepResult():
                self._on_result(message)
            case messages.RankProgress():
                self._listener.on_progress(rank, message.state, message.detail)
            case messages.RankReady():
                self._ready[rank] = message
                self._watch(message.pid, rank)
                self._end.channels[rank].is_peer_alive = functools.partial(self._is_alive, rank)
                if len(self._ready) == len(self._end.channels):
                    ranks = [self._ready[r] for r in sorted(self._ready)]
                    self.worker.on_ready(ranks)
                    self._listener.on_outputs([], self.worker.stats())
                    self._listener.on_ready(ranks)
            case messages.Profiled():
                self.profiles.on_profiled(message)
            case messages.RankFailed(follows=True):
                log.warning("rank %d: %s", rank, message.reason)
                self._followers[rank] = message.reason
                self._followed_at = self._followed_at or self._clock()
            case messages.RankFailed():
                self.is_refused = message.is_refusal
                raise PeerGone(f"rank {rank}: {message.reason}")  # it has logged where
            case _:
                self.worker.on_rank_message(message)

    def _on_result(self, result: messages.StepResult) -> None:
        assert any(result.number == step.number for step in self._steps), "answer to a step that is not under way"
        self._results.setdefault(result.number, {})[result.rank] = result
        # Each rank answers in order, so no step is complete before an older one.
        if len(self._results[result.number]) == len(self._end.channels):
            self.worker.commit(self._steps.popleft(), merge_results(self._results.pop(result.number)))
            self._has_news = True  # room may have become free without an output: the router waits for it

    def _plan(self) -> None:
        while len(self._steps) < STEPS_UNDER_WAY and len(self._ready) == len(self._end.channels):
            step = self.worker.schedule()
            if step is None:
                return
            self._steps.append(step)
            self.num_steps += 1
            self.send(step)

    def _watch(self, pid: int, rank: int) -> None:
        if pid not in self._pids:
            self._waiter.watch(pid)
            self._pids[pid] = rank

    def _fail(self, reason: str) -> None:
        self._stopping = True
        self.worker.abort_all(reason)
        self._listener.on_outputs(self.worker.take_outputs(), self.worker.stats())
        self._listener.on_failed(reason)


def merge_results(results: dict[int, messages.StepResult]) -> messages.StepResult:
    """Return rank 0's tokens, and what failed at any rank: one that has no row of a sequence spoils it for all.

    A sequence for which only some ranks had memory can't be tried again: their caches differ now. So do those of one
    for which ranks drew different tokens, since each may have gone on from its own.
    """
    failed: dict[int, str] = {}
    drawn = dict(results[0].tokens)
    for rank, result in sorted(results.items()):
        for seq, reason in result.failed:
            failed.setdefault(seq, reason if len(results) == 1 else f"rank {rank}: {reason}")
        for seq, token_id in result.tokens if rank else ():
            if drawn.get(seq, token_id) != token_id:
                failed.setdefault(seq, f"rank {rank} drew token {token_id} where rank 0 drew {drawn[seq]}")
    for seq in failed:
        if all((seq, messages.NO_MEMORY) in result.failed for result in results.values()):
            failed[seq] = messages.NO_MEMORY
    return msgspec.structs.replace(results[0], failed=list(failed.items()))


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
