"""Prefill and decode as two ModelRunners in one process, with the cache copied from one to the other.

The copy moves what a push moves: every block that the prompt fills, group by group, and the whole slot record. Block
ids and slots differ on the two sides, and every pool is filled with NaN before each request, so that whatever was
not moved, or was moved to a wrong place, turns the logits into NaN.
"""

from __future__ import annotations

import dataclasses
import random

import torch

import engine.model.moe
import kernels.indexer
from engine.config import EngineConfig
from engine.plan import SequenceStart, SequenceStep, StepPlan
from engine.runner import ModelRunner
from router.protocol import SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def make_runner(folder, *, num_blocks=24, num_slots=4, group=None, **options):
    """Return a loaded float32 runner; `options` override EngineConfig. group: of the ranks it is one of."""
    chosen = {"role": "prefill", "dtype": "float32", "kv_cache_dtype": "fp32", "block_size": 128, **options}
    config, rank = EngineConfig(model=str(folder), **chosen), 0 if group is None else group.index
    runner = ModelRunner(config, num_blocks=num_blocks, num_slots=num_slots, rank=rank, group=group)
    runner.load()
    return runner


@dataclasses.dataclass
class Running:
    """A sequence on one side. logits: one row per token that was sampled; failed: the runner's reason."""

    seq: int
    slot: int
    blocks: list[int]
    length: int = 0
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    failed: str = ""


class Side:
    """One runner, with the small part of a leader that tests need: numbers, blocks, slots."""

    def __init__(self, runner, seed=0):
        self.runner = runner
        self._random = random.Random(seed)
        self._next_seq = 1
        self._plan = 0
        self._free_blocks = list(range(runner.cache.num_blocks))
        self._free_slots = list(range(runner.cache.num_slots))
        self._random.shuffle(self._free_blocks)
        self._random.shuffle(self._free_slots)
        self._running = {}

    def _keep(self, seq, position, logits):
        running = self._running[seq]
        assert position == running.length - 1
        running.logits.append(logits.clone())

    def start(self, token_ids, *, num_tokens, sampling=GREEDY, num_outputs=0):
        """Enter a sequence with blocks for `num_tokens` tokens; returns what is kept of it."""
        count = self.runner.cache.layout.num_blocks_for(num_tokens)
        running = Running(self._next_seq, self._free_slots.pop(), [self._free_blocks.pop() for _ in range(count)])
        self._next_seq += 1
        self._running[running.seq] = running
        self.run(
            starts=[
                SequenceStart(
                    seq=running.seq,
                    slot=running.slot,
                    block_ids=running.blocks,
                    sampling=sampling,
                    token_ids=list(token_ids),
                    num_outputs=num_outputs,
                )
            ]
        )
        return running

    def run(self, starts=(), steps=(), ends=()):
        """Run one plan."""
        self._plan += 1
        for step in steps:
            self._running[step.seq].length = step.start + len(step.token_ids)
        plan = StepPlan(number=self._plan, starts=list(starts), steps=list(steps), ends=list(ends))
        self.runner.on_logits = self._keep
        tokens, failed, _ = self.runner.run(plan)
        for seq, token in tokens:
            self._running[seq].tokens.append(token)
        for seq, reason in failed:
            self._running[seq].failed = reason

    def step(self, *work):
        """Run one batch: work is (running, token ids, sample)."""
        self.run(steps=[self._step(r, ids, sample) for r, ids, sample in work])

    def _step(self, running, token_ids, sample):
        end = running.length + len(token_ids)
        new = []
        while end > (len(running.blocks) + len(new)) * self.runner.config.block_size:
            new.append(self._free_blocks.pop())
        running.blocks = [*running.blocks, *new]
        return SequenceStep(
            seq=running.seq, start=running.length, token_ids=list(token_ids), new_block_ids=new, sample=sample
        )

    def prefill(self, running, token_ids, chunk):
        """Run a prompt in chunks of `chunk` tokens, sampling after the last."""
        while running.length < len(token_ids):
            piece = token_ids[running.length : running.length + chunk]
            self.step((running, piece, running.length + len(piece) == len(token_ids)))

    def end(self, running):
        """Let a sequence go; its blocks and slot keep their stale bytes."""
        self.run(ends=[running.seq])
        del self._running[running.seq]
        self._free_blocks.extend(running.blocks)
        self._free_slots.append(running.slot)
        self._random.shuffle(self._free_blocks)
        self._random.shuffle(self._free_slots)


def move_cache(source, from_running, target, to_running, *, skip=()):
    """Copy a sequence's cache, group by group. skip: names of groups or of state regions that are left out."""
    assert len(from_running.blocks) == len(to_running.blocks)
    for group in source.cache.layout.groups:
        if group.name in skip:
            continue
        here, there = source.cache.pools[group.name], target.cache.pools[group.name]
        if group.unit == "block":
            there[to_running.blocks] = here[from_running.blocks]
            continue
        for region in group.regions:
            if region.name not in skip:
                part = slice(region.offset, region.offset + region.num_bytes)
                there[to_running.slot, part] = here[from_running.slot, part]


@dataclasses.dataclass
class Served:
    """logits [n, V]: after the prompt, then after each decoded token.   tokens: sampled, as many.   failed: why."""

    logits: torch.Tensor
    tokens: list[int]
    failed: str


class Pair:
    """A prefill and a decode runner of the same model."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode = Side(prefill, seed=1), Side(decode, seed=2)

    def serve(self, prompt, outputs, *, chunk, skip=(), poison=True):
        """Prefill `prompt`, hand over, decode: outputs[i] is fed as the i-th output token (teacher forcing).

        Returns len(outputs) rows of logits, the first from the prefill side.
        """
        prompt, outputs = list(map(int, prompt)), list(map(int, outputs))
        if poison:
            self.prefill.runner.cache.poison()
            self.decode.runner.cache.poison()
        source = self.prefill.start(prompt, num_tokens=len(prompt))
        self.prefill.prefill(source, prompt, chunk)
        target = self.decode.start([*prompt, outputs[0]], num_tokens=len(prompt), num_outputs=1)
        target.length = len(prompt)
        move_cache(self.prefill.runner, source, self.decode.runner, target, skip=skip)
        self.prefill.end(source)
        for token in outputs[:-1]:
            self.decode.step((target, [token], True))
            if target.failed:
                break
        self.decode.end(target)
        logits = torch.stack(source.logits + target.logits)
        return Served(logits, source.tokens + target.tokens, source.failed or target.failed)


def colocated(side, prompt, outputs, *, chunk, poison=True):
    """The same through one runner, without any hand-over."""
    prompt, outputs = list(map(int, prompt)), list(map(int, outputs))
    if poison:
        side.runner.cache.poison()
    running = side.start(prompt, num_tokens=len(prompt))
    side.prefill(running, prompt, chunk)
    for token in outputs[:-1]:
        side.step((running, [token], True))
    side.end(running)
    return Served(torch.stack(running.logits), running.tokens, running.failed)


def distance(a, b):
    """Return max |a - b|; NaN anywhere counts as infinitely far."""
    gap = (a.float() - b.float()).abs()
    return float("inf") if not bool(gap.isfinite().all()) else float(gap.max())


class SelectionMargins:
    """Records the smallest gap between a chosen and the next expert, or index entry, while it is entered.

    Where that gap is below what float32 sums differ by between two shapes of the same product (scores move by less than
    1e-6 here), either choice is right and the logits of the two differ. Such prompts compare nothing.
    """

    ENOUGH = 5e-6

    def __init__(self):
        self.smallest = float("inf")

    def __enter__(self):
        self._route, self._select = engine.model.moe.route, kernels.indexer.select_top_k_reference

        def route(scores, *, bias=None, chosen=None, top_k, scaling):
            if chosen is None:
                self._record(scores if bias is None else scores + bias, top_k)
            return self._route(scores, bias=bias, chosen=chosen, top_k=top_k, scaling=scaling)

        def select(scores, k):
            self._record(scores, k)
            return self._select(scores, k)

        engine.model.moe.route, kernels.indexer.select_top_k_reference = route, select
        return self

    def __exit__(self, *_):
        engine.model.moe.route, kernels.indexer.select_top_k_reference = self._route, self._select

    def _record(self, scores, k):
        if scores.shape[1] > k:
            best = scores.sort(-1, descending=True).values
            self.smallest = min(self.smallest, float((best[:, k - 1] - best[:, k]).min()))
