"""DecodeRows: which sequence has which row of the decode batch, and what its row on the device says.

A sequence keeps its row as long as it can: while it only goes on, the device moves its row forward by itself and the
host sends nothing. `values` is what the device's rows will hold once every step launched so far has run.

    rows [R, 4] int32 = (is_active, position, slot, token)    token -1: the one sampled last; see kernels/step.py
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from kernels.step import IS_ACTIVE, LAST_SAMPLED, POSITION, SLOT, TOKEN


class DecodeRows:
    """Rows 0 to num_rows - 1. size_of: the size of the graph that runs so many rows."""

    def __init__(self, num_rows: int, size_of: Callable[[int], int]) -> None:
        self.values = np.zeros((num_rows, 4), np.int32)
        self.values[:, SLOT] = -1
        self._size_of = size_of
        self._row: dict[int, int] = {}
        self._free = list(range(num_rows))

    def __getitem__(self, seq: int) -> int:
        return self._row[seq]

    def take(self, seq: int) -> int:
        """Give a sequence the lowest free row. Raises RuntimeError if there is none: more run than were planned for."""
        if not self._free:
            raise RuntimeError(f"sequence {seq}: all {len(self.values)} rows of the decode batch are taken")
        self._row[seq] = heapq.heappop(self._free)
        return self._row[seq]

    def release(self, seq: int) -> None:
        heapq.heappush(self._free, self._row.pop(seq))

    def compact(self, seqs: Sequence[int]) -> list[tuple[int, int]]:
        """Move those of `seqs` in the highest rows down where that makes the graph smaller; return (from, to)."""
        moves: list[tuple[int, int]] = []
        wanted = self._size_of(len(seqs))
        for seq in sorted(seqs, key=self._row.__getitem__, reverse=True):
            row = self._row[seq]
            if row < wanted or not self._free or self._free[0] >= row:
                break
            self.release(seq)
            moves.append((row, self.take(seq)))
            self.values[moves[-1][1]] = self.values[row]
        return moves

    def size(self, seqs: Sequence[int]) -> int:
        """Return the size of the graph that has the rows of all `seqs`."""
        return self._size_of(1 + max(self._row[seq] for seq in seqs))

    def set(self, steps: Sequence[tuple[int, int, int, int]]) -> bool:
        """Make these (seq, position, slot, token) the active rows; return whether the device must be told."""
        before = self.values.copy()
        self.values[:, IS_ACTIVE] = 0
        for seq, position, slot, token in steps:
            self.values[self._row[seq]] = (1, position, slot, token)
        return not np.array_equal(before, self.values)

    def advance(self) -> None:
        """Follow what a step does to its rows on the device."""
        active = self.values[:, IS_ACTIVE] != 0
        self.values[active, POSITION] += 1
        self.values[active, TOKEN] = LAST_SAMPLED
