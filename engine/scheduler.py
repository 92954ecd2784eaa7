"""Scheduler: which tokens of which sequences the next step runs. Continuous batching with chunks; no tensors.

There is no notion of prefill or decode here: a sequence has tokens whose cache rows do not exist yet, the step runs as
many of them as the budget allows, and when it reaches the last one it samples. Decode is the case of one token left.

    add -> waiting -> running -> (finished | failed | aborted): out, its blocks are the caller's again
    running <-> delayed: there was no memory for it; tried again when another has left, and some steps later

The ranks leave the newest sequences out of a step that does not fit into memory. Those are delayed, and nothing new is
started, as long as anything else runs; if nothing at all fits, the newest fails, one in each step.
"""

from __future__ import annotations

import collections
import dataclasses

from engine.block_allocator import BlockAllocator
from engine.plan import NO_MEMORY, SequenceBranch, SequenceStart, SequenceStep, StepPlan, StepResult
from engine.sequence import Sequence
from router.protocol import FinishReason, TokenLogprobs

RETRY_STEPS = 64
"""After how many steps of the others a sequence is tried again for which there was no memory: a try costs a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What one step did to one sequence.

    token_id: None while a chunk has not reached the last token.   finish_reason or error: it is out of the scheduler.
    is_aborted: it was aborted while the step was under way and is out now.
    branches: the same of each branch of the sequence, when it has sampled.
    """

    sequence: Sequence
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    is_aborted: bool = False
    logprobs: TokenLogprobs | None = None
    branches: tuple[Progress, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Sampled:
    """What a step's result says, by sequence or branch."""

    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs]


class Scheduler:
    """First come, first served. A sequence brings its blocks and slot; growth comes out of its promise."""

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        block_tokens: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._blocks, self._block_tokens = blocks, block_tokens
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._max_model_len, self._eos_token_ids = max_model_len, eos_token_ids
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: dict[int, Sequence] = {}
        self._parked: set[int] = set()
        self._delayed: set[int] = set()
        self._retry_at = 0
        self.num_delays = 0
        self._ends: list[int] = []
        self._number = 0
        self._under_way: set[int] = set()
        self._aborted_under_way: set[int] = set()

    @property
    def queued_tokens(self) -> int:
        """Tokens here whose cache rows do not exist yet."""
        return sum(len(s.token_ids) - s.num_computed for s in (*self.waiting, *self.running.values()))

    def holds(self, sequence: Sequence) -> bool:
        """The sequence is waiting, running, or aborted in a step that is under way."""
        return sequence.seq in self.running or sequence in self.waiting

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Take a sequence out. True: it is out now. False: a step has it under way, commit will report it."""
        if sequence.seq in self._under_way:
            self._aborted_under_way.add(sequence.seq)
            return False
        if sequence.seq in self.running:
            self.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        return True

    def park(self, sequence: Sequence) -> None:
        """Leave a running sequence out of the next steps."""
        self._parked.add(sequence.seq)

    def unpark(self, sequence: Sequence) -> None:
        self._parked.discard(sequence.seq)

    def remove(self, sequence: Sequence) -> None:
        """Take out a running sequence that no step has under way."""
        del self.running[sequence.seq]
        self._parked.discard(sequence.seq)
        self._delayed.discard(sequence.seq)
        self._ends.append(sequence.seq)
        self._retry_at = 0

    def schedule(self) -> StepPlan | None:
        """Return the next step; None if the ranks need not be told anything."""
        starts, steps = [], []
        budget = self._max_num_batched_tokens
        self._try_delayed()
        for sequence in self.running.values():
            if budget == 0:
                break
            if sequence.seq in self._parked or sequence.seq in self._delayed:
                continue
            steps.append(self._step(sequence, budget))
            budget -= len(steps[-1].token_ids)
        while self.waiting and budget and len(self.running) < self._max_num_seqs and not self._delayed:
            sequence = self.waiting.popleft()
            self.running[sequence.seq] = sequence
            starts.append(_start(sequence))
            steps.append(self._step(sequence, budget))
            budget -= len(steps[-1].token_ids)
        if not (starts or steps or self._ends):
            return None
        self._number += 1
        ends, self._ends = self._ends, []
        self._under_way = {step.seq for step in steps}
        return StepPlan(number=self._number, starts=starts, steps=steps, ends=ends)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Take in what the ranks answered to `plan`. Nothing is returned of sequences that are delayed."""
        sampled, failed = _Sampled(dict(result.tokens), dict(result.logprobs)), dict(result.failed)
        self._under_way = set()
        untouched = self._delay(plan, failed)
        return [
            self._commit(self.running[step.seq], step, sampled, failed)
            for step in plan.steps
            if step.seq not in untouched or step.seq in self._aborted_under_way
        ]

    def _delay(self, plan: StepPlan, failed: dict[int, str]) -> set[int]:
        """Return the sequences to which nothing has happened; the others keep their entries in `failed`."""
        hungry = [step.seq for step in plan.steps if failed.get(step.seq) == NO_MEMORY]  # oldest first
        if not hungry:
            return set()
        self.num_delays += 1
        if len(hungry) == len(plan.steps):
            newest = hungry.pop()
            failed[newest] = (
                f"{NO_MEMORY} for a step of {len(plan.steps[-1].token_ids)} tokens although nothing else ran; lower "
                "max_num_batched_tokens or kv_cache_memory_gib"
            )
        else:
            self._delayed.update(hungry)
            self._retry_at = self._number + RETRY_STEPS
        return set(hungry)

    def _try_delayed(self) -> None:
        """Let the oldest delayed sequence in again, if it is time or nothing else would run."""
        if self._delayed and (self._number >= self._retry_at or self._delayed >= self.running.keys() - self._parked):
            self._delayed.remove(min(self._delayed))
            self._retry_at = self._number + RETRY_STEPS

    def _commit(self, sequence: Sequence, step: SequenceStep, sampled: _Sampled, failed: dict[int, str]) -> Progress:
        if sequence.seq in self._aborted_under_way:
            self._aborted_under_way.remove(sequence.seq)
            self.remove(sequence)
            return Progress(sequence, is_aborted=True)
        error = self._error(sequence, step, sampled, failed)
        if error:
            self.remove(sequence)
            return Progress(sequence, error=error)
        sequence.num_computed += len(step.token_ids)
        if not step.sample:
            return Progress(sequence)
        branches = tuple(self._append(branch, sampled) for branch in sequence.branches)
        progress = self._append(sequence, sampled)
        if progress.finish_reason is not None:
            self.remove(sequence)
        return dataclasses.replace(progress, branches=branches) if branches else progress

    def _error(self, sequence: Sequence, step: SequenceStep, sampled: _Sampled, failed: dict[int, str]) -> str:
        """Return why the step of a sequence has failed, its branches included, else ""."""
        for each in (sequence, *sequence.branches):
            if each.seq in failed:
                return failed[each.seq]
            if step.sample and each.seq not in sampled.tokens:
                return "the ranks returned no token for it"
        return ""

    def _append(self, sequence: Sequence, sampled: _Sampled) -> Progress:
        token_id, forced = sampled.tokens[sequence.seq], sequence.sampling.forced_token_ids
        if sequence.num_outputs < len(forced):
            token_id = forced[sequence.num_outputs]
        reason = sequence.append(token_id, eos_token_ids=self._eos_token_ids, max_model_len=self._max_model_len)
        return Progress(sequence, token_id, reason, logprobs=sampled.logprobs.get(sequence.seq))

    def _step(self, sequence: Sequence, budget: int) -> SequenceStep:
        start = sequence.num_computed
        end = min(len(sequence.token_ids), start + budget)
        missing = -(-end // self._block_tokens) - len(sequence.block_ids)
        grown = self._blocks.grow(missing) if missing > 0 else []
        sequence.promised -= len(grown)
        sequence.block_ids += grown
        return SequenceStep(
            seq=sequence.seq,
            start=start,
            token_ids=sequence.token_ids[start:end],
            new_block_ids=grown,
            sample=end == len(sequence.token_ids),
        )


def _start(sequence: Sequence) -> SequenceStart:
    # Growth of the first step travels with that step, so the table sent here must not have it yet.
    return SequenceStart(
        seq=sequence.seq,
        slot=sequence.slot,
        block_ids=list(sequence.block_ids),
        sampling=sequence.sampling,
        token_ids=list(sequence.token_ids),
        num_outputs=sequence.num_outputs,
        branches=[SequenceBranch(seq=branch.seq, sampling=branch.sampling) for branch in sequence.branches],
        checksums=sequence.checksums,
    )
