"""Packing plans: what a rank remembers, and plans that contradict it."""

from pathlib import Path

import pytest

from engine.batch import PlanError, RunningSequences
from engine.grammar import Grammars
from engine.plan import PREVIOUS, SequenceStart, SequenceStep
from router.protocol import SamplingParams


@pytest.fixture
def running():
    grammars = Grammars(Path("tokenizer.json"), 100, (1,))
    return RunningSequences(num_blocks=10, num_slots=3, block_tokens=8, vocab_size=100, eos=(1,), grammars=grammars)


def start(seq, **options):
    return SequenceStart(
        **{"seq": seq, "slot": 0, "block_ids": [], "sampling": SamplingParams(max_tokens=5), **options}
    )


def step(seq, begin, count, *, new=(), sample=False):
    tokens = list(range(begin, begin + count))
    return SequenceStep(seq=seq, start=begin, token_ids=tokens, new_block_ids=list(new), sample=sample)


def test_a_mixed_plan_becomes_one_packed_batch(running):
    running.start(start(7, slot=2, block_ids=[4, 5]))
    running.start(start(8, slot=1, block_ids=[9]))
    running.start(start(9, slot=0))
    batch = running.pack([step(7, 10, 3, sample=True), step(8, 4, 1), step(9, 0, 9, new=[3, 1], sample=True)], "cpu")
    assert batch.seqs == (7, 8, 9)
    assert batch.token_ids.tolist() == [10, 11, 12, 4, *range(9)]
    assert batch.ragged.positions.tolist() == [10, 11, 12, 4, *range(9)]
    assert batch.ragged.query_start.tolist() == [0, 3, 4, 13]
    assert batch.ragged.seq_lens.tolist() == [13, 5, 9]
    assert batch.ragged.slots.tolist() == [2, 1, 0]
    assert batch.ragged.block_table.tolist() == [[4, 5], [9, -1], [3, 1]]
    assert batch.sampled == (0, 2)
    assert batch.last_rows.tolist() == [2, 12]


def test_blocks_and_length_carry_over_to_the_next_step(running):
    running.start(start(1, block_ids=[6]))
    running.pack([step(1, 0, 8)], "cpu")
    batch = running.pack([step(1, 8, 1, new=[2])], "cpu")
    assert batch.ragged.block_table.tolist() == [[6, 2]]
    assert running[1].length == 9


def ahead(seq, begin, *, new=()):
    return SequenceStep(seq=seq, start=begin, token_ids=[PREVIOUS], new_block_ids=list(new), sample=True)


def test_a_step_ahead_runs_the_token_that_was_drawn_last(running):
    running.start(start(1, block_ids=[6]))
    first = [step(1, 0, 4, sample=True)]
    running.pack(first, "cpu")
    running.note(first, {1: 77}, {})
    batch = running.pack([ahead(1, 4)], "cpu")
    assert (batch.token_ids.tolist(), batch.ragged.spans) == ([77], ((4, 1),))


def test_a_step_ahead_of_a_step_that_drew_nothing_is_refused(running):
    running.start(start(1, block_ids=[6]))
    first = [step(1, 0, 4)]
    running.pack(first, "cpu")
    running.note(first, {}, {})
    with pytest.raises(PlanError, match="step before, which has drawn none"):
        running.pack([ahead(1, 4)], "cpu")


def test_what_failed_is_the_problem_of_the_step_ahead_alone(running):
    running.start(start(1, block_ids=[6]))
    running.note([step(1, 0, 4)], {}, {1: "NaN"})
    assert running.problem_of(ahead(1, 4)) == "NaN"
    assert running.problem_of(step(1, 0, 4)) == ""


def test_a_step_may_end_after_its_sequence(running):
    running.start(start(1, block_ids=[6]))
    first = [step(1, 0, 4, sample=True)]
    running.pack(first, "cpu")
    running.end(1)
    running.note(first, {1: 77}, {})
    assert len(running) == 0


def test_a_sequence_that_arrived_from_prefill_begins_anywhere(running):
    running.start(start(1, block_ids=[6, 7, 8], token_ids=list(range(21)), num_outputs=1))
    assert running.pack([step(1, 20, 1)], "cpu").ragged.spans == ((20, 1),)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([step(2, 0, 1)], "sequence 2 is not running"),
        ([step(1, 0, 1), step(1, 1, 1)], "two steps"),
        ([step(1, 5, 1)], "its cache holds 4"),
        ([step(1, 4, 0)], "step of 0 tokens"),
        ([step(1, 4, 5)], "9 tokens need 2 blocks of 8, it holds 1"),
        ([step(1, 4, 1, new=[10])], "block 10 of a cache with 10"),
        ([step(1, 4, 1, new=[-1])], "block -1"),
    ],
)
def test_plans_that_contradict_the_rank_are_refused(running, steps, message):
    running.start(start(1, block_ids=[6]))
    running.pack([step(1, 0, 4)], "cpu")
    with pytest.raises(PlanError, match=message):
        running.pack(steps, "cpu")


@pytest.mark.parametrize(
    ("options", "message"), [({"slot": 3}, "slot 3 of a cache with 3"), ({"block_ids": [0, 99]}, "block 99")]
)
def test_starts_outside_the_cache_are_refused(running, options, message):
    with pytest.raises(PlanError, match=message):
        running.start(start(1, **options))


def test_a_number_is_taken_until_it_ends(running):
    running.start(start(1))
    with pytest.raises(PlanError, match="running already"):
        running.start(start(1))
    running.end(1)
    assert len(running) == 0
    with pytest.raises(PlanError, match="not running"):
        running.end(1)


def test_token_ids_outside_the_vocabulary_are_the_sequence_s_own_problem(running):
    bad = SequenceStep(seq=1, start=0, token_ids=[5, 100], new_block_ids=[], sample=True)
    assert "token id 100" in running.problem_of(bad)
    assert running.problem_of(step(1, 0, 3)) == ""
