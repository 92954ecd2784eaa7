"""RaggedBatch: which tokens of which sequences an operation works on.

Sequences are packed one after another, any number of tokens each: a prefill chunk and a decode step differ in lengths
only. Index tensors that several layers need are derived once per step and kept here. Row b of a compressed region
lies in unit `block_table[sequence, b // rows]`, row `b % rows`; entry b of ratio r covers positions r*b .. r*b+r-1
and is complete once r*b+r-1 has been processed, so a query at position t sees the entries below (t+1) // r.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Entries:
    """Compressed entries completed in this step: entry number `block[e]` of sequence `sequence[e]`, [E] int64 each."""

    sequence: Tensor
    block: Tensor
    position: Tensor


@dataclasses.dataclass(frozen=True)
class EntrySources:
    """Where the rows of each entry come from: cat(rows read from the rings, new rows [T], one zero row)[index].

    index [E, positions]; valid [E, positions]: the position exists (the zero row else).   unit, position [N]: what to
    read from the rings.
    """

    index: Tensor
    valid: Tensor
    unit: Tensor
    position: Tensor


@dataclasses.dataclass(frozen=True)
class Parts:
    """Runs of tokens that belong to one entry: part `part[t]` of sequence `sequence[p]`, ascending.

    resumed: parts whose entry was begun in an earlier step.   complete: parts whose entry ends in this step, in the
    order of `entries`.   open: the others.
    """

    part: Tensor
    sequence: Tensor
    resumed: Tensor
    complete: Tensor
    open: Tensor


@dataclasses.dataclass(frozen=True)
class RingRows:
    """Tokens that a ring keeps: token `token[n]` goes to unit `unit[n]` at `position[n]` mod the ring's size."""

    token: Tensor
    unit: Tensor
    position: Tensor


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """What decode kernels read of a batch: device tensors of fixed shapes, int32, so that a graph can be replayed.

    positions [T]; sequence [T], -1 for a padding token, which reads and writes nothing.   starts [B]: first position of
    each sequence in this step.   query_start [B+1]: its first token.   slots [B]; block_table [B, N]: -1 where nothing.
    max_query_len: most tokens of one sequence. Both ints are fixed when a graph is captured.
    longest: no sequence has more tokens, these included; None where the host knows no bound.
    """

    positions: Tensor
    sequence: Tensor
    starts: Tensor
    query_start: Tensor
    slots: Tensor
    block_table: Tensor
    num_tokens: int
    max_query_len: int
    longest: int | None = None

    def __post_init__(self) -> None:
        tokens, sequences = self.num_tokens, self.slots.shape[0]
        wanted = {
            "positions": (tokens,),
            "sequence": (tokens,),
            "starts": (sequences,),
            "query_start": (sequences + 1,),
            "slots": (sequences,),
            "block_table": (sequences, self.block_table.shape[-1]),
        }
        for name, shape in wanted.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(
                    f"decode batch: {name} {tuple(tensor.shape)} {tensor.dtype}: wanted contiguous int32 {shape}"
                )

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def first_tokens(self, num_tokens: int) -> DecodeBatch:
        """Return the same batch without the tokens behind the first `num_tokens`, which no sequence may have."""
        return dataclasses.replace(
            self, positions=self.positions[:num_tokens], sequence=self.sequence[:num_tokens], num_tokens=num_tokens,
            max_query_len=min(self.max_query_len, num_tokens),
        )  # fmt: skip

    def part(self, tokens: slice) -> DecodeBatch:
        """Return some tokens of the only sequence, as if a step had them alone. Raises ValueError if there are more.

        `longest` stays: how many of the tokens are padding, the host does not know.
        """
        first, last = _bounds(tokens, self.num_tokens, self.slots.shape[0])
        return dataclasses.replace(
            self,
            positions=self.positions[first:last].contiguous(),
            sequence=self.sequence[first:last].contiguous(),
            starts=self.starts + first,
            query_start=self.query_start.clamp(first, last) - first,
            num_tokens=last - first,
            max_query_len=last - first,
        )


@dataclasses.dataclass(frozen=True)
class RaggedBatch:
    """B sequences, T tokens in all.

    spans: (first position, number of tokens) of each sequence, on the host.   query_start [B+1]: where each begins.
    seq_lens [B]: tokens of the sequence including these.   slots [B]; block_table [B, N], -1 beyond the held blocks.
    positions [T], sequence [T]: position and sequence index of each token.   All tensors int64.
    """

    spans: tuple[tuple[int, int], ...]
    query_start: Tensor
    seq_lens: Tensor
    slots: Tensor
    block_table: Tensor
    positions: Tensor
    sequence: Tensor
    _memo: dict[object, object] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        spans: Sequence[tuple[int, int]],
        *,
        slots: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """Pack from plain integers. Raises ValueError for an empty span or lists of different lengths."""
        if len(slots) != len(spans) or len(block_tables) != len(spans):
            raise ValueError(
                f"{len(spans)} spans, {len(slots)} slots, {len(block_tables)} block tables: must be as many"
            )
        if any(start < 0 or length < 1 for start, length in spans):
            raise ValueError(f"spans {list(spans)}: every sequence needs a token and a position from 0")
        width = max((len(t) for t in block_tables), default=0)
        table = [[*blocks, *[-1] * (width - len(blocks))] for blocks in block_tables]
        query_start = [0]
        positions: list[int] = []
        sequence: list[int] = []
        for index, (start, length) in enumerate(spans):
            query_start.append(query_start[-1] + length)
            positions.extend(range(start, start + length))
            sequence.extend([index] * length)

        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            spans=tuple(spans),
            query_start=tensor(query_start),
            seq_lens=tensor([start + length for start, length in spans]),
            slots=tensor(slots),
            block_table=torch.tensor(table, dtype=torch.int64, device=device).view(len(spans), width),
            positions=tensor(positions),
            sequence=tensor(sequence),
        )

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def part(self, tokens: slice) -> RaggedBatch:
        """Return some tokens of the only sequence, as if a step had them alone. Raises ValueError if there are more."""
        first, last = _bounds(tokens, self.num_tokens, len(self.spans))
        return RaggedBatch(
            spans=((self.spans[0][0] + first, last - first),),
            query_start=self.query_start.clamp(first, last) - first,
            seq_lens=self.seq_lens - self.num_tokens + last,
            slots=self.slots,
            block_table=self.block_table,
            positions=self.positions[first:last],
            sequence=self.sequence[first:last],
        )

    @cached_property
    def starts(self) -> Tensor:
        """First position of each sequence in this step, [B]."""
        return self.seq_lens - (self.query_start[1:] - self.query_start[:-1])

    @cached_property
    def decode(self) -> DecodeBatch:
        """The same batch as decode kernels read it."""

        def narrow(x: Tensor) -> Tensor:
            return x.to(torch.int32).contiguous()

        return DecodeBatch(
            positions=narrow(self.positions),
            sequence=narrow(self.sequence),
            starts=narrow(self.starts),
            query_start=narrow(self.query_start),
            slots=narrow(self.slots),
            block_table=narrow(self.block_table),
            num_tokens=self.num_tokens,
            max_query_len=max((length for _, length in self.spans), default=0),
            longest=max((start + length for start, length in self.spans), default=0),
        )

    def num_visible(self, ratio: int) -> Tensor:
        """Return how many entries of `ratio` each token sees, [T]."""
        return (self.positions + 1) // ratio

    def max_visible(self, ratio: int) -> int:
        """Return the largest of num_visible, from the host's integers."""
        return max((start + length) // ratio for start, length in self.spans) if self.spans else 0

    def entries(self, ratio: int) -> Entries:
        """Return the entries of `ratio` that this step completes, by sequence, then by number."""

        def build() -> Entries:
            sequence: list[int] = []
            block: list[int] = []
            for index, (start, length) in enumerate(self.spans):
                done = range(start // ratio, (start + length) // ratio)
                sequence.extend([index] * len(done))
                block.extend(done)
            blocks = self._tensor(block)
            return Entries(self._tensor(sequence), blocks, blocks * ratio)

        return self._once(("entries", ratio), build)

    def entry_sources(self, ratio: int, positions: int) -> EntrySources:
        """Return where the `positions` positions that end with each entry of `ratio` lie; the ring has as many."""

        def build() -> EntrySources:
            entries = self.entries(ratio)
            back = torch.arange(ratio - positions, ratio, device=self.device)
            position = entries.position[:, None] + back
            start = self.starts[entries.sequence][:, None]
            valid = position >= 0
            old = valid & (position < start)
            num_old = int(old.sum())
            index = num_old + self.query_start[entries.sequence][:, None] + position - start
            index[old] = torch.arange(num_old, device=self.device)
            index[~valid] = num_old + self.num_tokens
            unit = self.slots[entries.sequence][:, None].expand_as(position)
            return EntrySources(index, valid, unit[old], position[old])

        return self._once(("sources", ratio, positions), build)

    def parts(self, ratio: int) -> Parts:
        """Return how this step's tokens fall into entries of `ratio`."""

        def build() -> Parts:
            sequence: list[int] = []
            lengths: list[int] = []
            resumed: list[int] = []
            complete: list[int] = []
            unfinished: list[int] = []
            for index, (start, length) in enumerate(self.spans):
                for block in range(start // ratio, (start + length - 1) // ratio + 1):
                    first, last = max(start, block * ratio), min(start + length, (block + 1) * ratio)
                    if first % ratio:
                        resumed.append(len(sequence))
                    (unfinished if last % ratio else complete).append(len(sequence))
                    sequence.append(index)
                    lengths.append(last - first)
            part = torch.repeat_interleave(self._tensor(lengths))
            return Parts(part, *map(self._tensor, (sequence, resumed, complete, unfinished)))

        return self._once(("parts", ratio), build)

    def ring_rows(self, size: int) -> RingRows:
        """Return the tokens that a ring of `size` positions holds after this step: the last `size` of each sequence."""

        def build() -> RingRows:
            token = (self.positions >= (self.seq_lens - size)[self.sequence]).nonzero()[:, 0]
            return RingRows(token, self.slots[self.sequence[token]], self.positions[token])

        return self._once(("ring", size), build)

    def window_index(self, size: int) -> Tensor:
        """Return [T, size]: where each window key lies in cat(rings [B*size], new rows [T], one zero row).

        Column j of the token at position t is position t-size+1+j; positions before 0 point at the zero row. Positions
        before this step come from the ring (position mod size), the rest from the new rows.
        """

        def build() -> Tensor:
            back = torch.arange(1 - size, 1, device=self.device)
            position = self.positions[:, None] + back
            start = self.starts[self.sequence][:, None]
            rings = len(self.spans) * size
            ring = self.sequence[:, None] * size + position % size
            new = rings + self.query_start[self.sequence][:, None] + position - start
            index = torch.where(position < start, ring, new)
            return torch.where(position < 0, rings + self.num_tokens, index)

        return self._once(("window", size), build)

    def old_window_rows(self, size: int) -> tuple[Tensor, Tensor]:
        """Return (sequence [N], ring row [N]) of the keys from before this step that some token's window reaches."""

        def build() -> tuple[Tensor, Tensor]:
            position = self.starts[:, None] - torch.arange(1, size, device=self.device)
            sequence, column = (position >= 0).nonzero(as_tuple=True)
            return sequence, position[sequence, column] % size

        return self._once(("old window", size), build)

    def places(self, sequence: Tensor, block: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return (units, rows), shaped as the input, of entries in a region with `rows` entries per unit.

        Raises IndexError for an entry beyond the sequence's blocks.
        """
        column = block // rows
        if column.numel() and int(column.max()) >= self.block_table.shape[1]:
            raise IndexError(
                f"entry {int(block.max())} lies beyond a block table of {self.block_table.shape[1]} x {rows} entries"
            )
        return self.block_table[sequence, column], block % rows

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _once(self, key: object, build: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = build()
        return cast(T, self._memo[key])


def _bounds(tokens: slice, num_tokens: int, num_sequences: int) -> tuple[int, int]:
    first, last, step = tokens.indices(num_tokens)
    if num_sequences != 1 or step != 1 or first >= last:
        raise ValueError(
            f"tokens {tokens.start}:{tokens.stop} of {num_tokens} in {num_sequences} sequences: wanted some of one"
        )
    return first, last
