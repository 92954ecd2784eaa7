"""Byte geometry of the KV cache: which groups exist, how large their units are, where a row lies.

Two lifetimes. **History** groups (`csa_kv`, `csa_index`, `hca_kv`) only grow and live in blocks of `block_tokens`
tokens; one block id is valid in all of them. **State** (the `state` group) is of fixed size, one record per running
sequence, in a slot: the raw window of every layer and the running sums of the compressors.

A pool is block-major: unit u of a group (a block, or a slot) is the contiguous range
`[u * unit_bytes, (u + 1) * unit_bytes)`. Inside a unit the regions follow one another; inside a region the layers;
inside a layer first `rows * value_bytes`, then `rows * scale_bytes`, so that values stay 16-byte aligned.

The allocator, the memory plan, the kernels' views and the transfer plan all derive from this one description.
No torch here: the leaders import it.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

RowFormat = Literal["fp32", "bf16", "packed", "fp8_index", "fp4_index"]
"""fp32, bf16: plain rows. packed: e4m3 of all but the last 64 channels, bf16 of those 64, a ue8m0 scale byte per 64
e4m3 channels (padded to a multiple of 8 bytes): 584 bytes at width 512. fp8_index: e4m3 and one fp32 scale per row.
fp4_index: two e2m1 a byte (low nibble first) and one ue8m0 scale byte per 32 channels."""

ROPE_CHANNELS = 64
ALIGNMENT = 16


def row_bytes(fmt: RowFormat, width: int) -> tuple[int, int]:
    """Return (value_bytes, scale_bytes) of one row of `width` channels. Raises ValueError if it does not fit."""
    if fmt == "fp32":
        return 4 * width, 0
    if fmt == "bf16":
        return 2 * width, 0
    if fmt == "packed":
        nope = width - ROPE_CHANNELS
        if nope <= 0 or nope % 64:
            raise ValueError(f"packed rows of {width} channels: need 64 rope channels and a multiple of 64 before them")
        return nope + 2 * ROPE_CHANNELS, -(-(nope // 64) // 8) * 8
    if fmt == "fp8_index":
        return width, 4
    if width % 32:
        raise ValueError(f"fp4 index keys of {width} channels: must be a multiple of 32")
    return width // 2, width // 32


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` x `rows` rows of one format at `offset` bytes into a unit. width: channels of a row."""

    name: str
    offset: int
    layers: int
    rows: int
    format: RowFormat
    width: int

    @property
    def value_bytes(self) -> int:
        return row_bytes(self.format, self.width)[0]

    @property
    def scale_bytes(self) -> int:
        return row_bytes(self.format, self.width)[1]

    @property
    def layer_bytes(self) -> int:
        return self.rows * (self.value_bytes + self.scale_bytes)

    @property
    def num_bytes(self) -> int:
        return self.layers * self.layer_bytes


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One pool. unit: "block" (addressed by block id) or "slot" (addressed by slot number).

    unit_bytes is the distance between units: the sum of the regions, rounded up to 16 bytes.
    """

    name: str
    unit: Literal["block", "slot"]
    regions: tuple[Region, ...]
    unit_bytes: int

    def region(self, name: str) -> Region:
        return next(r for r in self.regions if r.name == name)


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cache. Groups without layers are left out, so every group has bytes to move."""

    block_tokens: int
    groups: tuple[CacheGroup, ...]

    def fingerprint(self) -> str:
        """Return 16 hex digits that differ whenever any byte would lie elsewhere."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def group(self, name: str) -> CacheGroup | None:
        """Return the group of that name, None if the model has no such layers."""
        return next((g for g in self.groups if g.name == name), None)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all groups."""
        return sum(g.unit_bytes for g in self.groups if g.unit == "block")

    @property
    def slot_bytes(self) -> int:
        """Bytes that one running sequence takes besides its blocks."""
        return sum(g.unit_bytes for g in self.groups if g.unit == "slot")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)


def make_group(
    name: str, unit: Literal["block", "slot"], regions: list[tuple[str, int, int, RowFormat, int]]
) -> CacheGroup:
    """Build a group from (name, layers, rows, format, width) of each region, offsets following one another."""
    placed: list[Region] = []
    offset = 0
    for region_name, layers, rows, fmt, width in regions:
        region = Region(name=region_name, offset=offset, layers=layers, rows=rows, format=fmt, width=width)
        if region.num_bytes:
            placed.append(region)
            offset = -(-(offset + region.num_bytes) // ALIGNMENT) * ALIGNMENT
    return CacheGroup(name=name, unit=unit, regions=tuple(placed), unit_bytes=offset)
