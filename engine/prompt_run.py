"""PromptRun: one prompt through a runner of its own, chunk after chunk, as a leader would send it."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine.plan import SequenceStart, SequenceStep, StepPlan
from engine.steady_batch import StepFailed
from router.protocol import SamplingParams

if TYPE_CHECKING:
    from engine.runner import ModelRunner


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` tokens from position `start` on. ms: from the plan to its result, on the host."""

    start: int
    tokens: int
    ms: float


class PromptRun:
    """A prompt of `prompt` random tokens in chunks of `chunk`; `numbers` gives it names in the runner.

    Its blocks are in random order, as after a while of serving.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        prompt: int,
        chunk: int,
        numbers: Iterator[int],
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ValueError for a prompt that the runner's cache has no room for."""
        cache = runner.cache
        blocks = cache.layout.num_blocks_for(prompt)
        if blocks > cache.num_blocks:
            raise ValueError(
                f"prompt of {prompt} tokens: needs {blocks} blocks, the cache has {cache.num_blocks}; shorten it"
            )
        self._runner, self._numbers, self._clock = runner, numbers, clock
        draw = random.Random(seed)
        self._blocks = draw.sample(range(cache.num_blocks), blocks)
        self._tokens = [draw.randrange(runner.model_config.vocab_size) for _ in range(prompt)]
        self._starts = list(range(0, prompt, chunk))
        self._chunk = chunk

    def run(self) -> list[Chunk]:
        """Run the prompt and sample after its last token; return its chunks. Raises StepFailed."""
        return self._run(self._starts)

    def warm(self) -> None:
        """Run the first chunk, and the last as if the others had been. Raises StepFailed."""
        for start in {self._starts[0], self._starts[-1]}:
            self._run([start])

    def run_last(self) -> Chunk:
        """Run the last chunk only, on what the cache holds. Raises StepFailed."""
        return self._run(self._starts[-1:])[0]

    def _run(self, starts: list[int]) -> list[Chunk]:
        seq, found = next(self._numbers), []
        sampling = SamplingParams(max_tokens=1, seed=seq, ignore_eos=True)
        begin = [SequenceStart(seq=seq, slot=0, block_ids=self._blocks, sampling=sampling)]
        for start in starts:
            tokens = self._tokens[start : start + self._chunk]
            is_last = start == self._starts[-1]
            step = SequenceStep(seq=seq, start=start, token_ids=tokens, new_block_ids=[], sample=is_last)
            began = self._clock()
            outcome = self._runner.run(StepPlan(number=start, starts=begin, steps=[step]))
            found.append(Chunk(start, len(tokens), 1000 * (self._clock() - began)))
            begin = []
            if outcome.failed:
                raise StepFailed(f"the chunk of {len(tokens)} tokens at {start} failed: {outcome.failed[0][1]}")
        self._runner.run(StepPlan(number=0, ends=[seq]))
        return found
