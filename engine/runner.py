"""ModelRunner: runs StepPlans on one rank, for prefill and decode alike.

It owns the model, the cache and what the rank remembers of its sequences. A decode step is a plan whose steps have one
token each; there is no other difference.

Failing closed: a sequence whose activations or logits are not finite is reported as failed and gets no token; its
neighbours go on, since no operation mixes rows of different sequences.

A step for which there is no memory has not happened. It runs again without its newest sequence, until it fits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.allocator_fault import AllocatorFault, is_out_of_memory
from engine.batch import Batch, RunningSequences
from engine.cache import KVCache
from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.model.config import load_config, model_fingerprint
from engine.model.layout import build_layout
from engine.model.model import DeepSeekV4
from engine.model.moe import keeps_packed
from engine.model.weights import load_weights
from engine.plan import CACHE_CORRUPT, GUIDE_FAILED, NO_MEMORY, SequenceStart, SequenceStep, StepPlan
from engine.rollback import Rollback
from engine.sampler import Sampler, SamplingState
from kv_transfer.checksum import units_checksum
from router.protocol import TokenLogprobs

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Outcome(NamedTuple):
    """What a plan has brought, by the numbers of sequences and branches.

    tokens: (seq, token id) of those that sampled.   failed: (seq, reason).   logprobs: of those that ask for them.
    """

    tokens: list[tuple[int, int]]
    failed: list[tuple[int, str]]
    logprobs: Sequence[tuple[int, TokenLogprobs]] = ()


@dataclasses.dataclass(slots=True)
class Ticket:
    """A plan that was launched. After `collect`, unless they are not measured:

    gpu_ms: what its step took on the device.   gap_ms: how long the device was idle between the step before and this.
    """

    outcome: Outcome
    gpu_ms: float | None = None
    gap_ms: float | None = None

    @property
    def is_ready(self) -> bool:
        """`collect` would not wait."""
        return True


class ModelRunner:
    """One rank's model and cache.

    on_logits: if set, called with (seq, position of the last token, its logits [V] float32) for each sequence that
    samples, before it does: a seam for tests.
    """

    def __init__(self, config: EngineConfig, *, num_blocks: int, num_slots: int, rank: int = 0) -> None:
        """Allocate the cache. Raises ConfigError for a model that can't be served, ValueError for a bad block size."""
        self.config, self._rank = config, rank
        self.model_config = load_config(config.model)
        self.model_fingerprint = model_fingerprint(config.model)
        self.device = torch.device(config.device)
        layout = build_layout(
            self.model_config,
            block_tokens=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            index_cache_dtype=config.index_cache_dtype,
        )
        self.cache = KVCache(layout, num_blocks, num_slots, self.device)
        if config.pool_poison:
            self.cache.poison()
        self._grammars = Grammars(
            Path(config.model) / "tokenizer.json", self.model_config.vocab_size, self.model_config.eos_token_ids
        )
        self.sequences = RunningSequences(
            num_blocks=num_blocks,
            num_slots=num_slots,
            block_tokens=config.block_size,
            vocab_size=self.model_config.vocab_size,
            eos=self.model_config.eos_token_ids,
            grammars=self._grammars,
        )
        self.on_logits: Callable[[int, int, Tensor], None] | None = None
        self._corrupt: dict[int, str] = {}  # sequences whose cache is not what was sent
        self._sampler = Sampler(self.model_config.vocab_size, self.device)
        self._model: DeepSeekV4 | None = None

    def load(self, progress: Callable[[str], None] | None = None) -> None:
        """Read the weights; `progress` gets a line of text now and then. Raises WeightsError."""
        loaded = load_weights(
            self.config.model,
            self.model_config,
            dtype=DTYPES[self.config.dtype],
            device=self.device,
            keeps_packed=keeps_packed(self.device),
            progress=progress,
        )
        tensors = {name: tensor.to(self.device) for name, tensor in loaded.tensors.items()}
        self._model = DeepSeekV4(self.model_config, tensors, index_hadamard=self.config.uses_hadamard)
        if self.device.type == "cuda":  # elsewhere a step takes longer than the tables do
            self._grammars.warm()

    def launch(self, plan: StepPlan) -> Ticket:
        """Begin a plan, behind those begun before. Raises as `run` does."""
        return Ticket(self._carry_out(plan))

    def collect(self, ticket: Ticket) -> Outcome:
        """Wait for a plan's tokens. Tickets are collected in order, and at most two are out."""
        return ticket.outcome

    def run(self, plan: StepPlan) -> Outcome:
        """Carry out a plan.

        Ends leave first, then starts enter, then steps run. A failed sequence stays until the plan that ends it; one
        that failed for NO_MEMORY is as it was before the plan.
        Raises PlanError if leader and rank are out of step.
        """
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def _carry_out(self, plan: StepPlan) -> Outcome:
        for seq in plan.ends:
            self.sequences.end(seq)
            self._corrupt.pop(seq, None)
        for start in plan.starts:
            self.sequences.start(start)
            if start.checksums and (problem := self._compare(start)):
                self._corrupt[start.seq] = problem
        outcome = self._steps(plan)
        self.sequences.note(plan.steps, dict(outcome.tokens), dict(outcome.failed))
        return outcome

    def _steps(self, plan: StepPlan) -> Outcome:
        """Run those steps of a plan that can run and for which there is memory."""
        failed: list[tuple[int, str]] = []
        steps: list[SequenceStep] = []
        for step in plan.steps:
            if problem := self._corrupt.get(step.seq) or self.sequences.problem_of(step):
                self.sequences.skip(step)
                failed.append((step.seq, problem))
            else:
                steps.append(step)
        if not steps:
            return Outcome([], failed)
        if self._model is None:
            raise RuntimeError("the model is not loaded: call load() before run()")
        fault: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if plan.exhaust:
            fault = AllocatorFault(plan.exhaust)
        while steps:
            rollback = Rollback(self.cache)
            try:
                with fault:
                    outcome = self._step(self._model, steps, rollback)
                return outcome._replace(failed=failed + outcome.failed)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                log.warning("no memory for a step of %d sequences, tried with one less: %s", len(steps), error)
            # Not before here, where the error is gone, and with it the tensors that its frames held.
            rollback.undo()
            fault = contextlib.nullcontext()
            steps = self.sequences.unpack(steps)
            failed.append((steps.pop().seq, NO_MEMORY))
        return Outcome([], failed)

    def _compare(self, start: SequenceStart) -> str:
        """Return what of a cache that came from elsewhere is not what was sent, "" if all is."""
        for group in self.cache.layout.groups:
            units = start.block_ids if group.unit == "block" else [start.slot]
            sent = start.checksums[self._rank].get(group.name)
            if sent is None:
                return f"{CACHE_CORRUPT}{group.name} came without a checksum"
            try:
                landed = units_checksum(self.cache.pools[group.name], units)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return f"no memory to compare the cache that arrived ({group.name})"
            if sent != landed:
                problem = f"{CACHE_CORRUPT}{group.name}: checksum {landed:016x}, sent {sent:016x}"
                log.error("sequence %d, %ss %s: %s", start.seq, group.unit, units, problem)
                return problem
        return ""

    def _step(self, model: DeepSeekV4, steps: list[SequenceStep], rollback: Rollback) -> Outcome:
        """Run steps, or raise what is_out_of_memory knows; see Rollback."""
        batch = self.sequences.pack(steps, self.device)
        rollback.keep(batch)
        streams = model.forward(batch.token_ids, batch.ragged, self.cache)
        is_finite = self._finite_sequences(streams, batch)
        failed = [
            (seq, "the hidden state is not finite: the cache or the weights hold NaN or infinite values")
            for seq, fine in zip(batch.seqs, is_finite, strict=True)
            if not fine
        ]
        outcome = self._sample(model, streams, batch, is_finite)
        return outcome._replace(failed=failed + outcome.failed)

    def _finite_sequences(self, streams: Tensor, batch: Batch) -> list[bool]:
        bad = (~streams.isfinite().flatten(1).all(1)).long()
        return [
            n == 0
            for n in torch.zeros(len(batch.seqs), dtype=torch.int64, device=bad.device)
            .index_add_(0, batch.ragged.sequence, bad)
            .tolist()
        ]

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
            samplings = self.sequences[seq].samplings
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
