"""DecodeGraphs: decode steps of one token a sequence, captured once for each size of batch and replayed.

Everything that changes from step to step lies in device memory, a row a sequence: position, slot, token, settings of
sampling, block table. A step begins by reading its rows and ends by moving them on, so that the next one can be
launched before the host knows its tokens, and a step in which nobody comes or goes copies nothing to the device.

    launch   rows that changed -> device;  replay;  tokens -> pinned memory          (returns at once)
    collect  wait for those tokens

A padding row reads and writes nobody's cache. Where steps are not captured (`captures=False`, or no GPU) the same
function runs each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import RunningSequence
from engine.cache import KVCache
from engine.decode_rows import DecodeRows
from engine.device_sampler import Chooser, DeviceSampler, pinned
from engine.grammar import GrammarError
from engine.graph_set import GraphSet
from engine.graph_sizes import graph_size
from engine.model.layers import Rotations
from engine.model.model import DeepSeekV4
from engine.plan import PREVIOUS, SequenceStep
from kernels.sampling_decode import Sampled
from kernels.sampling_row_triton import WORDS
from kernels.step import LAST_SAMPLED, begin_step, end_step


class StepOutputs(NamedTuple):
    """What a step leaves on the device. ends [size, 2] int32: see end_step.   logits [size, V] float32."""

    ends: Tensor
    sampled: Sampled
    logits: Tensor


@dataclasses.dataclass(slots=True)
class LaunchedStep:
    """A step under way. rows: of `sequences`, in their order.   ready: recorded behind its copies to the host."""

    sequences: list[RunningSequence]
    rows: list[int]
    ends: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    ready: torch.cuda.Event | None = None
    begun: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()

    @property
    def is_ready(self) -> bool:
        return self.ready is None or bool(self.ready.query())  # type: ignore[no-untyped-call]


class DecodeGraphs:
    """One rank's decode steps.

    sizes: of the graphs, ascending; the last is the largest batch.   max_blocks: of one sequence.
    head_rows: tokens that the head scores.   times: record events around each step, see LaunchedStep.
    """

    def __init__(
        self,
        model: DeepSeekV4,
        cache: KVCache,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        captures: bool,
        times: bool = False,
    ) -> None:
        device, most = cache.device, sizes[-1]
        self.sizes, self.device, self.times = tuple(sizes), device, times
        self._model, self._cache, self._captures = model, cache, captures
        self._rows = DecodeRows(most, self.size_of)
        # Rows and settings lie together: one copy tells the device of both.
        self._control = torch.zeros(most * (4 + WORDS), dtype=torch.int32, device=device)
        self._device_rows = self._control[: most * 4].view(most, 4)
        self._settings = self._control[most * 4 :].view(most, WORDS)
        self._host_settings = np.zeros((most, WORDS), np.int32)
        self._last_token = torch.zeros(most, dtype=torch.int64, device=device)
        self._block_table = torch.full((most, max_blocks), -1, dtype=torch.int32, device=device)
        self._num_blocks = [0] * most  # of each row that the device's table has
        self._sampler = DeviceSampler(most, model.num_scored, device)
        self._choosers: dict[int, Chooser] = {}
        self._graphs = GraphSet(self._run, device)
        self.on_logits: Callable[[int, int, Tensor], None] | None = None
        self._tell()

    @property
    def state_bytes(self) -> int:
        """Bytes of what lives as long as the graphs: rows, block table, sampling pools."""
        own = (self._control, self._last_token, self._block_table)
        return self._sampler.num_bytes + sum(t.numel() * t.element_size() for t in own)

    def size_of(self, rows: int) -> int:
        """Return the smallest size of at least `rows`. Raises ValueError beyond the largest: too many were admitted."""
        return graph_size(self.sizes, rows)

    def holds(self, seq: int) -> bool:
        """A sequence has a row, on which its last token lies."""
        return seq in self._choosers

    # ------------------------------------------------------------ capture

    @property
    def nodes(self) -> dict[int, int]:
        """Return the nodes of each captured graph, by the sequences it has room for."""
        return dict(self._graphs.nodes)

    def capture(self, progress: Callable[[str], None] | None = None) -> None:
        """Capture every size and replay each once; every row is padding meanwhile."""
        if self._captures:
            self._graphs.capture(self.sizes, unit="sequences", progress=progress)

    def _run(self, size: int) -> StepOutputs:
        """Run the first `size` rows. All of it is captured: no value is read back."""
        rotary = self._model.rotary
        step = begin_step(
            self._device_rows, self._last_token, size=size, window=rotary.window, compressed=rotary.compressed
        )
        batch = step.batch(self._block_table)
        rotations = Rotations(window=step.window, compressed=step.compressed, csa=step.csa, hca=step.hca)
        x = self._model.decode(step.token_ids, batch, rotations, self._cache)
        logits = self._model.head_logits(x)
        sampled = self._sampler.sample(
            logits, self._settings[:size], position=step.next_position, sequence=batch.sequence
        )
        return StepOutputs(end_step(self._device_rows, self._last_token, sampled.tokens, x), sampled, logits)

    # ------------------------------------------------------------ steps

    def admit(self, sequences: Sequence[RunningSequence]) -> list[tuple[RunningSequence, str]]:
        """Make sequences ready for their next token; return those that can't have one, and why."""
        failed = []
        for sequence in sequences:
            if sequence.seq not in self._choosers:
                self._choosers[sequence.seq] = self._sampler.enter(sequence.sampling)
                self._enter_row(sequence)
            try:
                self._sampler.prepare(self._choosers[sequence.seq])
            except GrammarError as error:
                failed.append((sequence, str(error)))
        return failed

    def launch(self, steps: Sequence[SequenceStep], sequences: Sequence[RunningSequence]) -> LaunchedStep:
        """Enqueue one step of sequences that were admitted for it. Nothing waits but a test that reads logits."""
        seqs = [s.seq for s in sequences]
        for source, target in self._rows.compact(seqs):
            self._move(source, target)
        size = self._rows.size(seqs)
        is_new = self._rows.set(
            [
                (s.seq, step.start, s.slot, LAST_SAMPLED if step.token_ids[0] == PREVIOUS else step.token_ids[0])
                for step, s in zip(steps, sequences, strict=True)
            ]
        )
        for sequence in sequences:
            row = self._rows[sequence.seq]
            self._grow(row, sequence.block_ids)
            words = self._choosers[sequence.seq].words
            if not np.array_equal(self._host_settings[row], words):
                self._host_settings[row] = words
                is_new = True
        if is_new:
            self._tell()
        begun = self._event()
        outputs = self._graphs(size)
        ended = self._event()
        self._rows.advance()
        rows = [self._rows[seq] for seq in seqs]
        if self.on_logits is not None:
            for step, row in zip(steps, rows, strict=True):
                self.on_logits(step.seq, step.start, outputs.logits[row])
        return self._fetch(outputs, sequences, rows, begun, ended)

    def leave(self, seq: int) -> None:
        """Forget a sequence; its row and its pools are the next one's."""
        if seq in self._choosers:
            self._sampler.leave(self._choosers.pop(seq))
            self._rows.release(seq)

    def _enter_row(self, sequence: RunningSequence) -> None:
        row = self._rows.take(sequence.seq)
        self._block_table[row].fill_(-1)
        self._num_blocks[row] = 0
        if sequence.sampled is not None:
            self._last_token[row].fill_(sequence.sampled)

    def _move(self, source: int, target: int) -> None:
        """Copy a row on the device, behind the steps under way."""
        self._last_token[target].copy_(self._last_token[source])
        self._block_table[target].copy_(self._block_table[source])
        self._num_blocks[target] = self._num_blocks[source]

    def _grow(self, row: int, block_ids: Sequence[int]) -> None:
        have = self._num_blocks[row]
        if len(block_ids) > have:
            new = np.asarray(block_ids[have:], np.int32)
            self._block_table[row, have : len(block_ids)].copy_(pinned(new, self.device), non_blocking=True)
            self._num_blocks[row] = len(block_ids)

    def _tell(self) -> None:
        """Send rows and settings, as they will be when every step under way has run."""
        both = np.concatenate([self._rows.values.ravel(), self._host_settings.ravel()])
        self._control.copy_(pinned(both, self.device), non_blocking=True)

    def _fetch(
        self,
        outputs: StepOutputs,
        sequences: Sequence[RunningSequence],
        rows: list[int],
        begun: torch.cuda.Event | None,
        ended: torch.cuda.Event | None,
    ) -> LaunchedStep:
        asked = any(s.sampling.params.num_logprobs >= 0 for s in sequences)
        sampled = outputs.sampled
        logprobs = None
        if asked:
            logprobs = (self._host(sampled.logprob), self._host(sampled.top_ids), self._host(sampled.top_logprobs))
        step = LaunchedStep(list(sequences), rows, self._host(outputs.ends), logprobs, None, begun, ended)
        if self.device.type == "cuda":
            step.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.ready.record()
        return step

    def _host(self, tensor: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        if not self.times or self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
