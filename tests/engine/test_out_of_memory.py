"""A step for which there is no memory, at any operation: it has not happened, and goes on without the newest."""

import random

import pytest
import torch

from engine.allocator_fault import AllocatorFault, is_out_of_memory
from engine.plan import NO_MEMORY, PREVIOUS, SequenceStart, SequenceStep, StepPlan
from router.protocol import SamplingParams

GREEDY = SamplingParams(max_tokens=999, temperature=0.0, presence_penalty=0.5)
LENGTHS = {1: 131, 2: 64, 3: 7, 4: 0}  # beyond the window and one HCA entry; at a CSA border; the newest begins


def prompt_of(seq):
    rng = random.Random(seq)
    return [rng.randrange(2, 384) for _ in range(200)]


class Bench:
    """A runner with sequences in the middle of their lives, which can be put back to where they were."""

    def __init__(self, runner):
        self.runner, self.logits = runner, {}
        runner.cache.poison()
        runner.on_logits = lambda seq, position, row: self.logits.__setitem__(seq, row.clone())
        starts = [
            SequenceStart(seq=seq, slot=seq - 1, block_ids=[2 * seq], sampling=GREEDY, token_ids=[]) for seq in LENGTHS
        ]
        runner.run(StepPlan(number=1, starts=starts))
        for seq, length in LENGTHS.items():
            if length:
                self.run([self.step(seq, 0, length, new=[2 * seq + 1] if length > 128 else [])])
        self._pools = self.pools()

    def pools(self):
        return {name: pool.clone() for name, pool in self.runner.cache.pools.items()}

    def reset(self):
        for name, pool in self._pools.items():
            self.runner.cache.pools[name].copy_(pool)
        for seq, length in LENGTHS.items():
            sequence = self.runner.sequences[seq]
            sequence.length = length
            sequence.block_ids = [2 * seq, 2 * seq + 1][: 1 + (length > 128)]
            sequence.sampling.num_outputs = 0
            sequence.sampling.output_counts.clear()
        self.logits.clear()

    def step(self, seq, start, count, *, new=()):
        tokens = prompt_of(seq)[start : start + count]
        return SequenceStep(seq=seq, start=start, token_ids=tokens, new_block_ids=list(new), sample=True)

    def run(self, steps, *, exhaust=0):
        return self.runner.run(StepPlan(number=2, steps=steps, exhaust=exhaust))[:2]


@pytest.fixture
def bench(make_pair):
    runner = make_pair("tiny").prefill.runner
    yield Bench(runner)
    runner.on_logits = None
    for seq in LENGTHS:
        runner.sequences.end(seq)


STEPS = {
    "one_token_each": {1: 1, 2: 1, 3: 1, 4: 1},
    "chunks": {1: 9, 2: 70, 3: 30, 4: 5},  # 2 grows into another block
}


def assert_untouched(bench, counts, places):
    steps = [bench.step(seq, LENGTHS[seq], count, new=[5] if seq == 2 else []) for seq, count in counts.items()]
    wanted, _ = bench.run(steps[:-1])
    later, _ = bench.run(steps[-1:])
    wanted_logits, wanted_pools = dict(bench.logits), bench.pools()
    for place in places:
        bench.reset()
        tokens, failed = bench.run(steps, exhaust=place)
        assert (tokens, failed) == (wanted, [(4, NO_MEMORY)]), place
        assert bench.run(steps[-1:]) == (later, []), place
        for seq in counts:
            assert torch.equal(bench.logits[seq], wanted_logits[seq]), (place, seq)
        for name, pool in bench.pools().items():
            assert torch.equal(pool, wanted_pools[name]), (place, name)


def num_operations(bench, counts):
    """Return how many there are, up to a few that come only once in a process."""
    counter = AllocatorFault(1 << 40)
    with counter:
        bench.run([bench.step(seq, LENGTHS[seq], count, new=[5] if seq == 2 else []) for seq, count in counts.items()])
    bench.reset()
    return (1 << 40) - counter._left


@pytest.mark.parametrize("counts", STEPS.values(), ids=STEPS)
def test_step_without_memory_leaves_every_byte_to_the_next_try(bench, counts):
    count = num_operations(bench, counts)
    assert_untouched(bench, counts, [1, *random.Random(7).sample(range(2, count - 50), 8)])


@pytest.mark.long
@pytest.mark.parametrize("counts", STEPS.values(), ids=STEPS)
def test_memory_may_fail_at_any_operation(bench, counts):
    assert_untouched(bench, counts, range(1, num_operations(bench, counts) - 50, 11))


def test_step_shrinks_until_it_fits(bench, monkeypatch):
    forward, sizes = bench.runner._model.forward, []

    def limited(token_ids, *rest):
        sizes.append(len(token_ids))
        if len(token_ids) > 2:
            raise torch.OutOfMemoryError("more than two")
        return forward(token_ids, *rest)

    monkeypatch.setattr(bench.runner._model, "forward", limited)
    tokens, failed = bench.run([bench.step(seq, LENGTHS[seq], 1) for seq in LENGTHS])
    assert sizes == [4, 3, 2]
    assert [seq for seq, _ in tokens] == [1, 2]
    assert failed == [(4, NO_MEMORY), (3, NO_MEMORY)]


def test_step_ahead_of_one_without_memory_has_not_happened_and_keeps_its_new_blocks(bench, monkeypatch):
    """The step that fills its block has no memory, and the one ahead of it needs another block."""
    bench.run([bench.step(2, LENGTHS[2], 63)])
    wanted = bench.pools()
    with monkeypatch.context() as patch:
        patch.setattr(bench.runner._model, "forward", lambda *_: torch.empty(1 << 50))
        assert bench.run([bench.step(2, 127, 1)]) == ([], [(2, NO_MEMORY)])
    ahead = SequenceStep(seq=2, start=128, token_ids=[PREVIOUS], new_block_ids=[5], sample=True)
    assert bench.run([ahead]) == ([], [(2, NO_MEMORY)])
    assert all(torch.equal(pool, wanted[name]) for name, pool in bench.pools().items())
    assert bench.runner.sequences[2].block_ids == [4, 5]
    for start in (127, 128):  # as the leader sends them again
        ((_, token),), failed = bench.run([bench.step(2, start, 1)])
        assert not failed and token >= 0


def test_nothing_fits_is_said_of_all(bench, monkeypatch):
    monkeypatch.setattr(bench.runner._model, "forward", lambda *_: torch.empty(1 << 50))
    tokens, failed = bench.run([bench.step(seq, LENGTHS[seq], 1) for seq in (1, 2)])
    assert (tokens, failed) == ([], [(2, NO_MEMORY), (1, NO_MEMORY)])
    monkeypatch.undo()
    assert len(bench.run([bench.step(seq, LENGTHS[seq], 1) for seq in (1, 2)])[0]) == 2


def test_other_errors_end_the_rank(bench, monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(bench.runner._model, "forward", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        bench.run([bench.step(1, LENGTHS[1], 1)])


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("out of resource: shared memory, Required: 200000"), False),
        (OSError("out of memory"), False),
    ],
    ids=repr,
)
def test_want_of_memory_is_told_from_other_errors(error, is_it):
    assert is_out_of_memory(error) is is_it


def test_failure_of_torch_s_allocator_on_the_cpu_is_one(bench):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
