"""Steps planned before the tokens of the step before are known: who goes on, what an end costs, what comes back."""

from __future__ import annotations

import collections
import random
import zlib

import pytest

from engine.block_allocator import BlockAllocator, SlotAllocator
from engine.errors import NoCapacity
from engine.plan import NO_MEMORY, PREVIOUS, SequenceStep, StepPlan, StepResult
from engine.scheduler import RETRY_STEPS, Progress, Scheduler
from engine.sequence import Sequence, max_cached_tokens
from router.protocol import Guide, SamplingParams

BLOCK, EOS, MAX_LEN = 8, 1, 60


class Bench:
    """Sequences as decode has them: every token but the last is computed. `held`: names that keep everybody's steps."""

    def __init__(self, *, steps_ahead: int = 1, num_blocks: int = 64, seqs: int = 4) -> None:
        self.blocks, self.slots = BlockAllocator(num_blocks), SlotAllocator(2 * seqs)
        self.held: set[str] = set()
        self.scheduler = Scheduler(
            self.blocks,
            block_tokens=BLOCK,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs,
            max_model_len=MAX_LEN,
            eos_token_ids=frozenset({EOS}),
            steps_ahead=steps_ahead,
            keeps_step=lambda sequence: sequence.request_id in self.held,
        )

    def sequence(self, seq: int, length: int = 4, **sampling: object) -> Sequence:
        params = SamplingParams(**{"max_tokens": 30, **sampling})  # type: ignore[arg-type]
        now = -(-(length - 1) // BLOCK)
        later = -(-max_cached_tokens(length - 1, 0, params, MAX_LEN) // BLOCK) - now
        return Sequence(
            request_id=f"r{seq}",
            seq=seq,
            token_ids=list(range(10, 10 + length)),
            num_given=length - 1,
            num_outputs=1,
            sampling=params,
            block_ids=self.blocks.admit(now, later=later),
            slot=self.slots.take(),
            promised=later,
            num_computed=length - 1,
        )

    def add(self, seq: int, length: int = 4, **sampling: object) -> Sequence:
        sequence = self.sequence(seq, length, **sampling)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def commit(
        self,
        plan: StepPlan,
        token: int = 50,
        *,
        failed: dict[int, str] | None = None,
        tokens: dict[int, int] | None = None,
    ) -> list[Progress]:
        """Answer with `token` for all but those that failed; `tokens`: other answers, by sequence."""
        answer = {step.seq: token for step in plan.steps if step.sample} | (tokens or {})
        given = [(seq, token_id) for seq, token_id in answer.items() if seq not in (failed or {})]
        result = StepResult(rank=0, number=plan.number, tokens=given, failed=list((failed or {}).items()))
        return self.scheduler.commit(plan, result)


def steps(plan: StepPlan) -> list[tuple[int, int, list[int]]]:
    return [(step.seq, step.start, step.token_ids) for step in plan.steps]


def test_next_step_runs_the_token_that_nobody_knows_yet() -> None:
    bench = Bench()
    sequence = bench.add(1)
    first, second = bench.plan(), bench.plan()
    assert (steps(first), steps(second)) == ([(1, 3, [13])], [(1, 4, [PREVIOUS])])
    assert bench.scheduler.schedule() is None
    bench.commit(first, 77)
    third = bench.plan()
    assert (sequence.token_ids[-1], steps(third)) == (77, [(1, 5, [PREVIOUS])])


def test_nothing_is_planned_ahead_unless_asked_for() -> None:
    bench = Bench(steps_ahead=0)
    bench.add(1)
    first = bench.plan()
    bench.add(2)
    assert bench.scheduler.schedule() is None
    bench.commit(first, 77)
    assert steps(bench.plan()) == [(1, 4, [77]), (2, 3, [13])]


def test_step_ahead_takes_the_block_that_its_token_needs_out_of_the_promise() -> None:
    bench = Bench()
    sequence = bench.add(1, BLOCK, max_tokens=3)
    assert (len(sequence.block_ids), sequence.promised) == (1, 1)
    first, second = bench.plan(), bench.plan()
    assert ([s.new_block_ids for s in first.steps], second.steps[0].start) == ([[]], BLOCK)
    assert second.steps[0].new_block_ids == sequence.block_ids[1:] != []
    assert (sequence.promised, bench.blocks.num_promised) == (0, 0)


@pytest.mark.parametrize(
    "case",
    [
        {"guide": Guide(grammar="g")},
        {"forced_token_ids": (7, 8)},
        {"max_tokens": 2},
        {"length": MAX_LEN - 1},
    ],
    ids=["guided", "forced", "last_by_max_tokens", "last_by_max_model_len"],
)
def test_sequence_whose_token_decides_more_waits_for_it(case: dict[str, object]) -> None:
    bench = Bench()
    bench.add(1, **case)  # type: ignore[arg-type]
    bench.plan()
    assert bench.scheduler.schedule() is None


def test_nobody_goes_on_beside_a_sequence_that_keeps_the_step() -> None:
    bench = Bench()
    bench.held = {"r1"}
    bench.add(1)
    bench.add(2)
    first = bench.plan()
    assert bench.scheduler.schedule() is None
    bench.held.clear()
    assert [token_ids for _, _, token_ids in steps(bench.plan())] == [[PREVIOUS]] * 2
    bench.commit(first)


def test_sequence_goes_on_where_its_forced_tokens_and_limits_allow_just_one_more() -> None:
    bench = Bench()
    bench.add(1, forced_token_ids=(7,), max_tokens=3)
    bench.add(2, MAX_LEN - 2)
    bench.plan()
    assert [seq for seq, *_ in steps(bench.plan())] == [1, 2]


def test_sequence_that_waits_runs_in_every_other_step_beside_one_that_goes_on() -> None:
    bench = Bench()
    bench.add(1)
    bench.add(2, guide=Guide(grammar="g"))
    plans = [bench.plan(), bench.plan()]
    for n in range(4):
        bench.commit(plans[n])
        plans.append(bench.plan())
    assert [[seq for seq, *_ in steps(plan)] for plan in plans] == [[1, 2], [1], [1, 2], [1], [1, 2], [1]]


def test_newcomer_joins_the_step_ahead_of_those_that_go_on() -> None:
    bench = Bench()
    bench.add(1)
    bench.plan()
    bench.add(2)
    plan = bench.plan()
    assert ([start.seq for start in plan.starts], steps(plan)) == ([2], [(1, 4, [PREVIOUS]), (2, 3, [13])])


def test_newcomer_waits_where_nobody_goes_on_so_that_both_run_in_one_step() -> None:
    bench = Bench()
    bench.add(1, guide=Guide(grammar="g"))
    first = bench.plan()
    bench.add(2, guide=Guide(grammar="g"))
    assert bench.scheduler.schedule() is None
    bench.commit(first)
    assert [seq for seq, *_ in steps(bench.plan())] == [1, 2]


@pytest.mark.parametrize("how", ["stop", "error"])
def test_end_is_told_at_once_and_its_blocks_come_back_with_the_step_that_it_wasted(how: str) -> None:
    bench = Bench()
    ended, other = bench.add(1), bench.add(2)
    first, second = bench.plan(), bench.plan()
    failed = {1: "NaN"} if how == "error" else {}
    told, _ = bench.commit(first, tokens={1: EOS}, failed=failed)
    assert (told.sequence, told.finish_reason, told.error) == (ended, *((None, "NaN") if failed else ("stop", "")))
    assert not told.is_out and bench.scheduler.holds(ended) and bench.scheduler.num_leaving == 1
    third = bench.plan()
    assert (third.ends, steps(third)) == ([1], [(2, 5, [PREVIOUS])])
    out, going = bench.commit(second, 51, failed=failed)
    assert out == Progress(ended, is_out=True) and (going.sequence, going.token_id) == (other, 51)
    assert not bench.scheduler.holds(ended) and 51 not in ended.token_ids
    assert bench.scheduler.num_wasted == (how == "stop")  # what failed did not run


def test_end_without_a_step_ahead_is_out_at_once() -> None:
    bench = Bench()
    bench.add(1, max_tokens=2)
    [told] = bench.commit(bench.plan())
    assert (told.finish_reason, told.is_out, bench.scheduler.num_wasted) == ("length", True, 0)


def test_abort_in_two_steps_under_way_is_out_when_both_are_committed() -> None:
    bench = Bench()
    sequence = bench.add(1)
    bench.add(2)
    first, second = bench.plan(), bench.plan()
    assert bench.scheduler.abort(sequence) is False
    assert [p.sequence.seq for p in bench.commit(first)] == [2] and bench.scheduler.holds(sequence)
    third = bench.plan()
    assert third.ends == [1]
    assert bench.commit(second)[0] == Progress(sequence, is_out=True)
    assert bench.scheduler.num_wasted == 2


def test_last_end_reaches_the_ranks_although_nothing_else_runs() -> None:
    bench = Bench()
    bench.add(1)
    first, second = bench.plan(), bench.plan()
    bench.commit(first, EOS)
    assert bench.scheduler.schedule() is None
    bench.commit(second)
    assert (bench.plan().ends, bench.scheduler.schedule()) == ([1], None)


def test_step_ahead_of_one_without_memory_has_not_happened_either() -> None:
    bench = Bench()
    bench.add(1)
    sequence = bench.add(2, BLOCK)
    first, second = bench.plan(), bench.plan()
    assert second.steps[1].new_block_ids
    assert [p.sequence.seq for p in bench.commit(first, failed={2: NO_MEMORY})] == [1]
    third = bench.plan()
    assert [p.sequence.seq for p in bench.commit(second, failed={2: NO_MEMORY})] == [1]
    assert (sequence.num_computed, bench.scheduler.num_delays) == (BLOCK - 1, 1)
    bench.scheduler._retry_at = 0
    again = bench.plan()
    assert [seq for seq, *_ in steps(third)] == [1]
    assert again.steps[1] == SequenceStep(
        seq=2, start=BLOCK - 1, token_ids=[sequence.token_ids[-1]], new_block_ids=[], sample=True
    )


def test_delayed_sequence_is_not_tried_while_a_step_of_it_is_under_way() -> None:
    bench = Bench()
    bench.add(1)
    bench.add(2)
    first = bench.plan()
    bench.plan()
    bench.commit(first, failed={2: NO_MEMORY})
    bench.scheduler._retry_at = 0
    assert [seq for seq, *_ in steps(bench.plan())] == [1]


def test_nothing_fits_fails_the_newest_once_and_the_others_run_again() -> None:
    bench = Bench()
    for seq in (1, 2, 3):
        bench.add(seq)
    first, second = bench.plan(), bench.plan()
    none = {seq: NO_MEMORY for seq in (1, 2, 3)}
    [told] = bench.commit(first, failed=none)
    assert told.sequence.seq == 3 and "nothing else ran" in told.error and not told.is_out
    assert bench.scheduler.schedule() is None
    assert bench.commit(second, failed=none) == [Progress(told.sequence, is_out=True)]
    assert steps(bench.plan()) == [(1, 3, [13]), (2, 3, [13])]
    assert bench.scheduler.num_delays == 1


# ---------------------------------------------------------------- anything, in any order


def _drawn(seq: int, token_ids: list[int]) -> int:
    """The token that a sequence's model draws after these."""
    return zlib.crc32(repr((seq, token_ids)).encode()) % 40 + EOS


class Rank:
    """Runs plans in order. It knows of a sequence what a rank knows, and fails what the test wants to fail."""

    def __init__(self) -> None:
        self.caches: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.last: dict[int, int | str] = {}  # the token that was drawn, or why not
        self.num_ahead = 0

    def run(self, plan: StepPlan, *, hungry: set[int], broken: set[int]) -> StepResult:
        for seq in plan.ends:
            del self.caches[seq], self.blocks[seq]
        for start in plan.starts:
            self.caches[start.seq], self.blocks[start.seq] = start.token_ids[:-1], list(start.block_ids)
        tokens, failed = [], []
        for step in plan.steps:
            seq, cache = step.seq, self.caches[step.seq]
            self.blocks[seq] += step.new_block_ids
            fed = step.token_ids[0]
            if fed == PREVIOUS:
                self.num_ahead += 1
                before = self.last[seq]
                if isinstance(before, str):
                    failed.append((seq, before))
                    continue
                fed = before
            if seq in hungry or seq in broken:
                self.last[seq] = NO_MEMORY if seq in hungry else "NaN"
                failed.append((seq, NO_MEMORY if seq in hungry else "NaN"))
                continue
            assert step.start == len(cache) < len(self.blocks[seq]) * BLOCK
            cache.append(fed)
            self.last[seq] = token = _drawn(seq, cache)
            tokens.append((seq, token))
        return StepResult(rank=0, number=plan.number, tokens=tokens, failed=failed)


def _alone(seq: int, sequence: Sequence, num_given: int) -> tuple[list[int], str]:
    """What a sequence says if it runs one step at a time, and why it ends."""
    known, params = sequence.token_ids[: num_given + 1], sequence.sampling
    while True:
        forced, at = params.forced_token_ids, len(known) - num_given
        known = [*known, forced[at] if at < len(forced) else _drawn(seq, known)]
        if known[-1] == EOS and at + 1 >= params.min_tokens:
            return known, "stop"
        if at + 1 >= params.max_tokens or len(known) >= MAX_LEN:
            return known, "length"


class Traffic:
    """Sequences that come, go, park, starve and break, while two steps are under way whenever there may be two."""

    def __init__(self, seed: int) -> None:
        self.rng, self.bench, self.rank = random.Random(seed), Bench(num_blocks=40, seqs=5), Rank()
        self.under_way: collections.deque[tuple[StepPlan, StepResult]] = collections.deque()
        self.live: dict[int, Sequence] = {}  # neither ended nor aborted
        self.held: dict[int, Sequence] = {}  # blocks and slot are not back
        self.parked: set[int] = set()
        self.num_started = 0
        self.ends: collections.Counter[str] = collections.Counter()

    def join(self) -> None:
        rng, seq = self.rng, self.num_started + 1
        chosen = [{}, {}, {}, {"guide": Guide(grammar="g")}, {"forced_token_ids": (7, 8, 9)}, {"min_tokens": 6}]
        try:
            sequence = self.bench.sequence(
                seq, rng.randrange(2, 30), max_tokens=rng.randrange(2, 40), **rng.choice(chosen)
            )
        except NoCapacity:
            return
        self.num_started = seq
        self.live[seq] = self.held[seq] = sequence
        self.bench.scheduler.add(sequence)

    def abort(self) -> None:
        sequence = self.live.pop(self.rng.choice(list(self.live)))
        self.ends["aborted"] += 1
        self.parked.discard(sequence.seq)
        if self.bench.scheduler.abort(sequence):
            self.release(sequence)

    def park(self) -> None:
        scheduler = self.bench.scheduler
        free = [seq for seq in scheduler.running if not scheduler.is_under_way(scheduler.running[seq])]
        for seq in free:
            if self.rng.random() < 0.3:
                scheduler.park(self.live[seq])
                self.parked.add(seq)

    def unpark(self) -> None:
        for seq in self.parked & self.live.keys():
            self.bench.scheduler.unpark(self.live[seq])
        self.parked.clear()

    def launch(self, *, faults: bool) -> bool:
        plan = self.bench.scheduler.schedule()
        if plan is None:
            return False
        assert len(plan.steps) <= 5 and not self.parked & {step.seq for step in plan.steps}
        sequences = {step.seq: self.held[step.seq] for step in plan.steps}
        assert not any(s.token_ids == [PREVIOUS] and sequences[s.seq].sampling.guide is not None for s in plan.steps)
        seqs = [step.seq for step in plan.steps]
        hungry = set(seqs[self.rng.randrange(5) :]) if faults and self.rng.random() < 0.1 else set()
        broken = set(seqs[:1]) if faults and self.rng.random() < 0.02 else set()
        self.under_way.append((plan, self.rank.run(plan, hungry=hungry, broken=broken)))
        assert all(self.rank.blocks[seq] == self.held[seq].block_ids for seq in seqs)
        return True

    def commit(self) -> None:
        for progress in self.bench.scheduler.commit(*self.under_way.popleft()):
            sequence = progress.sequence
            if progress.finish_reason or progress.error:
                del self.live[sequence.seq]
                self.ends[progress.finish_reason or "failed"] += 1
            if progress.finish_reason:
                wanted = _alone(sequence.seq, sequence, sequence.num_given)
                assert (sequence.token_ids, progress.finish_reason) == wanted
            elif sequence.seq in self.live:
                assert (
                    sequence.token_ids
                    == _alone(sequence.seq, sequence, sequence.num_given)[0][: len(sequence.token_ids)]
                )
            if progress.is_out:
                self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        del self.held[sequence.seq]
        self.bench.blocks.release(sequence.block_ids, unused_promise=sequence.promised)
        self.bench.slots.release(sequence.slot)

    def check(self) -> None:
        """Whatever a step under way writes into is held."""
        count = collections.Counter(step.seq for plan, _ in self.under_way for step in plan.steps)
        assert count.keys() <= self.held.keys() and all(number <= 2 for number in count.values())
        assert self.bench.blocks.num_free == 40 - sum(len(s.block_ids) for s in self.held.values())

    def turn(self) -> None:
        if self.live and self.rng.random() < 0.05:
            self.abort()
        if self.rng.random() < 0.1:
            self.park()
        if self.rng.random() < 0.3:
            self.unpark()
        if self.rng.random() < 0.3 and len(self.held) < 9:
            self.join()
        launched = len(self.under_way) < 2 and self.launch(faults=True)
        if self.under_way and (not launched or self.rng.random() < 0.3):
            self.commit()
        self.check()

    def finish(self) -> None:
        self.unpark()
        for _ in range(4 * RETRY_STEPS):
            while self.launch(faults=False):
                pass
            if not self.under_way:
                break
            self.commit()
            self.check()


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_says_what_one_step_at_a_time_says_and_returns_everything(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(2500):
        traffic.turn()
    traffic.finish()
    assert not traffic.held and not traffic.rank.caches and not traffic.live
    assert (traffic.bench.blocks.num_free, traffic.bench.blocks.num_promised) == (40, 0)
    assert traffic.bench.slots.num_free == traffic.bench.slots.num_slots
    assert min(traffic.ends[how] for how in ("stop", "length", "aborted", "failed")) > 5, traffic.ends
    assert traffic.rank.num_ahead > 500 and traffic.bench.scheduler.num_delays > 20
