"""KVCache: the pools of one rank, allocated from a KVLayout, and the kernels' views of them.

One uint8 tensor [num_units, unit_bytes] per group: `num_blocks` units for block groups, `num_slots` for the slot
group. It owns the memory and knows no request: which block belongs to whom is the allocators' business. A pool lives
as long as the process, since a peer may write into it at any time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rows import Rows
from kv_transfer.landing import PoolAddress
from kv_transfer.layout import CacheGroup, KVLayout, Region

SCRATCH_BYTES = 16 << 20  # peers measure their lane by it: large enough that a GPU's bandwidth shows
# A page, so that a peer's write never shares a page with anything else, and so that NIXL pins whole pages.
POOL_ALIGNMENT = 4096
_FILLED_UNITS = 1024  # at once, when pools are filled at random: what that takes beside them


class KVCache:
    """pools: tensor by group name, "scratch" included. Views: `rows(region, layer)`."""

    def __init__(self, layout: KVLayout, num_blocks: int, num_slots: int, device: torch.device | str = "cpu") -> None:
        """Allocate zeroed pools. Raises ValueError for a pool without units."""
        if num_blocks < 1 or num_slots < 1:
            raise ValueError(f"cache of {num_blocks} blocks and {num_slots} slots: at least one of each is needed")
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.device = torch.device(device)
        self.pools: dict[str, Tensor] = {}
        self._backing: list[Tensor] = []
        for group in layout.groups:
            units = num_blocks if group.unit == "block" else num_slots
            self.pools[group.name] = self._allocate(units, group.unit_bytes)
        self.pools["scratch"] = self._allocate(1, SCRATCH_BYTES)
        self._regions: dict[str, tuple[CacheGroup, Region]] = {r.name: (g, r) for g in layout.groups for r in g.regions}
        self._views = {
            (name, layer): self._view(name, layer)
            for name, (_, r) in self._regions.items()
            for layer in range(r.layers)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() for pool in self.pools.values())

    def rows(self, region: str, layer: int) -> Rows:
        """Return the view of layer number `layer` inside `region`. Raises KeyError if the model has no such layer."""
        return self._views[region, layer]

    def pool_addresses(self) -> list[PoolAddress]:
        """Return where each pool lies, for a transport to register: the groups in layout order, then "scratch"."""
        return [
            PoolAddress(name=name, base=pool.data_ptr(), unit_bytes=pool.shape[1], num_units=pool.shape[0])
            for name, pool in self.pools.items()
        ]

    def poison(self) -> None:
        """Fill every pool with 0xFF: NaN in fp32, bf16, e4m3 and ue8m0, so that a read of unwritten bytes shows.

        e2m1 has no NaN, but its scale bytes do.
        """
        for pool in self.pools.values():
            pool.fill_(0xFF)

    def fill_random(self, seed: int = 0) -> None:
        """Fill every pool with plausible rows, values near 1: what benchmarks decode behind instead of a prompt."""
        draw = torch.Generator(self.device).manual_seed(seed)
        for (name, _), rows in self._views.items():
            for first in range(0, rows.num_units, _FILLED_UNITS):
                part = slice(first, first + _FILLED_UNITS)
                _fill(rows.values[part], rows.format, draw)
                if rows.rope is not None:
                    rows.rope[part].normal_(generator=draw)
                if rows.scales is not None:
                    # 2^-1 in ue8m0, and in float32 for index keys
                    rows.scales[part] = 2.0**-1 if rows.format == "fp8_index" else 126
            if name == "hca_state":  # running maximum, sum of weights (at least that of the maximum), weighted sum
                rows.values[:, 1].abs_().add_(1.0)

    def _allocate(self, units: int, unit_bytes: int) -> Tensor:
        backing = torch.zeros(units * unit_bytes + POOL_ALIGNMENT, dtype=torch.uint8, device=self.device)
        self._backing.append(backing)
        start = -backing.data_ptr() % POOL_ALIGNMENT
        return backing[start : start + units * unit_bytes].view(units, unit_bytes)

    def _view(self, name: str, layer: int) -> Rows:
        group, region = self._regions[name]
        return Rows.view(
            self.pools[group.name],
            region.format,
            width=region.width,
            rows=region.rows,
            offset=region.offset + layer * region.layer_bytes,
            value_bytes=region.value_bytes,
            scale_bytes=region.scale_bytes,
        )


def _fill(values: Tensor, fmt: str, draw: torch.Generator) -> None:
    if values.dtype == torch.float8_e4m3fn:  # either sign, 0.25 to 3.75: no NaN among the bytes
        codes = torch.randint(0x28, 0x48, values.shape, generator=draw, device=values.device, dtype=torch.uint8)
        codes |= torch.randint(0, 2, values.shape, generator=draw, device=values.device, dtype=torch.uint8) << 7
        values.view(torch.uint8).copy_(codes)
    elif values.dtype == torch.uint8:
        values.random_(generator=draw)
    else:
        values.normal_(generator=draw)
