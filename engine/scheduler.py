"""Scheduler: which tokens of which sequences the next step runs. Continuous batching with chunks; no tensors.

There is no notion of prefill or decode here: a sequence has tokens whose cache rows do not exist yet, the step runs as
many of them as the budget allows, and when it reaches the last one it samples. Decode is the case of one token left.

    add -> waiting -> running -> (finished | failed | aborted) -> out: its blocks are the caller's again
    running <-> delayed: there was no memory for it; tried again when another has left, and some steps later
    ended, but a step has it under way: leaving; it is out when that step, which is wasted, has been committed

With `steps_ahead` the next step is planned before the result of the one under way is known. A sequence goes on in it if
its next token can change nothing but whether it ends: the step then runs PREVIOUS. Its cache is written until that step
has been committed, so blocks and slot stay taken, although its end is known a step before.

The ranks leave the newest sequences out of a step that does not fit into memory. Those are delayed, and nothing new is
started, as long as anything else runs; if nothing at all fits, the newest fails, one in each step. A step ahead of one
that has not happened does not happen either.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from engine.block_allocator import BlockAllocator
from engine.plan import NO_MEMORY, PREVIOUS, SequenceBranch, SequenceStart, SequenceStep, StepPlan, StepResult
from engine.sequence import Sequence
from engine.shares import share
from router.protocol import FinishReason, TokenLogprobs

RETRY_STEPS = 64
"""After how many steps of the others a sequence is tried again for which there was no memory: a try costs a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What one step did to one sequence.

    token_id: None while a chunk has not reached the last token.   finish_reason or error: how it has ended.
    is_out: no step has it under way any more, its blocks and slot are the caller's. Alone: it had ended before.
    branches: the same of each branch of the sequence, when it has sampled.
    """

    sequence: Sequence
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    is_out: bool = False
    logprobs: TokenLogprobs | None = None
    branches: tuple[Progress, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Sampled:
    """What a step's result says, by sequence or branch."""

    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs]


class Scheduler:
    """Sequences share each step (shares.py). One brings its blocks and slot; growth comes out of its promise.

    Numbers of sequences ascend in the order in which they came.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        block_tokens: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        steps_ahead: int = 0,
        keeps_step: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> None:
        """steps_ahead: how many steps may be planned behind one whose result is not known, 0 or 1.

        keeps_step: whether nothing is planned ahead while this sequence runs, for the caller's own reasons.
        """
        self._blocks, self._block_tokens = blocks, block_tokens
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._max_model_len, self._eos_token_ids = max_model_len, eos_token_ids
        self._steps_ahead, self._keeps_step = steps_ahead, keeps_step
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: dict[int, Sequence] = {}
        self._parked: set[int] = set()
        self._delayed: set[int] = set()
        self._retry_at = 0
        self._lost: set[int] = set()  # their step under way is ahead of one that has not happened
        self.num_delays = self.num_wasted = 0
        self._ends: list[int] = []
        self._number = self._num_under_way = 0
        self._under_way: dict[int, list[SequenceStep]] = {}  # steps by seq, oldest first; never an empty list
        self._leaving: dict[int, Sequence] = {}

    @property
    def queued_tokens(self) -> int:
        """Tokens here whose cache rows do not exist yet."""
        return sum(s.num_left for s in (*self.waiting, *self.running.values()))

    @property
    def num_leaving(self) -> int:
        """Sequences that have ended in a step that is under way."""
        return len(self._leaving)

    def holds(self, sequence: Sequence) -> bool:
        """The sequence is waiting, running, or has ended while a step has it under way."""
        return sequence.seq in self.running or sequence.seq in self._leaving or sequence in self.waiting

    def is_under_way(self, sequence: Sequence) -> bool:
        """A step whose result is not known has the sequence."""
        return sequence.seq in self._under_way

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Take a sequence out. True: it is out now. False: a step has it under way, commit will report it."""
        if sequence.seq in self.running:
            return self.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        return sequence.seq not in self._leaving

    def park(self, sequence: Sequence) -> None:
        """Leave a running sequence out of the next steps."""
        self._parked.add(sequence.seq)

    def unpark(self, sequence: Sequence) -> None:
        self._parked.discard(sequence.seq)

    def remove(self, sequence: Sequence) -> bool:
        """Take out a running sequence. True: it is out now. False: a step has it under way, commit will report it.

        Its end goes with the next plan in either case: the ranks carry out plans in order.
        """
        del self.running[sequence.seq]
        self._parked.discard(sequence.seq)
        self._delayed.discard(sequence.seq)
        self._ends.append(sequence.seq)
        self._retry_at = 0
        if sequence.seq not in self._under_way:
            return True
        self._leaving[sequence.seq] = sequence
        return False

    def schedule(self) -> StepPlan | None:
        """Return the next step; None if the ranks need not be told anything, or nothing before a commit."""
        if self._num_under_way and not self._may_plan_ahead():
            return None
        starts, steps = [], []
        self._try_delayed()
        for sequence, num_tokens in self._shares():
            if sequence.seq not in self.running:
                self.waiting.remove(sequence)
                self.running[sequence.seq] = sequence
                starts.append(_start(sequence))
            is_ahead = sequence.seq in self._under_way
            steps.append(self._step_ahead(sequence) if is_ahead else self._step(sequence, num_tokens))
        if not (starts or steps or self._ends):
            return None
        self._number += 1
        ends, self._ends = self._ends, []
        self._num_under_way += 1
        for step in steps:
            self._under_way.setdefault(step.seq, []).append(step)
        return StepPlan(number=self._number, starts=starts, steps=steps, ends=ends)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Take in what the ranks answered to `plan`, the oldest under way. Nothing is returned of what is delayed."""
        sampled, failed = _Sampled(dict(result.tokens), dict(result.logprobs)), dict(result.failed)
        self._num_under_way -= 1
        for step in plan.steps:
            first, *later = self._under_way.pop(step.seq)
            assert first.start == step.start, "steps are committed in the order in which they were scheduled"
            if later:
                self._under_way[step.seq] = later
        untouched = self._delay(plan, failed)
        progress = []
        for step in plan.steps:
            if step.seq in untouched:
                continue
            if step.seq in self.running:
                progress.append(self._commit(self.running[step.seq], step, sampled, failed))
                continue
            self.num_wasted += step.seq not in failed
            if step.seq not in self._under_way:
                progress.append(Progress(self._leaving.pop(step.seq), is_out=True))
        return progress

    def _delay(self, plan: StepPlan, failed: dict[int, str]) -> set[int]:
        """Return the sequences to which nothing has happened; the others keep their entries in `failed`."""
        lost = self._lost.intersection(step.seq for step in plan.steps)
        self._lost -= lost
        tried = [step for step in plan.steps if step.seq not in lost]
        hungry = [step.seq for step in tried if failed.get(step.seq) == NO_MEMORY]  # oldest first
        if not hungry:
            return lost & self.running.keys()
        self._lost |= self._under_way.keys() & hungry
        self.num_delays += 1
        if len(hungry) == len(tried):
            newest = hungry.pop()
            failed[newest] = (
                f"{NO_MEMORY} for a step of {len(tried[-1].token_ids)} tokens although nothing else ran; lower "
                "max_num_batched_tokens or kv_cache_memory_gib"
            )
        else:
            self._delayed.update(self.running.keys() & hungry)
            self._retry_at = self._number + RETRY_STEPS
        return self.running.keys() & lost.union(hungry)

    def _try_delayed(self) -> None:
        """Let the oldest delayed sequence in again, if it is time or nothing else would run."""
        free = self._delayed - self._lost
        if free and (self._number >= self._retry_at or self._delayed >= self.running.keys() - self._parked):
            self._delayed.remove(min(free))
            self._retry_at = self._number + RETRY_STEPS

    def _commit(self, sequence: Sequence, step: SequenceStep, sampled: _Sampled, failed: dict[int, str]) -> Progress:
        error = self._error(sequence, step, sampled, failed)
        if error:
            return Progress(sequence, error=error, is_out=self.remove(sequence))
        sequence.num_computed += len(step.token_ids)
        if not step.sample:
            return Progress(sequence)
        branches = tuple(self._append(branch, sampled) for branch in sequence.branches)
        progress = self._append(sequence, sampled)
        if progress.finish_reason is None and not branches:
            return progress  # of every sequence in every step
        is_out = progress.finish_reason is not None and self.remove(sequence)
        return dataclasses.replace(progress, branches=branches, is_out=is_out)

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

    def _may_plan_ahead(self) -> bool:
        # If nobody goes on, the step under way is waited for: others would run in turns with its sequences for ever.
        sequences = self.running.values()
        return (
            self._num_under_way <= self._steps_ahead
            and any(self._goes_on(sequence) for sequence in sequences)
            and not any(self._keeps_step(sequence) for sequence in sequences)
        )

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence that a step has under way can run the token which that step samples.

        Not if a mask or a test makes that token, or if it is certain to be the last. A guided sequence, whose mask
        takes the host as long as a step, runs in every other step.
        """
        under_way, sampling = self._under_way.get(sequence.seq, ()), sequence.sampling
        return (
            len(under_way) == 1
            and under_way[0].sample
            and not any(sequence.seq in some for some in (self._parked, self._delayed, self._lost))
            and not sequence.branches
            and sampling.guide is None
            and len(sampling.forced_token_ids) <= sequence.num_outputs < sampling.max_tokens - 1
            and len(sequence.token_ids) < self._max_model_len - 1
        )

    def _shares(self) -> list[tuple[Sequence, int]]:
        """Return who runs in the next step, and how many tokens; those that begin with it are the last."""
        ready = [s for s in self.running.values() if s.seq not in self._parked and s.seq not in self._delayed]
        if self._under_way:
            ready = [s for s in ready if s.seq not in self._under_way or self._goes_on(s)]
        room = 0 if self._delayed else self._max_num_seqs - len(self.running)
        starting = list(self.waiting) if room > 0 else []
        while True:
            found = self._share([*ready, *starting])
            begin = [s for s in starting if s.seq in found]
            if len(begin) <= room:
                return [(s, found[s.seq]) for s in (*ready, *begin) if s.seq in found]
            starting = begin[:room]

    def _share(self, sequences: list[Sequence]) -> dict[int, int]:
        """Return the tokens of each sequence that has some in the next step, by number."""
        left = {s.seq: 1 if s.seq in self._under_way else s.num_left for s in sequences}
        if sum(left.values()) > self._max_num_batched_tokens:
            ages = sorted(left)
            found = share([left[seq] for seq in ages], self._max_num_batched_tokens)
            left = {seq: num_tokens for seq, num_tokens in zip(ages, found, strict=True) if num_tokens}
        return left

    def _step_ahead(self, sequence: Sequence) -> SequenceStep:
        start = len(sequence.token_ids)
        grown = self._grow(sequence, start + 1)
        return SequenceStep(seq=sequence.seq, start=start, token_ids=[PREVIOUS], new_block_ids=grown, sample=True)

    def _step(self, sequence: Sequence, num_tokens: int) -> SequenceStep:
        start = sequence.num_computed
        end = start + num_tokens
        return SequenceStep(
            seq=sequence.seq,
            start=start,
            token_ids=sequence.token_ids[start:end],
            new_block_ids=self._grow(sequence, end),
            sample=end == len(sequence.token_ids),
        )

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Give a sequence the blocks for so many tokens; return the new ones."""
        missing = -(-num_tokens // self._block_tokens) - len(sequence.block_ids)
        grown = self._blocks.grow(missing) if missing > 0 else []
        sequence.promised -= len(grown)
        sequence.block_ids += grown
        return grown


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
