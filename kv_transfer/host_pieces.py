"""Pieces of the host lane as arrays: what a write has left, cut into buffers, and the copies in and out of one.

A buffer may hold hundreds of pieces, and takes as long on its way as Python takes for a few dozen of them; so nothing
here goes piece by piece.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]
Table = NDArray[np.int64]
"""[N, 3]: index of the pool in the receiver's endpoint, offset in bytes, size in bytes, of each piece."""


class Copies(NamedTuple):
    """targets, sources: [N] addresses.  sizes: [N] bytes, above 0. Each contiguous; targets do not overlap."""

    targets: Addresses
    sources: Addresses
    sizes: Addresses

    def rows(self) -> list[tuple[int, int, int]]:
        """Return (target, source, size) of each."""
        return list(zip(self.targets.tolist(), self.sources.tolist(), self.sizes.tolist(), strict=True))


class Rest:
    """What of a write is still to be copied, in its order. table: of its targets.  sources: [N] addresses."""

    def __init__(self, table: Table, sources: Addresses) -> None:
        self._table, self._sources = table, sources
        self._ends = np.cumsum(table[:, 2])
        self._end = int(self._ends[-1]) if len(table) else 0
        self._begun = 0

    def __bool__(self) -> bool:
        return self._begun < self._end

    @property
    def num_bytes(self) -> int:
        return self._end - self._begun

    def clear(self) -> None:
        self._begun = self._end

    def take(self, room: int, *, most: int) -> tuple[Table, Addresses]:
        """Take at most `room` bytes in at most `most` pieces, cutting the last; return (table, sources) of them."""
        until = min(self._begun + room, self._end)
        first = int(np.searchsorted(self._ends, self._begun, side="right"))
        last = min(int(np.searchsorted(self._ends, until, side="left")) + 1, first + most)
        table, sources = self._table[first:last].copy(), self._sources[first:last].copy()
        until = min(until, int(self._ends[last - 1]))
        skipped = self._begun - int(self._ends[first] - table[0, 2])
        table[-1, 2] -= int(self._ends[last - 1]) - until
        table[0, 1] += skipped
        table[0, 2] -= skipped
        sources[0] += np.uint64(skipped)
        self._begun = until
        return table, sources


def copies_in(buffer: int, table: Table, sources: Addresses) -> Copies:
    """Return the copies that fill a buffer at an address with pieces, end to end."""
    return Copies(_places(buffer, table), sources, table[:, 2].astype(np.uint64))


def copies_out(buffer: int, table: Table, bases: Addresses) -> Copies:
    """Return the copies that empty it. bases: address of each pool."""
    targets = bases[table[:, 0]] + table[:, 1].astype(np.uint64)
    return Copies(targets, _places(buffer, table), table[:, 2].astype(np.uint64))


def _places(buffer: int, table: Table) -> Addresses:
    sizes = table[:, 2].astype(np.uint64)
    places: Addresses = np.cumsum(sizes) - sizes + np.uint64(buffer)
    return places
