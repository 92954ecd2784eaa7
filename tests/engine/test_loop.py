"""EngineLoop with a rank in another process: steps go round, calls are answered, a dead rank fails all at once."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess

import pytest

from engine import plan as messages
from engine.loop import EngineLoop, merge_results
from engine.ring import RING_BYTES, LeaderEnd, Waiter, open_rank_end
from engine.seams import Seams
from router.protocol import NumaBinding, SequenceOutput, WorkerState, WorkerStats


def _rank(address: dict[str, object], die_at: int, late_until: int) -> None:
    """Answer each step with its token plus one; before step `late_until`, only when the next step has come."""
    channel, bell = open_rank_end(address, 0)
    waiter = Waiter(bell)
    waiter.watch(address["pid"])  # type: ignore[arg-type]

    def beat() -> None:
        while True:
            channel.beat()
            time.sleep(0.05)

    threading.Thread(target=beat, daemon=True).start()
    channel.send(messages.encode(messages.RankProgress(rank=0, state="loading", detail="half")))
    binding = NumaBinding(status="unverified", node=-1, cpus="0")
    channel.send(
        messages.encode(
            messages.RankReady(
                rank=0, pid=os.getpid(), device="cpu", numa=binding, transport="t", endpoint=b"", model_fingerprint="f"
            )
        )
    )
    token, late = 0, list[messages.StepResult]()
    while True:
        for data in channel.receive():
            message = messages.decode_leader_message(data)
            if isinstance(message, messages.Shutdown):
                return
            assert isinstance(message, messages.StepPlan)
            if message.number == die_at:
                os._exit(9)
            (step,) = message.steps
            token = (token if step.token_ids == [messages.PREVIOUS] else step.token_ids[0]) + 1
            late.append(messages.StepResult(rank=0, number=message.number, tokens=[(step.seq, token)]))
            while len(late) > (message.number < late_until):
                channel.send(messages.encode(late.pop(0)))
        if waiter.wait(10):
            return


class CountingWorker:
    """Runs `left` steps of one sequence, with up to `ahead` planned before a token is known."""

    def __init__(self, left: int, ahead: int) -> None:
        self.left, self.tokens, self.outputs = left, [0], list[SequenceOutput]()
        self.ahead, self.number, self.under_way = ahead, 0, [0]
        self.aborted, self.seams = "", Seams()
        self.planned: messages.StepPlan | None = None
        self.on_abort: Callable[[], None] = lambda: None

    def on_ready(self, ranks: list[messages.RankReady]) -> None: ...

    def schedule(self) -> messages.StepPlan | None:
        if not self.left or self.under_way[-1] > self.ahead:
            planned, self.planned = self.planned, None
            return planned
        self.left -= 1
        self.number += 1
        token = messages.PREVIOUS if self.under_way[-1] else self.tokens[-1]
        self.under_way.append(self.under_way[-1] + 1)
        step = messages.SequenceStep(seq=1, start=0, token_ids=[token], new_block_ids=[], sample=True)
        return messages.StepPlan(number=self.number, steps=[step])

    def commit(self, plan: messages.StepPlan, result: messages.StepResult) -> None:
        assert plan.number == result.number == len(self.tokens)
        self.under_way.append(self.under_way[-1] - 1)
        self.tokens.append(result.tokens[0][1])
        self.outputs.append(SequenceOutput(request_id="a", index=0, token_ids=[self.tokens[-1]]))

    def on_rank_message(self, message: messages.RankMessage) -> None:
        raise AssertionError(message)

    def tick(self, now: float) -> None: ...

    def take_outputs(self) -> list[SequenceOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def stats(self) -> WorkerStats:
        return WorkerStats()

    def abort_all(self, reason: str) -> None:
        self.aborted = reason
        self.on_abort()

    def router_lost(self, router: str) -> None: ...

    @property
    def is_idle(self) -> bool:
        return not self.left


class Ears:
    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, object]] = queue.Queue()

    def on_progress(self, rank: int, state: WorkerState, detail: str) -> None:
        self.heard.put(("progress", (rank, state, detail)))

    def on_ready(self, ranks: list[messages.RankReady]) -> None:
        self.heard.put(("ready", len(ranks)))

    def on_outputs(self, outputs: list[SequenceOutput], stats: WorkerStats) -> None:
        for output in outputs:
            self.heard.put(("token", output.token_ids[0]))

    def on_failed(self, reason: str) -> None:
        self.heard.put(("failed", reason))

    def next(self) -> tuple[str, object]:
        return self.heard.get(timeout=20)


class Running:
    def __init__(self, left: int, *, die_at: int = -1, ahead: int = 0, late_until: int = 0) -> None:
        end = LeaderEnd(1)
        self.ears, self.worker = Ears(), CountingWorker(left, ahead)
        self.loop: EngineLoop[CountingWorker] = EngineLoop(end, self.ears)
        self.loop.worker = self.worker
        self.rank: SpawnProcess = multiprocessing.get_context("spawn").Process(
            target=_rank, args=(end.address, die_at, late_until)
        )
        self.rank.start()
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(10)
        self.rank.join(10)


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    run = Running(*request.param[0], **request.param[1])
    yield run
    run.close()


@pytest.mark.parametrize("running", [((5,), {})], indirect=True)
def test_progress_then_ready_then_tokens_in_order(running: Running) -> None:
    heard = [running.ears.next() for _ in range(7)]
    assert heard == [("progress", (0, "loading", "half")), ("ready", 1), *(("token", n) for n in range(1, 6))]
    assert running.loop.num_steps == 5


@pytest.mark.parametrize("running", [((5,), {"ahead": 9, "late_until": 5})], indirect=True)
def test_ranks_have_the_next_step_before_they_answer_and_never_a_third(running: Running) -> None:
    heard = [running.ears.next() for _ in range(7)]
    assert heard[2:] == [("token", n) for n in range(1, 6)]
    assert max(running.worker.under_way) == 2


@pytest.mark.parametrize("running", [((0,), {})], indirect=True)
def test_calls_run_on_the_loop_and_their_errors_come_back(running: Running) -> None:
    assert running.loop.call(lambda worker: worker.tokens).result(10) == [0]
    with pytest.raises(ZeroDivisionError):
        running.loop.call(lambda worker: 1 // worker.left).result(10)


@pytest.mark.parametrize("running", [((100,), {"die_at": 3})], indirect=True)
def test_dead_rank_fails_the_worker_and_later_calls_are_still_answered(running: Running) -> None:
    heard = [running.ears.next() for _ in range(5)]
    assert heard[-1][0] == "failed" and "rank 0" in str(heard[-1][1])
    assert "rank 0" in running.worker.aborted
    running.thread.join(10)
    assert not running.thread.is_alive()
    assert running.loop.call(lambda worker: worker.aborted).result(0) == running.worker.aborted


@pytest.mark.parametrize("running", [((0,), {})], indirect=True)
def test_stopped_rank_is_killed_and_fails_the_worker(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop.STOPPED_AFTER_S", 0.5)
    assert [running.ears.next()[0] for _ in range(2)] == ["progress", "ready"]
    os.kill(running.rank.pid or 0, signal.SIGSTOP)
    kind, reason = running.ears.next()
    assert kind == "failed" and "rank 0" in str(reason)
    running.rank.join(10)
    assert running.rank.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("running", [((0,), {})], indirect=True)
@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL])
def test_rank_that_reads_nothing_any_more_fails_the_worker_while_its_ring_is_full(
    running: Running, kind: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loop.STOPPED_AFTER_S", 0.5)
    assert [running.ears.next()[0] for _ in range(2)] == ["progress", "ready"]
    step = messages.SequenceStep(seq=1, start=0, token_ids=[1] * RING_BYTES, new_block_ids=[], sample=True)
    plan = messages.StepPlan(number=1, steps=[step])

    def stop_and_send(_: CountingWorker) -> None:
        os.kill(running.rank.pid or 0, kind)
        running.worker.on_abort = lambda: running.loop.send(plan)
        running.worker.planned = plan

    running.loop.call(stop_and_send)
    heard, reason = running.ears.next()
    assert heard == "failed" and "rank 0" in str(reason)
    running.thread.join(10)
    assert not running.thread.is_alive()


@pytest.mark.parametrize("running", [((0,), {})], indirect=True)
def test_cancelled_call_leaves_the_loop_running(running: Running) -> None:
    entered, leave = threading.Event(), threading.Event()
    running.loop.call(lambda _: (entered.set(), leave.wait(10)))
    assert entered.wait(10)
    late = running.loop.call(lambda worker: worker.tokens)
    assert late.cancel()
    leave.set()
    assert running.loop.call(lambda worker: worker.tokens).result(10) == [0]
    assert running.thread.is_alive()


@pytest.mark.parametrize("running", [((0,), {})], indirect=True)
def test_stop_ends_rank_and_loop(running: Running) -> None:
    running.loop.call(lambda _: None).result(10)
    running.close()
    assert running.rank.exitcode == 0
    assert not running.thread.is_alive()


@pytest.mark.parametrize(
    ("by_rank", "merged"),
    [
        ([[(1, "NaN")]], [(1, "NaN")]),
        ([[], [(2, "NaN")]], [(2, "rank 1: NaN")]),
        ([[(1, messages.NO_MEMORY)], [(1, messages.NO_MEMORY)]], [(1, messages.NO_MEMORY)]),
        ([[], [(1, messages.NO_MEMORY)]], [(1, f"rank 1: {messages.NO_MEMORY}")]),
        ([[(1, messages.NO_MEMORY)], [(1, "NaN")]], [(1, f"rank 0: {messages.NO_MEMORY}")]),
    ],
    ids=["one_rank", "one_of_two", "no_memory_anywhere", "no_memory_at_one", "for_two_reasons"],
)
def test_what_fails_at_one_rank_has_failed(by_rank: list[list[tuple[int, str]]], merged: list[tuple[int, str]]) -> None:
    results = {
        rank: messages.StepResult(rank=rank, number=1, tokens=[(1, 50)], failed=failed)
        for rank, failed in enumerate(by_rank)
    }
    result = merge_results(results)
    assert (result.failed, result.tokens) == (merged, [(1, 50)])


def test_sequence_for_which_ranks_drew_different_tokens_has_failed_alone() -> None:
    drawn = [[(1, 50), (2, 60)], [(1, 50), (2, 61)]]
    results = {rank: messages.StepResult(rank=rank, number=1, tokens=tokens) for rank, tokens in enumerate(drawn)}
    result = merge_results(results)
    assert result.failed == [(2, "rank 1 drew token 61 where rank 0 drew 60")]
    assert result.tokens == drawn[0]


@pytest.mark.parametrize(("cause", "told"), [(True, "rank 1: broke"), (False, "rank 0: lost the others")])
def test_who_lost_the_other_ranks_is_not_the_cause_if_there_is_one(
    cause: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loop.CAUSE_WITHIN_S", 30.0 if cause else 0.0)
    end, ears = LeaderEnd(2), Ears()
    loop: EngineLoop[CountingWorker] = EngineLoop(end, ears)
    loop.worker = CountingWorker(0, 0)
    channels = [open_rank_end(end.address, rank)[0] for rank in range(2)]
    channels[0].send(messages.encode(messages.RankFailed(rank=0, reason="lost the others", follows=True)))
    thread = threading.Thread(target=loop.run)
    thread.start()
    if cause:
        channels[1].send(messages.encode(messages.RankFailed(rank=1, reason="broke")))
    assert ears.next() == ("failed", told)
    thread.join(10)
