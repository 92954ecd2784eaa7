"""From a StepPlan to the tensors of one step: what a rank remembers per sequence, and packing.

A plan carries only what is new. RunningSequences keeps the rest: block table, slot, computed length, sampling state. It
checks what the leader says, so that a wrong plan fails one sequence, or loudly, and never reads somebody else's rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from engine.grammar import Grammars
from engine.plan import PREVIOUS, SequenceStart, SequenceStep
from engine.sampler import SamplingState
from kernels.ragged import RaggedBatch
from router.protocol import SamplingParams


class PlanError(Exception):
    """A plan that contradicts what the rank knows: the leader and this rank are out of step."""


@dataclasses.dataclass(slots=True)
class RunningSequence:
    """One sequence of this rank. length: tokens in its cache; None until its first step says where it begins.

    branches: numbers and sampling states of more answers to its prompt.
    sampled: the token that its last step has drawn, None if that drew none.   problem: why that step failed, "" if not.
    """

    seq: int
    slot: int
    block_ids: list[int]
    sampling: SamplingState
    length: int | None = None
    branches: tuple[tuple[int, SamplingState], ...] = ()
    sampled: int | None = None
    problem: str = ""

    @property
    def samplings(self) -> tuple[tuple[int, SamplingState], ...]:
        """What draws a token where this sequence samples, each with the number it is drawn for."""
        return ((self.seq, self.sampling), *self.branches)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one step over B sequences.

    token_ids [T] int64.   seqs: sequence numbers in the order of `ragged`.   sampled: indices into seqs of those that
    sample; last_rows [len(sampled)] int64: the row of each one's last token.
    """

    seqs: tuple[int, ...]
    token_ids: Tensor
    ragged: RaggedBatch
    sampled: tuple[int, ...]
    last_rows: Tensor


class RunningSequences:
    """The sequences that this rank knows, by number."""

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        block_tokens: int,
        vocab_size: int,
        eos: Sequence[int],
        grammars: Grammars,
    ) -> None:
        self._num_blocks, self._num_slots = num_blocks, num_slots
        self._block_tokens, self._vocab_size = block_tokens, vocab_size
        self._eos = tuple(eos)
        self._grammars = grammars
        self._running: dict[int, RunningSequence] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __getitem__(self, seq: int) -> RunningSequence:
        try:
            return self._running[seq]
        except KeyError:
            raise PlanError(f"sequence {seq} is not running on this rank: it was never started, or has ended") from None

    def start(self, start: SequenceStart) -> None:
        """Let a sequence in. Raises PlanError if its number is taken or its slot or a block lies outside the cache."""
        if start.seq in self._running:
            raise PlanError(f"sequence {start.seq} is running already")
        if not 0 <= start.slot < self._num_slots:
            raise PlanError(f"sequence {start.seq}: slot {start.slot} of a cache with {self._num_slots}")
        self._check_blocks(start.seq, start.block_ids)
        self._running[start.seq] = RunningSequence(
            start.seq,
            start.slot,
            list(start.block_ids),
            self._state(start, start.sampling),
            branches=tuple((branch.seq, self._state(start, branch.sampling)) for branch in start.branches),
        )

    def end(self, seq: int) -> None:
        """Forget a sequence. Raises PlanError if it is not running."""
        del self._running[self[seq].seq]

    def problem_of(self, step: SequenceStep) -> str:
        """Return why this step can't run although leader and rank agree, else ""."""
        if step.token_ids == [PREVIOUS]:
            return self[step.seq].problem
        bad = [t for t in step.token_ids if not 0 <= t < self._vocab_size]
        return f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}" if bad else ""

    def tokens_of(self, step: SequenceStep) -> list[int]:
        """Return the tokens that a step runs. Raises PlanError for PREVIOUS if the step before drew none."""
        if step.token_ids != [PREVIOUS]:
            return step.token_ids
        token_id = self[step.seq].sampled
        if token_id is None:
            raise PlanError(f"sequence {step.seq}: a step runs the token of the step before, which has drawn none")
        return [token_id]

    def skip(self, step: SequenceStep) -> None:
        """Take the new blocks of a step that does not run: the leader counts on them if it sends the step again."""
        self._check_blocks(step.seq, step.new_block_ids)
        self[step.seq].block_ids.extend(step.new_block_ids)

    def note(self, steps: Sequence[SequenceStep], tokens: dict[int, int], failed: dict[int, str]) -> None:
        """Remember how steps have ended, by sequence: it decides what PREVIOUS means in the next.

        A sequence may have ended meanwhile: the plan that says so may be launched before the result of a step is here.
        """
        for step in steps:
            sequence = self._running.get(step.seq)
            if sequence is not None:
                sequence.sampled, sequence.problem = tokens.get(step.seq), failed.get(step.seq, "")

    def take(self, steps: Sequence[SequenceStep]) -> list[RunningSequence]:
        """Take the new blocks of `steps` and move lengths on; return their sequences.

        Raises PlanError; then no length has changed.
        """
        if len({s.seq for s in steps}) != len(steps):
            raise PlanError("a sequence has two steps in one plan")
        sequences = [self[s.seq] for s in steps]
        for step, sequence in zip(steps, sequences, strict=True):
            self._check_blocks(step.seq, step.new_block_ids)
            sequence.block_ids.extend(step.new_block_ids)
            end = step.start + len(step.token_ids)
            if not step.token_ids or sequence.length not in (None, step.start):
                raise PlanError(
                    f"sequence {step.seq}: step of {len(step.token_ids)} tokens at {step.start}; "
                    f"its cache holds {sequence.length}"
                )
            if end > len(sequence.block_ids) * self._block_tokens:
                raise PlanError(
                    f"sequence {step.seq}: {end} tokens need {-(-end // self._block_tokens)} blocks of "
                    f"{self._block_tokens}, it holds {len(sequence.block_ids)}"
                )
        for step, sequence in zip(steps, sequences, strict=True):
            sequence.length = step.start + len(step.token_ids)
        return sequences

    def pack(self, steps: Sequence[SequenceStep], device: torch.device | str) -> Batch:
        """Take `steps` and build their batch. Raises PlanError; then no length has changed."""
        token_ids = [token_id for s in steps for token_id in self.tokens_of(s)]
        sequences = self.take(steps)
        ragged = RaggedBatch.build(
            [(s.start, len(s.token_ids)) for s in steps],
            slots=[s.slot for s in sequences],
            block_tables=[s.block_ids for s in sequences],
            device=device,
        )
        sampled = tuple(i for i, s in enumerate(steps) if s.sample)
        return Batch(
            seqs=tuple(s.seq for s in steps),
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            ragged=ragged,
            sampled=sampled,
            last_rows=ragged.query_start[1:][list(sampled)] - 1,
        )

    def unpack(self, steps: Sequence[SequenceStep]) -> list[SequenceStep]:
        """Undo `pack`, but for the new blocks, which stay; return the steps as they may be packed again."""
        for step in steps:
            self[step.seq].length = step.start
        return [msgspec.structs.replace(step, new_block_ids=[]) for step in steps]

    def _state(self, start: SequenceStart, sampling: SamplingParams) -> SamplingState:
        grammar = None
        if sampling.guide is not None:
            outputs = start.token_ids[len(start.token_ids) - start.num_outputs :]
            grammar = self._grammars.start(sampling.guide, outputs)
        return SamplingState(sampling, start.token_ids, start.num_outputs, eos=self._eos, grammar=grammar)

    def _check_blocks(self, seq: int, block_ids: Sequence[int]) -> None:
        bad = [b for b in block_ids if not 0 <= b < self._num_blocks]
        if bad:
            raise PlanError(f"sequence {seq}: block {bad[0]} of a cache with {self._num_blocks}")
