"""SteadyBatch: sequences that decode together for ever at about one context, as a leader would drive them.

Each step is launched before the tokens of the one before are collected. The cache holds what it held: nobody prefills.
Sequences stand at different positions within what the slowest compressor pools, so that entries are completed in every
step by some of them, as among requests of strangers; a sequence that has grown by SPAN tokens starts over.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine.plan import PREVIOUS, SequenceStart, SequenceStep, StepPlan
from kernels.table import counted
from router.protocol import SamplingParams

if TYPE_CHECKING:
    from engine.runner import ModelRunner, Ticket

SPAN = 512
_APART = 128
_STRIDE = 37  # coprime to every compression ratio


class StepFailed(RuntimeError):
    """A sequence of the batch has failed; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """ms: from the tokens of the step before to its own, on the host. device_ms, gap_ms: of Ticket; None on the CPU."""

    ms: float
    device_ms: float | None
    gap_ms: float | None


class SteadyBatch:
    """`batch` sequences at `context` tokens each in a runner of its own; `numbers` gives them their names there."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        batch: int,
        context: int,
        numbers: Iterator[int],
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ValueError for what the runner's cache or the model has no room for."""
        cache, longest = runner.cache, runner.model_config.max_position_embeddings
        blocks = blocks_for(cache.layout.block_tokens, context)
        if batch * blocks > cache.num_blocks or batch > cache.num_slots:
            raise ValueError(
                f"batch {batch} at context {context}: needs {batch * blocks} blocks and {batch} slots, the cache has "
                f"{cache.num_blocks} and {cache.num_slots}; lower one of the two"
            )
        if context + SPAN > longest:
            raise ValueError(
                f"context {context}: the model ends at {longest} tokens, {SPAN} of them to grow by; lower it"
            )
        self.batch, self.context = batch, context
        self._runner, self._numbers, self._clock = runner, numbers, clock
        self._random = random.Random(seed)
        ids = self._random.sample(range(cache.num_blocks), batch * blocks)
        self._blocks = [ids[at * blocks : (at + 1) * blocks] for at in range(batch)]
        apart = min(_APART, context)
        self._first = [context - apart + at * _STRIDE % apart for at in range(batch)]
        self._at = list(self._first)
        self._seqs = [0] * batch
        self._number = 0

    def run(self, steps: int, *, on_step: Callable[[int], None] = lambda done: None) -> list[Step]:
        """Run one step, then measure `steps` more; nothing is under way afterwards. Raises StepFailed."""
        found: list[Step] = []
        ahead, last = self._runner.launch(self._plan()), 0.0
        for done in range(steps + 1):
            ticket = ahead
            if done < steps:
                ahead = self._runner.launch(self._plan())
            self._collect(ticket)
            now = self._clock()
            if done:
                found.append(Step(1000 * (now - last), ticket.gpu_ms, ticket.gap_ms))
                on_step(done)
            last = now
        return found

    def end(self) -> None:
        """Take all sequences out of the runner."""
        self._number += 1
        self._runner.run(StepPlan(number=self._number, ends=[seq for seq in self._seqs if seq]))
        self._seqs = [0] * self.batch

    def _plan(self) -> StepPlan:
        starts, steps, ends = [], [], []
        for at in range(self.batch):
            tokens = [PREVIOUS]
            if not self._seqs[at] or self._at[at] == self.context + SPAN:
                ends += [self._seqs[at]] if self._seqs[at] else []
                starts.append(self._start(at))
                tokens = [self._random.randrange(self._runner.model_config.vocab_size)]
            steps.append(
                SequenceStep(seq=self._seqs[at], start=self._at[at], token_ids=tokens, new_block_ids=[], sample=True)
            )
            self._at[at] += 1
        self._number += 1
        return StepPlan(number=self._number, starts=starts, steps=steps, ends=ends)

    def _start(self, at: int) -> SequenceStart:
        self._seqs[at], self._at[at] = next(self._numbers), self._first[at]
        sampling = SamplingParams(max_tokens=1 << 30, seed=self._seqs[at], ignore_eos=True)
        return SequenceStart(seq=self._seqs[at], slot=at, block_ids=self._blocks[at], sampling=sampling)

    def _collect(self, ticket: Ticket) -> None:
        failed = self._runner.collect(ticket).failed
        if failed:
            raise StepFailed(
                f"batch {self.batch} at context {self.context}: {counted(len(failed), 'sequence')} failed, the first "
                f"because {failed[0][1]}"
            )


def blocks_for(block_tokens: int, context: int) -> int:
    """Return how many blocks of so many tokens a sequence of a SteadyBatch holds."""
    return -(-(context + SPAN) // block_tokens)
