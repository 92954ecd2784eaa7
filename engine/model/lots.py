"""Tensors read from weight files by several threads, in lots that fit into a few staging buffers.

    Unit     what is of use only together, such as one expert's matrices with their scales
    Lot      units that lie near one another, up to LOT_BYTES; more only where a single unit is larger
    read     one stretch of a file; neighbours of a lot that touch, or nearly do, are one

Whatever a checkpoint's size, host memory holds the staging buffers and no more. They are pinned for a GPU, and lie on
the NUMA node that the process is bound to, since they are allocated by it. Reads go through the page cache: what
several ranks of a host read is read from disk once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.shard_files import DTYPE_BITS, StoredTensor

BUFFER_BYTES = 64 << 20  # a power of two: what is pinned is rounded up to one
LOT_BYTES = BUFFER_BYTES // 32 * 31  # the rest is for what lies between, or is skipped in the buffer
LARGE_BYTES = LOT_BYTES // 2  # a tensor of more had better be read some rows at a time
THREADS = 8
BUFFERS = THREADS + 2  # one is being copied from while others are read into
_GAP_BYTES = 64 << 10  # read rather than skipped
_ALIGN = 64  # of a stretch in its buffer

DTYPES = {  # by the names of the safetensors format
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.uint8,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Piece(NamedTuple):
    """A tensor of a file, or some of its rows. dtype: as stored; F8_E8M0 is read as bytes."""

    name: str
    stored: StoredTensor

    @classmethod
    def of(cls, name: str, stored: StoredTensor, rows: slice = slice(None)) -> Piece:
        """Return the piece of a tensor, or of its rows `rows`."""
        if not stored.shape:
            return cls(name, stored)
        start, stop, _ = rows.indices(stored.shape[0])
        row = stored.num_bytes // max(1, stored.shape[0])
        shape, size = (stop - start, *stored.shape[1:]), (stop - start) * row
        return cls(name, stored._replace(shape=shape, start=stored.start + start * row, num_bytes=size))

    @property
    def place(self) -> tuple[str, int]:
        return self.stored.file, self.stored.start


class Unit(NamedTuple):
    """key: what its reader knows it by.   part: layer it belongs to, None: to none."""

    key: Any
    part: int | None
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.stored.num_bytes for piece in self.pieces)


class Lot(NamedTuple):
    """reads: (file, first byte there, bytes, first byte in the buffer).   places: of each piece, in the buffer."""

    units: list[Unit]
    reads: list[tuple[str, int, int, int]]
    places: dict[Piece, int]
    num_bytes: int

    def tensors(self, unit: Unit, buffer: Tensor, on_host: Tensor) -> dict[str, Tensor]:
        """Return a unit's tensors by name, views of the lot's bytes in `buffer` where these are aligned.

        on_host: the same bytes; single numbers, of shape () or (1,), are views of these, since to ask a device for one
        is to wait for it.
        """
        sources = {piece: on_host if piece.stored.shape in ((), (1,)) else buffer for piece in unit.pieces}
        return {piece.name: _view(source, self.places[piece], piece.stored) for piece, source in sources.items()}


Check = Callable[[Lot, memoryview], None]


def place_of(unit: Unit) -> tuple[str, int]:
    """Return the file in which a unit begins, and where in it."""
    return unit.pieces[0].place


def plan_lots(units: Iterable[Unit]) -> list[Lot]:
    """Return the lots of units, in the order of the files and of what lies in them."""
    lots: list[list[Unit]] = []
    size = 0
    for unit in sorted(units, key=place_of):
        if not lots or size + unit.num_bytes > LOT_BYTES:
            lots.append([])
            size = 0
        lots[-1].append(unit)
        size += unit.num_bytes
    return [_lot(units) for units in lots]


def read_lots(
    lots: list[Lot], paths: Mapping[str, Path], *, pins: bool, check: Check | None = None
) -> Iterator[tuple[Lot, Tensor]]:
    """Yield lots in order with their bytes, uint8, which are overwritten once the next lot is asked for.

    check: is asked of each lot by the thread that has read it; what it raises comes from here. Raises OSError that
    names the file, for one that can't be read or has become shorter.
    """
    buffer_bytes = _buffer_bytes(lots)
    upcoming, free, made = collections.deque(lots), list[Tensor](), 0
    waiting: collections.deque[tuple[Lot, Tensor, Tensor, concurrent.futures.Future[None]]] = collections.deque()
    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        files: dict[str, int] = {}
        while upcoming or waiting:
            while upcoming and (free or made < BUFFERS):
                lot = upcoming.popleft()
                for file, *_ in lot.reads:
                    if file not in files:
                        files[file] = os.open(paths[file], os.O_RDONLY)
                        opened.callback(os.close, files[file])
                if not free:
                    free.append(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pins))
                    made += 1
                kept = free.pop()
                buffer = kept if lot.num_bytes <= buffer_bytes else torch.empty(lot.num_bytes, dtype=torch.uint8)
                waiting.append((lot, buffer, kept, pool.submit(_read, lot, buffer, files, paths, check)))
            lot, buffer, kept, reading = waiting.popleft()
            reading.result()
            yield lot, buffer[: lot.num_bytes]
            free.append(kept)


def staging_bytes(lots: list[Lot]) -> int:
    """Return what the buffers take that read_lots needs for lots."""
    return min(BUFFERS, len(lots)) * _buffer_bytes(lots)


def _buffer_bytes(lots: list[Lot]) -> int:
    """Return the size of the largest lot, but for those of a single large unit: they get memory of their own."""
    return min(max((lot.num_bytes for lot in lots), default=0), BUFFER_BYTES)


def _read(lot: Lot, buffer: Tensor, files: dict[str, int], paths: Mapping[str, Path], check: Check | None) -> None:
    memory = buffer.numpy().data
    for file, start, size, at in lot.reads:
        done = 0
        while done < size:
            count = os.preadv(files[file], [memory[at + done : at + size]], start + done)
            if not count:
                raise OSError(
                    f"{paths[file]}: ends at byte {start + done} of {start + size}; it was cut while it was read"
                )
            done += count
    if check is not None:
        check(lot, memory)


def _lot(units: list[Unit]) -> Lot:
    reads: list[tuple[str, int, int, int]] = []
    places: dict[Piece, int] = {}
    end = 0  # of the buffer
    for piece in sorted((piece for unit in units for piece in unit.pieces), key=lambda piece: piece.place):
        stored = piece.stored
        file, start, size, at = reads[-1] if reads else ("", 0, 0, 0)
        if file == stored.file and start + size <= stored.start <= start + size + _GAP_BYTES:
            reads[-1] = (file, start, stored.start + stored.num_bytes - start, at)
        else:
            at, start = -(-end // _ALIGN) * _ALIGN, stored.start
            reads.append((stored.file, start, stored.num_bytes, at))
        places[piece] = at + stored.start - start
        end = at + reads[-1][2]
    return Lot(units, reads, places, end)


def _view(buffer: Tensor, at: int, stored: StoredTensor) -> Tensor:
    """Return a tensor of a buffer's bytes: a view, or a copy where its values would lie across words."""
    some = buffer[at : at + stored.num_bytes]
    if at % max(1, DTYPE_BITS[stored.dtype] // 8):
        some = some.clone()
    return some.view(DTYPES[stored.dtype]).view(stored.shape)
