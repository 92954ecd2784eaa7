"""EagerSteps: steps of any shape, over when the call returns: prompts, and decode where nothing is captured.

A step for which there is no memory has not happened. It runs again without its newest sequence, until it fits. One rank
of several can't do that alone: the group ends, and starts again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.allocator_fault import AllocatorFault, is_out_of_memory
from engine.batch import Batch, RunningSequences
from engine.cache import KVCache
from engine.chunk_graphs import ChunkGraphs
from engine.model.model import DeepSeekV4
from engine.plan import GUIDE_FAILED, NO_MEMORY, SequenceStep
from engine.rollback import Rollback
from engine.sampler import Sampler, SamplingState
from router.protocol import TokenLogprobs

log = logging.getLogger(__name__)

NOT_FINITE = "the hidden state is not finite: the cache or the weights hold NaN or infinite values"


class NoMemoryInGroup(Exception):
    """One rank of several has no memory for a step that others may carry out: they are out of step from here on."""


class Outcome(NamedTuple):
    """What a plan has brought, by the numbers of sequences and branches.

    tokens: (seq, token id) of those that sampled.   failed: (seq, reason).   logprobs: of those that ask for them.
    """

    tokens: list[tuple[int, int]]
    failed: list[tuple[int, str]]
    logprobs: Sequence[tuple[int, TokenLogprobs]] = ()


class EagerSteps:
    """Steps over one rank's cache and sequences. vocab_size: tokens that logits score.

    on_logits: see ModelRunner.   graphs: of short chunks, where there are any.
    """

    def __init__(self, cache: KVCache, sequences: RunningSequences, *, vocab_size: int) -> None:
        self._cache, self._sequences = cache, sequences
        self._sampler = Sampler(vocab_size, cache.device)
        self.on_logits: Callable[[int, int, Tensor], None] | None = None
        self.graphs: ChunkGraphs | None = None

    def run(self, model: DeepSeekV4, steps: list[SequenceStep], *, exhaust: int) -> Outcome:
        """Run steps, without the newest sequences if there is no memory for all. exhaust: see StepPlan."""
        failed: list[tuple[int, str]] = []
        fault: contextlib.AbstractContextManager[object] = (
            AllocatorFault(exhaust) if exhaust else contextlib.nullcontext()
        )
        while steps:
            rollback = Rollback(self._cache)
            try:
                with fault:
                    outcome = self._step(model, steps, rollback)
                return outcome._replace(failed=failed + outcome.failed)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if model.group.count > 1:
                    raise NoMemoryInGroup(
                        f"no memory for a step of {len(steps)} sequences ({error}): other ranks may have gone on, and "
                        "can't take back what they were sent. Lower max_num_batched_tokens or kv_cache_memory_gib"
                    ) from error
                log.warning("no memory for a step of %d sequences, tried with one less: %s", len(steps), error)
            # Not before here, where the error is gone, and with it the tensors that its frames held.
            rollback.undo()
            fault = contextlib.nullcontext()
            steps = self._sequences.unpack(steps)
            failed.append((steps.pop().seq, NO_MEMORY))
        return Outcome([], failed)

    def _step(self, model: DeepSeekV4, steps: list[SequenceStep], rollback: Rollback) -> Outcome:
        """Run steps, or raise what is_out_of_memory knows; see Rollback."""
        batch = self._sequences.pack(steps, self._cache.device)
        rollback.keep(batch)
        if self.graphs is not None and self.graphs.takes(batch):
            streams = self.graphs.run(batch)
        else:
            streams = model.forward(batch.token_ids, batch.ragged, self._cache)
        # Reading this back waits for all that the step has launched: what is told as computed may be pushed.
        is_finite = _finite_sequences(streams, batch)
        failed = [(seq, NOT_FINITE) for seq, fine in zip(batch.seqs, is_finite, strict=True) if not fine]
        outcome = self._sample(model, streams, batch, is_finite)
        return outcome._replace(failed=failed + outcome.failed)

    def _sample(self, model: DeepSeekV4, streams: Tensor, batch: Batch, is_finite: list[bool]) -> Outcome:
        """Draw the tokens of the sequences that sample, and of their branches."""
        if not batch.sampled:
            return Outcome([], [])
        logits = model.logits(streams[batch.last_rows])
        sound = logits.isfinite().all(1).tolist()
        failed: list[tuple[int, str]] = []
        rows: list[int] = []
        ends: list[int] = []
        drawn: list[tuple[int, SamplingState]] = []
        for row, index in enumerate(batch.sampled):
            seq, end = batch.seqs[index], sum(batch.ragged.spans[index])
            if self.on_logits is not None:
                self.on_logits(seq, end - 1, logits[row])
            if not is_finite[index]:
                continue
            if not sound[row]:
                failed.append((seq, f"the logits at position {end - 1} are not finite"))
                continue
            samplings = self._sequences[seq].samplings
            rows += [row] * len(samplings)
            ends += [end] * len(samplings)
            drawn += samplings
        if not drawn:
            return Outcome([], failed)
        choices = self._sampler.sample(
            logits if rows == list(range(len(logits))) else logits[rows], [state for _, state in drawn], ends
        )
        tokens: list[tuple[int, int]] = []
        logprobs: list[tuple[int, TokenLogprobs]] = []
        for (seq, state), choice in zip(drawn, choices, strict=True):
            if choice.error:
                failed.append((seq, GUIDE_FAILED + choice.error))
                continue
            state.add(choice.token_id)
            tokens.append((seq, choice.token_id))
            if choice.logprobs is not None:
                logprobs.append((seq, choice.logprobs))
        return Outcome(tokens, failed, logprobs)


def _finite_sequences(streams: Tensor, batch: Batch) -> list[bool]:
    """Return of each sequence whether its streams [T, n, H] are finite throughout.

    In one pass, without copies: a NaN makes both extremes of its row NaN, and an infinite value is one of them.
    """
    low, high = torch.aminmax(streams.flatten(1), dim=1)
    bad = (~(low.isfinite() & high.isfinite())).long()
    counts = torch.zeros(len(batch.seqs), dtype=torch.int64, device=bad.device)
    return [n == 0 for n in counts.index_add_(0, batch.ragged.sequence, bad).tolist()]
