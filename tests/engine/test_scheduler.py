"""The scheduler: chunks, continuous batching, stops, aborts at any moment. Plain integers, no tensors."""

import random

from engine.block_allocator import BlockAllocator
from engine.plan import NO_MEMORY, StepPlan, StepResult
from engine.scheduler import RETRY_STEPS, Progress, Scheduler
from engine.sequence import Sequence, max_cached_tokens
from router.protocol import Guide, SamplingParams

BLOCK = 8


def _scheduler(blocks: BlockAllocator, *, seqs: int = 4, tokens: int = 16, max_len: int = 1000) -> Scheduler:
    return Scheduler(
        blocks,
        block_tokens=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=max_len,
        eos_token_ids=frozenset({1}),
    )


def _sequence(blocks: BlockAllocator, seq: int, length: int, *, max_len: int = 1000, **sampling: object) -> Sequence:
    params = SamplingParams(**{"max_tokens": 5, **sampling})  # type: ignore[arg-type]
    now = -(-length // BLOCK)
    later = -(-max_cached_tokens(length, 0, params, max_len) // BLOCK) - now
    return Sequence(
        request_id=f"r{seq}",
        seq=seq,
        token_ids=list(range(10, 10 + length)),
        num_given=length,
        num_outputs=0,
        sampling=params,
        block_ids=blocks.admit(now, later=later),
        slot=seq,
        promised=later,
    )


def _answer(plan: StepPlan, token: int = 50) -> StepResult:
    return StepResult(rank=0, number=plan.number, tokens=[(s.seq, token) for s in plan.steps if s.sample])


def _run(scheduler: Scheduler, token: int = 50) -> list[Progress]:
    plan = scheduler.schedule()
    assert plan is not None
    return scheduler.commit(plan, _answer(plan, token))


def test_prompt_is_cut_into_chunks_and_sampled_once_at_its_end() -> None:
    blocks = BlockAllocator(32)
    scheduler = _scheduler(blocks)
    scheduler.add(_sequence(blocks, 1, 37))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        seen += [(s.start, len(s.token_ids), s.sample) for s in plan.steps]
        scheduler.commit(plan, _answer(plan))
    assert seen == [(0, 16, False), (16, 16, False), (32, 5, True)]


def test_several_short_prompts_share_a_chunk() -> None:
    blocks = BlockAllocator(32)
    scheduler = _scheduler(blocks)
    for seq in (1, 2, 3):
        scheduler.add(_sequence(blocks, seq, 7))
    plan = scheduler.schedule()
    assert plan is not None
    assert [(s.seq, len(s.token_ids), s.sample) for s in plan.steps] == [(1, 7, True), (2, 7, True), (3, 2, False)]


def test_short_prompt_behind_a_long_one_is_done_in_the_next_chunk() -> None:
    blocks = BlockAllocator(128)
    scheduler = _scheduler(blocks)
    scheduler.add(_sequence(blocks, 1, 300))
    _run(scheduler)
    scheduler.add(_sequence(blocks, 2, 300))  # as long: its turn comes later
    scheduler.add(_sequence(blocks, 3, 5))
    plan = scheduler.schedule()
    assert plan is not None
    assert [(s.seq, s.start, len(s.token_ids), s.sample) for s in plan.steps] == [(1, 16, 11, False), (3, 0, 5, True)]
    assert [start.seq for start in plan.starts] == [3]
    assert [s.seq for s in scheduler.waiting] == [2]


def test_nobody_begins_beyond_the_limit_of_sequences_and_nothing_of_the_chunk_is_lost() -> None:
    blocks = BlockAllocator(128)
    scheduler = _scheduler(blocks, seqs=2)
    for seq, length in ((1, 300), (2, 4), (3, 4)):
        scheduler.add(_sequence(blocks, seq, length))
    plan = scheduler.schedule()
    assert plan is not None
    assert [(s.seq, len(s.token_ids)) for s in plan.steps] == [(1, 12), (2, 4)]


def test_batch_never_exceeds_its_limit_and_refills_as_sequences_end() -> None:
    blocks = BlockAllocator(64)
    scheduler = _scheduler(blocks, seqs=2, tokens=100)
    for seq in (1, 2, 3):
        scheduler.add(_sequence(blocks, seq, 3, max_tokens=seq))
    ended = []
    for _ in range(10):
        plan = scheduler.schedule()
        if plan is None:
            break
        assert len(plan.steps) <= 2
        ended += [p.sequence.seq for p in scheduler.commit(plan, _answer(plan)) if p.finish_reason == "length"]
    assert ended == [1, 2, 3]


def test_stop_rules() -> None:
    cases = [
        (dict(), 1, "stop"),
        (dict(ignore_eos=True), 1, None),
        (dict(stop_token_ids=(7,)), 7, "stop"),
        (dict(stop_token_ids=(7,), ignore_eos=True), 7, "stop"),
        (dict(min_tokens=2), 1, None),
        (dict(max_tokens=1), 9, "length"),
        (dict(max_tokens=1), 1, "stop"),
    ]
    for sampling, token, reason in cases:
        blocks = BlockAllocator(8)
        scheduler = _scheduler(blocks)
        scheduler.add(_sequence(blocks, 1, 3, **sampling))
        assert [p.finish_reason for p in _run(scheduler, token)] == [reason], sampling


def test_guided_answer_ends_with_its_grammar_although_more_tokens_were_wanted() -> None:
    blocks = BlockAllocator(4)
    scheduler = _scheduler(blocks)
    scheduler.add(_sequence(blocks, 1, 4, min_tokens=3, guide=Guide(grammar="g")))
    (progress,) = _run(scheduler, token=1)
    assert progress.finish_reason == "stop"


def test_request_ends_at_the_longest_length_of_the_model() -> None:
    blocks = BlockAllocator(8)
    scheduler = _scheduler(blocks, max_len=12)
    scheduler.add(_sequence(blocks, 1, 10, max_tokens=100, max_len=12))
    assert [_run(scheduler)[0].finish_reason for _ in range(2)] == [None, "length"]


def test_growth_takes_exactly_what_was_promised() -> None:
    blocks = BlockAllocator(8)
    scheduler = _scheduler(blocks)
    sequence = _sequence(blocks, 1, 8, max_tokens=10)
    scheduler.add(sequence)
    progress = [_run(scheduler)[0] for _ in range(10)]
    assert progress[-1].finish_reason == "length"
    assert (len(sequence.block_ids), sequence.promised) == (3, 0)
    blocks.release(sequence.block_ids, unused_promise=sequence.promised)
    assert (blocks.num_free, blocks.num_promised) == (8, 0)


def test_abort_under_way_is_reported_by_commit_and_told_to_the_ranks() -> None:
    blocks = BlockAllocator(8)
    scheduler = _scheduler(blocks)
    sequence = _sequence(blocks, 1, 3)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.abort(sequence) is False
    assert scheduler.holds(sequence)
    assert [p.is_out for p in scheduler.commit(plan, _answer(plan))] == [True]
    assert not scheduler.holds(sequence)
    last = scheduler.schedule()
    assert last is not None and last.ends == [1] and not last.steps
    assert scheduler.schedule() is None


def test_abort_of_a_waiting_sequence_is_never_told_to_the_ranks() -> None:
    blocks = BlockAllocator(8)
    scheduler = _scheduler(blocks)
    sequence = _sequence(blocks, 1, 3)
    scheduler.add(sequence)
    assert scheduler.abort(sequence) is True
    assert scheduler.schedule() is None


def test_failure_of_one_sequence_leaves_its_neighbours_alone() -> None:
    blocks = BlockAllocator(8)
    scheduler = _scheduler(blocks)
    for seq in (1, 2):
        scheduler.add(_sequence(blocks, seq, 3))
    plan = scheduler.schedule()
    assert plan is not None
    result = StepResult(rank=0, number=plan.number, tokens=[(2, 50)], failed=[(1, "logits are not finite")])
    progress = scheduler.commit(plan, result)
    assert [(p.sequence.seq, p.error, p.token_id) for p in progress] == [
        (1, "logits are not finite", None),
        (2, "", 50),
    ]


def test_sampling_sequence_without_a_token_fails_closed() -> None:
    blocks = BlockAllocator(8)
    scheduler = _scheduler(blocks)
    scheduler.add(_sequence(blocks, 1, 3))
    plan = scheduler.schedule()
    assert plan is not None
    [progress] = scheduler.commit(plan, StepResult(rank=0, number=plan.number))
    assert "no token" in progress.error


def _without_memory_for(plan: StepPlan, *hungry: int) -> StepResult:
    tokens = [(s.seq, 50) for s in plan.steps if s.sample and s.seq not in hungry]
    return StepResult(rank=0, number=plan.number, tokens=tokens, failed=[(seq, NO_MEMORY) for seq in hungry])


def _seqs(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [step.seq for step in plan.steps]


def _with_one_delayed(blocks: BlockAllocator, **sampling: object) -> tuple[Scheduler, list[Sequence], StepPlan]:
    """Sequence 3 of three has had no memory for its first step; returns that step, too."""
    scheduler = _scheduler(blocks, seqs=3, tokens=64)
    sequences = [_sequence(blocks, seq, 3, **sampling) for seq in (1, 2, 3, 4)]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    progress = scheduler.commit(plan, _without_memory_for(plan, 3))
    assert [(p.sequence.seq, p.token_id) for p in progress] == [(1, 50), (2, 50)]
    return scheduler, sequences, plan


def test_sequence_without_memory_waits_until_another_has_left_and_runs_the_same_step() -> None:
    scheduler, sequences, first = _with_one_delayed(BlockAllocator(64), max_tokens=9)
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None and _seqs(plan) == [1, 2]
        scheduler.commit(plan, _answer(plan))
    assert scheduler.abort(sequences[0])
    plan = scheduler.schedule()
    assert plan is not None and _seqs(plan)[:2] == [2, 3]
    assert (plan.steps[1].start, plan.steps[1].token_ids) == (first.steps[2].start, first.steps[2].token_ids)
    assert 3 not in [start.seq for start in plan.starts]
    assert scheduler.num_delays == 1


def test_sequence_without_memory_is_tried_again_after_a_while() -> None:
    scheduler, _, _ = _with_one_delayed(BlockAllocator(64), max_tokens=RETRY_STEPS + 9)
    batches = []
    for _ in range(RETRY_STEPS + 1):
        plan = scheduler.schedule()
        assert plan is not None
        batches.append(_seqs(plan))
        scheduler.commit(plan, _answer(plan))
    assert batches == [[1, 2]] * RETRY_STEPS + [[1, 2, 3]]


def test_nothing_new_begins_while_a_sequence_waits_for_memory() -> None:
    blocks = BlockAllocator(64)
    scheduler = _scheduler(blocks, tokens=64)
    for seq in (1, 2):
        scheduler.add(_sequence(blocks, seq, 3))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, _without_memory_for(plan, 2))
    scheduler.add(_sequence(blocks, 3, 3))
    assert _seqs(scheduler.schedule()) == [1]


def test_sequence_without_memory_can_be_aborted() -> None:
    blocks = BlockAllocator(64)
    scheduler, sequences, _ = _with_one_delayed(blocks)
    assert scheduler.abort(sequences[2])
    assert not scheduler.holds(sequences[2])
    plan = scheduler.schedule()
    assert plan is not None and plan.ends == [3]


def test_abort_under_way_of_a_sequence_without_memory_is_reported() -> None:
    blocks = BlockAllocator(64)
    scheduler = _scheduler(blocks, tokens=64)
    sequences = [_sequence(blocks, seq, 3) for seq in (1, 2)]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None and not scheduler.abort(sequences[1])
    progress = scheduler.commit(plan, _without_memory_for(plan, 2))
    assert [(p.sequence.seq, p.is_out) for p in progress] == [(1, False), (2, True)]
    assert not scheduler.holds(sequences[1])


def test_sequence_without_memory_runs_when_nothing_else_does() -> None:
    scheduler, sequences, _ = _with_one_delayed(BlockAllocator(64))
    for sequence in sequences[:2]:
        scheduler.park(sequence)
    assert _seqs(scheduler.schedule()) == [3]


def test_nothing_fits_fails_the_newest_and_keeps_the_others() -> None:
    blocks = BlockAllocator(64)
    scheduler = _scheduler(blocks, tokens=64)
    for seq in (1, 2):
        scheduler.add(_sequence(blocks, seq, 3))
    plan = scheduler.schedule()
    assert plan is not None
    [progress] = scheduler.commit(plan, _without_memory_for(plan, 2, 1))
    assert progress.sequence.seq == 2 and "nothing else ran; lower" in progress.error
    assert _seqs(scheduler.schedule()) == [1]


def test_random_traffic_computes_every_token_once_and_returns_every_block() -> None:
    rng, blocks = random.Random(3), BlockAllocator(128)
    scheduler = _scheduler(blocks, seqs=5, tokens=13)
    live: dict[int, Sequence] = {}
    computed: dict[int, int] = {}
    seq = 0
    for _ in range(3000):
        if len(live) < 12 and rng.random() < 0.3:
            seq += 1
            live[seq] = _sequence(blocks, seq, rng.randrange(1, 40), max_tokens=rng.randrange(1, 20))
            scheduler.add(live[seq])
            computed[seq] = 0
        plan = scheduler.schedule()
        victim = live[rng.choice(list(live))] if live and rng.random() < 0.1 else None
        if victim is not None and scheduler.abort(victim):
            del live[victim.seq]
            blocks.release(victim.block_ids, unused_promise=victim.promised)
        if plan is None:
            continue
        assert sum(len(s.token_ids) for s in plan.steps) <= 13
        for step in plan.steps:
            assert step.start == computed[step.seq]
            computed[step.seq] += len(step.token_ids)
            assert len(live[step.seq].block_ids) * BLOCK >= computed[step.seq]
        hungry = [s.seq for s in plan.steps[rng.randrange(1, 5) :]] if rng.random() < 0.2 else []
        for step in plan.steps:
            computed[step.seq] -= len(step.token_ids) * (step.seq in hungry)
        for progress in scheduler.commit(plan, _without_memory_for(plan, *hungry)):
            if progress.finish_reason or progress.is_out:
                done = live.pop(progress.sequence.seq)
                blocks.release(done.block_ids, unused_promise=done.promised)
    for sequence in live.values():
        blocks.release(sequence.block_ids, unused_promise=sequence.promised)
    assert (blocks.num_free, blocks.num_promised) == (128, 0)
