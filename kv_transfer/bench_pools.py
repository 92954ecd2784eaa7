"""Pools for the transfer benchmark: real memory in a layout's geometry, on a CPU or a GPU, with known contents."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kv_transfer.checksum import units_checksum
from kv_transfer.landing import PoolAddress
from kv_transfer.layout import KVLayout
from kv_transfer.warm import SCRATCH_BYTES, SCRATCH_POOL

ONE_PIECE_POOL = "one-piece"
"""Memory beside the cache pools, for the same bytes in one piece. Its units are pages."""

PAGE_BYTES = 4096
Units = Mapping[str, Sequence[int]]
"""Unit numbers by pool, in the order of the prompt."""


class BenchPools:
    """One pool per group of `layout`, [units, unit_bytes] uint8, besides scratch and `one_piece_bytes` in one piece."""

    def __init__(
        self, layout: KVLayout, *, num_blocks: int, num_slots: int, one_piece_bytes: int, device: torch.device
    ) -> None:
        self.device = device
        shapes = {g.name: (num_blocks if g.unit == "block" else num_slots, g.unit_bytes) for g in layout.groups}
        shapes[ONE_PIECE_POOL] = (-(-one_piece_bytes // PAGE_BYTES), PAGE_BYTES)
        shapes[SCRATCH_POOL] = (1, SCRATCH_BYTES)
        self.pools = {name: self._allocate(*shape) for name, shape in shapes.items()}

    @property
    def addresses(self) -> list[PoolAddress]:
        return [
            PoolAddress(name=name, base=pool.data_ptr(), unit_bytes=pool.shape[1], num_units=pool.shape[0])
            for name, pool in self.pools.items()
        ]

    def fill_randomly(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        for pool in self.pools.values():
            pool.view(torch.int64).random_(generator=generator)
        self.synchronize()

    def erase(self, units: Units | None = None) -> None:
        """Fill units, or everything, with 0xFF."""
        for name, pool in self.pools.items() if units is None else ((name, self.pools[name]) for name in units):
            if units is None:
                pool.fill_(0xFF)
            else:
                pool.index_fill_(0, torch.tensor(units[name], device=self.device), 0xFF)
        self.synchronize()

    def checksums(self, units: Units) -> dict[str, int]:
        return {name: units_checksum(self.pools[name], numbers) for name, numbers in units.items()}

    def copy_seconds(self, num_bytes: int, target: Tensor) -> float:
        """Time a plain copy of that many bytes of the one-piece pool to `target`, memory of this process."""
        source = self.pools[ONE_PIECE_POOL].view(-1)[:num_bytes]
        started = time.monotonic()
        if self.device.type == "cpu":
            ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        else:
            target[:num_bytes].copy_(source)
            self.synchronize()
        return time.monotonic() - started

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def _allocate(self, num_units: int, unit_bytes: int) -> Tensor:
        """Return whole pages, as the engine's pools are: some lanes pin and map by the page."""
        backing = torch.empty(num_units * unit_bytes + PAGE_BYTES, dtype=torch.uint8, device=self.device)
        start = -backing.data_ptr() % PAGE_BYTES
        return backing[start : start + num_units * unit_bytes].view(num_units, unit_bytes)
