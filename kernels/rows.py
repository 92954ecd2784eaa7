"""Rows: a typed view of one layer of a paged pool, and how a row of channels is stored.

A pool is uint8, unit-major (a unit is a block or a slot). Inside one layer of a unit lie first `rows` values, then
`rows` scales. A row of `width` channels, by format:

    fp32, bf16   width floats, no scales
    packed       width-64 e4m3, then 64 bf16 (rope tail, not rounded further); a ue8m0 scale byte per 64 e4m3 channels,
                 padded to a multiple of 8 bytes (the padding is written as 0)
    fp8_index    width e4m3; one fp32 power-of-two scale per row
    fp4_index    width/2 bytes of two e2m1 (low nibble: even channel); a ue8m0 scale byte per 32 channels

Kernels take `Rows` and address row r of unit u through the strides of its tensors. Reading gives float32. A read
never touches rows other than those named, so bytes that were never written can't leak.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.quant import (
    dequantize_e2m1,
    dequantize_e4m3,
    quantize_e2m1,
    quantize_e4m3,
    scale_to_ue8m0,
    ue8m0_to_scale,
)

ROPE_CHANNELS = 64
PACKED_GROUP = 64
FP4_GROUP = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """One layer of a region: `num_units` x `rows` rows of `width` channels.

    values [U, R, V]: float32, bfloat16, float8_e4m3fn (fp8_index; packed: all before the rope tail), uint8 (fp4_index).
    rope [U, R, 64] bfloat16, packed only.   scales [U, R, S]: uint8 (packed, fp4_index) or float32 (fp8_index).
    All are strided views of the pool.
    """

    format: str
    width: int
    values: Tensor
    rope: Tensor | None = None
    scales: Tensor | None = None

    @property
    def num_units(self) -> int:
        return self.values.shape[0]

    @property
    def rows(self) -> int:
        return self.values.shape[1]

    @classmethod
    def view(
        cls, pool: Tensor, fmt: str, *, width: int, rows: int, offset: int, value_bytes: int, scale_bytes: int
    ) -> Rows:
        """View the layer at `offset` bytes into each unit of `pool` [U, unit_bytes] uint8; bytes as KVLayout says."""
        units, unit_bytes = pool.shape

        def typed(dtype: torch.dtype, start: int, row_bytes: int, count: int) -> Tensor:
            flat = pool.view(-1).view(dtype)
            begin = flat.storage_offset() + start // dtype.itemsize  # as_strided counts from the storage, not the view
            size = dtype.itemsize
            return flat.as_strided((units, rows, count), (unit_bytes // size, row_bytes // size, 1), begin)

        scales_at = offset + rows * value_bytes
        if fmt == "fp32":
            return cls(fmt, width, typed(torch.float32, offset, value_bytes, width))
        if fmt == "bf16":
            return cls(fmt, width, typed(torch.bfloat16, offset, value_bytes, width))
        if fmt == "packed":
            nope = width - ROPE_CHANNELS
            values = typed(torch.float8_e4m3fn, offset, value_bytes, nope)
            rope = typed(torch.bfloat16, offset + nope, value_bytes, ROPE_CHANNELS)
            return cls(fmt, width, values, rope, typed(torch.uint8, scales_at, scale_bytes, scale_bytes))
        if fmt == "fp8_index":
            values = typed(torch.float8_e4m3fn, offset, value_bytes, width)
            return cls(fmt, width, values, None, typed(torch.float32, scales_at, scale_bytes, 1))
        if fmt == "fp4_index":
            values = typed(torch.uint8, offset, value_bytes, width // 2)
            return cls(fmt, width, values, None, typed(torch.uint8, scales_at, scale_bytes, width // FP4_GROUP))
        raise ValueError(f"row format {fmt!r}: known are fp32, bf16, packed, fp8_index, fp4_index")

    def read(self, units: Tensor, rows: Tensor) -> Tensor:
        """Return [n, width] float32 of units[n], rows[n] (integers). Raises IndexError for one outside the pool."""
        _check_inside(units, self.num_units, "unit")
        _check_inside(rows, self.rows, "row")
        values = _gather(self.values, units, rows)
        if self.scales is None:
            return values.float()
        scales = self.scales[units, rows]
        if self.format == "packed":
            assert self.rope is not None
            groups = values.shape[-1] // PACKED_GROUP
            nope = dequantize_e4m3(values, ue8m0_to_scale(scales[:, :groups]), PACKED_GROUP)
            return torch.cat([nope, self.rope[units, rows].float()], -1)
        if self.format == "fp8_index":
            return dequantize_e4m3(values, scales, self.width)
        return dequantize_e2m1(values, ue8m0_to_scale(scales), FP4_GROUP)

    def write(self, units: Tensor, rows: Tensor, x: Tensor) -> None:
        """Store x [n, width] (any float dtype) as rows (units[n], rows[n]); the pairs must be distinct."""
        if x.shape[-1] != self.width or x.shape[0] != units.shape[0]:
            raise ValueError(f"rows of shape {tuple(x.shape)} for {units.shape[0]} places of {self.width} channels")
        _check_inside(units, self.num_units, "unit")
        _check_inside(rows, self.rows, "row")
        if self.scales is None:
            self.values[units, rows] = x.to(self.values.dtype)
            return
        if self.format == "packed":
            assert self.rope is not None
            nope = self.width - ROPE_CHANNELS
            codes, scale = quantize_e4m3(x[:, :nope], PACKED_GROUP)
            stored = x.new_zeros((x.shape[0], self.scales.shape[-1]), dtype=torch.uint8)
            stored[:, : nope // PACKED_GROUP] = scale_to_ue8m0(scale)
            _scatter(self.values, units, rows, codes)
            self.rope[units, rows] = x[:, nope:].to(torch.bfloat16)
            self.scales[units, rows] = stored
        elif self.format == "fp8_index":
            codes, scale = quantize_e4m3(x, self.width)
            _scatter(self.values, units, rows, codes)
            self.scales[units, rows] = scale
        else:
            packed, scale = quantize_e2m1(x, FP4_GROUP)
            self.values[units, rows] = packed
            self.scales[units, rows] = scale_to_ue8m0(scale)

    def round_trip(self, x: Tensor) -> Tensor:
        """Return x [..., width] as float32 as it would be read after a write."""
        return round_trip(x, self.format)


def round_trip(x: Tensor, fmt: str) -> Tensor:
    """Return x [..., width] float32 after rounding to row format `fmt`."""
    if fmt == "fp32":
        return x.float()
    if fmt == "bf16":
        return x.to(torch.bfloat16).float()
    if fmt == "packed":
        nope = dequantize_e4m3(*quantize_e4m3(x[..., :-ROPE_CHANNELS], PACKED_GROUP), PACKED_GROUP)
        return torch.cat([nope, x[..., -ROPE_CHANNELS:].to(torch.bfloat16).float()], -1)
    if fmt == "fp8_index":
        return dequantize_e4m3(*quantize_e4m3(x, x.shape[-1]), x.shape[-1])
    if fmt == "fp4_index":
        return dequantize_e2m1(*quantize_e2m1(x, FP4_GROUP), FP4_GROUP)
    raise ValueError(f"row format {fmt!r}: known are fp32, bf16, packed, fp8_index, fp4_index")


def _gather(values: Tensor, units: Tensor, rows: Tensor) -> Tensor:
    # Indexing is not implemented for float8 on every device, so go through the bytes.
    if values.dtype == torch.float8_e4m3fn:
        return values.view(torch.uint8)[units, rows].view(torch.float8_e4m3fn)
    return values[units, rows]


def _scatter(values: Tensor, units: Tensor, rows: Tensor, codes: Tensor) -> None:
    values.view(torch.uint8)[units, rows] = codes.view(torch.uint8)


def _check_inside(index: Tensor, size: int, what: str) -> None:
    """Negative numbers would wrap around to somebody else's rows, so they are refused like those beyond the end."""
    if index.numel() == 0:
        return
    low, high = torch.aminmax(index)
    if int(low) < 0 or int(high) >= size:
        raise IndexError(
            f"{what} {int(low) if int(low) < 0 else int(high)} of a cache with {size}: a stale block table?"
        )
