"""A batch that decodes for ever: launched one step ahead, at a steady context, within its own blocks."""

import itertools

import pytest

from engine import steady_batch
from engine.plan import PREVIOUS
from engine.steady_batch import SteadyBatch, StepFailed

NUMBERS = itertools.count(1)


class Recorder:
    """A runner that notes what it is asked. `fails`: number of the plan whose sequences fail."""

    def __init__(self, runner, fails=-1):
        self._runner, self.fails = runner, fails
        self.cache, self.model_config = runner.cache, runner.model_config
        self.events, self.plans = [], []

    def launch(self, plan):
        self.events.append(("launch", plan.number))
        self.plans.append(plan)
        return plan.number, self._runner.launch(plan)

    def collect(self, launched):
        number, ticket = launched
        self.events.append(("collect", number))
        outcome = self._runner.collect(ticket)
        outcome = outcome._replace(failed=[(1, "no luck")]) if number == self.fails else outcome
        ticket.outcome = outcome
        return outcome

    def run(self, plan):
        return self._runner.run(plan)


class Launched(tuple):
    gpu_ms = gap_ms = None


@pytest.fixture(scope="module")
def runner(oracle, harness):
    return harness.make_runner(oracle.folder("tiny"), role="decode", num_blocks=12, num_slots=3)


@pytest.fixture
def recorder(runner, monkeypatch):
    made = Recorder(runner)
    launch = made.launch
    made.launch = lambda plan: Launched(launch(plan))
    return made


def steady(recorder, **options):
    return SteadyBatch(recorder, **{"batch": 3, "context": 200, "numbers": NUMBERS} | options)


@pytest.fixture(autouse=True)
def short_span(monkeypatch):
    monkeypatch.setattr(steady_batch, "SPAN", 8)


def test_each_step_is_launched_before_the_one_before_is_collected_and_none_is_left_over(recorder):
    batch = steady(recorder)
    assert len(batch.run(3)) == 3
    batch.end()
    assert recorder.events == [
        ("launch", 1), ("launch", 2), ("collect", 1), ("launch", 3), ("collect", 2), ("launch", 4), ("collect", 3),
        ("collect", 4),
    ]  # fmt: skip
    assert [step.token_ids for step in recorder.plans[-1].steps] == [[PREVIOUS]] * 3


def test_positions_of_the_batch_lie_apart_and_one_behind_the_other(recorder):
    batch = steady(recorder)
    batch.run(2)
    batch.end()
    first, *_, last = [[step.start for step in plan.steps] for plan in recorder.plans]
    assert len({start % 4 for start in first}) == 3
    assert all(72 <= start < 200 for start in first)
    assert last == [start + 2 for start in first]


def test_a_sequence_that_has_grown_enough_starts_over_in_its_slot_and_blocks(recorder):
    batch = steady(recorder, batch=1, context=1)
    batch.run(12)
    batch.end()
    starts = [(number, start) for number, plan in enumerate(recorder.plans) for start in plan.starts]
    assert [number for number, _ in starts] == [0, 9]
    (_, before), (_, after) = starts
    assert recorder.plans[9].ends == [before.seq]
    assert after.seq != before.seq
    assert (after.slot, after.block_ids) == (before.slot, before.block_ids)


def test_no_two_sequences_share_a_block(recorder):
    batch = steady(recorder, batch=3, context=400)
    batch.run(1)
    batch.end()
    blocks = [block for start in recorder.plans[0].starts for block in start.block_ids]
    assert len(blocks) == len(set(blocks)) == 12


def test_what_does_not_fit_is_refused_with_what_there_is(recorder):
    with pytest.raises(ValueError, match="needs 16 blocks and 4 slots, the cache has 12 and 3"):
        steady(recorder, batch=4, context=400)
    with pytest.raises(ValueError, match="the model ends at 4096 tokens"):
        steady(recorder, batch=0, context=4090)


def test_a_failed_sequence_ends_the_measurement_and_says_why(recorder):
    recorder.fails = 2
    batch = steady(recorder)
    with pytest.raises(StepFailed, match="batch 3 at context 200: 1 sequence failed, the first because no luck"):
        batch.run(3)
    batch.end()
