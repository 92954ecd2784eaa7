"""Chunks of prompts before the first request, so that none waits for a kernel's code to be compiled or loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.model.config import ConfigError
from engine.plan import NO_MEMORY, SequenceStart, SequenceStep, StepPlan
from engine.runner import ModelRunner
from router.protocol import SamplingParams

_SAMPLINGS = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(
        max_tokens=1, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, frequency_penalty=0.1, num_logprobs=1
    ),
)


def warm_up(runner: ModelRunner, progress: Callable[[str], None] | None = None) -> None:
    """Run chunks of falling lengths on a prefill rank: at both ends of the longest sequence, and of many sequences.

    What its cache holds is lost. Raises ConfigError if there is no memory for the longest chunk.
    """
    config = runner.config
    longest = min(runner.max_blocks * config.block_size, runner.model_config.max_position_embeddings)
    tokens = min(config.max_num_batched_tokens, longest)
    while tokens:
        began = time.monotonic()
        for start in {0, longest - tokens}:
            _run(runner, [start], tokens)
        if (most := min(config.max_num_seqs, runner.cache.num_slots, tokens)) > 1:
            _run(runner, [0] * most, tokens // most)
        if progress is not None:
            progress(f"a chunk of {tokens} tokens: {time.monotonic() - began:.1f} s")
        tokens //= 2
    if config.pool_poison:
        runner.cache.poison()


def _run(runner: ModelRunner, starts: list[int], tokens: int) -> None:
    """Run `tokens` tokens of each of as many sequences as there are starts, all over the same blocks."""
    ids = [token % runner.model_config.vocab_size for token in range(tokens)]
    blocks, seqs = list(range(runner.max_blocks)), list(range(len(starts)))
    begun = [
        SequenceStart(seq=seq, slot=seq, block_ids=blocks, sampling=_SAMPLINGS[seq % 2], token_ids=ids[:1])
        for seq in seqs
    ]
    steps = [
        SequenceStep(seq=seq, start=start, token_ids=ids, new_block_ids=[], sample=True)
        for seq, start in zip(seqs, starts, strict=True)
    ]
    outcome = runner.run(StepPlan(number=0, starts=begun, steps=steps))
    runner.run(StepPlan(number=0, ends=seqs))
    if any(reason == NO_MEMORY for _, reason in outcome.failed):
        raise ConfigError(
            f"max_num_batched_tokens {runner.config.max_num_batched_tokens}: no memory for a chunk of "
            f"{tokens * len(starts)} tokens; lower it or kv_cache_memory_gib"
        )
