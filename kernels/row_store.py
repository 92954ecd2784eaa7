"""Storing rows from inside a Triton kernel: norm, rope, Hadamard, rounding, for every row format of kernels/rows.py.

A row of D channels is held as its pairs: even channels e and odd channels o, each [groups, pairs of a group] float32,
since rope turns pairs and two neighbouring codes share a byte or a 16-bit word. The group is that of the scale.

    scale: s = 2^ceil(log2(amax / m)), m = 448 = 1.75 * 2^8 or 6 = 1.5 * 2^2. With amax = f * 2^e, 1 <= f < 2, that is
           2^(e-8) for f <= 1.75 and 2^(e-7) beyond (for 6: 2^(e-2), 1.5, 2^(e-1)); rounding amax / m first changes
           nothing. amax is taken over the bits of |x|, which order like the values, with inf and NaN on top.
    code:  round to nearest, ties to even, on the bits

All of it is integer arithmetic, or exact: the bytes are those of `Rows.write`, on every architecture and in the
interpreter (whose own cast to e4m3 is wrong). A group with an inf or NaN gets a NaN scale and is NaN on the way back;
its codes are NaN as well, where the reference may leave others.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows import FP4_GROUP, PACKED_GROUP, ROPE_CHANNELS, Rows
from kernels.tiles import Variant
from kernels.triton_env import uses_triton

_BYTES = {"fp32": 4, "bf16": 2}


def group_of(fmt: str, width: int) -> int:
    """Return the channels of a group of format `fmt`: those that share a scale, 64 where there is none."""
    return {"fp8_index": width, "fp4_index": FP4_GROUP}.get(fmt, PACKED_GROUP)


def row_args(rows: Rows) -> tuple[Tensor, Tensor, int]:
    """Return what kernels take of a pool: its values and scales as bytes, and the bytes from unit to unit.

    The values tensor stands in for scales that a format lacks. Raises ValueError for a view the kernels can't address.
    """
    values = rows.values.view(torch.uint8)
    scales = values if rows.scales is None else rows.scales.view(torch.uint8)
    row_bytes, scale_bytes = value_bytes(rows.format, rows.width), scale_row_bytes(rows.format, rows.width)
    if values.stride(1) != row_bytes and rows.rows > 1:
        raise ValueError(f"{rows.format} rows of {values.stride(1)} bytes: wanted {row_bytes}")
    if rows.scales is not None and scales.stride(1) != scale_bytes and rows.rows > 1:
        raise ValueError(f"{rows.format} scales of {scales.stride(1)} bytes a row: wanted {scale_bytes}")
    return values, scales, values.stride(0)


def value_bytes(fmt: str, width: int) -> int:
    """Return the bytes of a row's values."""
    if fmt in _BYTES:
        return _BYTES[fmt] * width
    return {"packed": width + ROPE_CHANNELS, "fp8_index": width, "fp4_index": width // 2}[fmt]


def scale_row_bytes(fmt: str, width: int) -> int:
    """Return the bytes of a row's scales."""
    packed = -(-(width - ROPE_CHANNELS) // (8 * PACKED_GROUP)) * 8
    return {"packed": packed, "fp8_index": 4, "fp4_index": width // FP4_GROUP}.get(fmt, 0)


@triton.jit
def load_rotation(rotation, D: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr):
    """Return (cos, sin) for the pairs of a row, 1 and 0 where nothing turns. rotation: [ROPE/2, (cos, sin)] float32.

    A load of its own, so that it can be sent early: nothing after a reduction overtakes its barrier.
    """
    pair = tl.arange(0, D // GROUP)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :] - (D - ROPE) // 2
    cos = tl.load(rotation + 2 * pair, mask=pair >= 0, other=1.0)
    return cos, tl.load(rotation + 2 * pair + 1, mask=pair >= 0, other=0.0)


@triton.jit
def norm_rope_pairs(x, weight, cos, sin, eps, D: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr):
    """Return (e, o) of x [D] float32 after RMS norm with weight [D] and rope."""
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight
    e, o = pairs_of(x, D, GROUP)
    pair = tl.arange(0, D // GROUP)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    turned = pair >= (D - ROPE) // 2
    return tl.where(turned, e * cos - o * sin, e), tl.where(turned, o * cos + e * sin, o)


@triton.jit
def pairs_of(x, D: tl.constexpr, GROUP: tl.constexpr):
    """Return (e, o) of x [D]."""
    return tl.split(tl.reshape(x, (D // GROUP, GROUP // 2, 2)))


@triton.jit
def hadamard_pairs(e, o, GROUP: tl.constexpr):
    """Return (e, o) of a row of 128 channels times the Hadamard matrix."""
    low = tl.reshape(e + o, (8, 8))
    high = tl.reshape(e - o, (8, 8))
    shape: tl.constexpr = (128 // GROUP, GROUP // 2)
    factor: tl.constexpr = 0.08838834764831845  # 128^-0.5
    return tl.reshape(_walsh_64(low), shape) * factor, tl.reshape(_walsh_64(high), shape) * factor


@triton.jit
def _walsh_64(x):
    """Return the 64 sums of x [8, 8] with signs (-1)^popcount(i & j): eight along each axis."""
    both = tl.arange(0, 8)[:, None] & tl.arange(0, 8)[None, :]
    sign = 1.0 - 2.0 * ((both ^ (both >> 1) ^ (both >> 2)) & 1).to(tl.float32)
    y = tl.sum(x[:, None, :] * sign[:, :, None], 0)
    return tl.sum(y[:, :, None] * sign[None, :, :], 1)


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_byte(amax, FLOOR: tl.constexpr, CARRY: tl.constexpr, SHIFT: tl.constexpr):
    """Return the ue8m0 byte for amax, given as bits. Adding CARRY moves the exponent on where f is too large for it."""
    amax = tl.maximum(amax, FLOOR)
    return tl.where(amax >= 0x7F800000, 255, ((tl.minimum(amax, 0x7F7FFFFF) + CARRY) >> 23) - SHIFT)


@triton.jit
def _times_power_of_two(x, exponent):
    """Return x * 2^exponent, exact; a magnitude above 2^127 counts as 2^127. exponent: -126..127."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F000000).to(tl.float32, bitcast=True)
    y = magnitude * ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return (y.to(tl.int32, bitcast=True) | ((bits >> 31) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(y):
    """Return the code (int32) of |y| <= 448."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the last place of 2^14: the addition rounds.
    tiny = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return ((bits >> 24) & 0x80) | tl.where(magnitude < 0x3C800000, tiny, normal)


@triton.jit
def e2m1_code(y):
    """Return the code (int32) of |y| <= 6; where a tie goes up, to an even code, it is included."""
    a = tl.abs(y)
    up = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    up += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return up | ((y.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def bf16_bits(x):
    """Return the bits (int32) of x rounded to bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def _e4m3_pairs(e, o):
    """Return the scale bytes [groups] and the codes of e and o."""
    amax = tl.max(tl.maximum(_magnitude(e), _magnitude(o)), 1)
    byte = _scale_byte(amax, 0x38D1B717, 0x1FFFFF, 8)  # the bits of 1e-4
    exponent = (127 - byte)[:, None]
    is_bad = byte[:, None] == 255
    return (
        byte,
        tl.where(is_bad, 0x7F, e4m3_code(_times_power_of_two(e, exponent))),
        tl.where(is_bad, 0x7F, e4m3_code(_times_power_of_two(o, exponent))),
    )


@triton.jit
def store_row(e, o, values, scales, FORMAT: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """Store the pairs (e, o) as one row. values, scales: pointers to its bytes."""
    groups: tl.constexpr = D // GROUP
    group = tl.arange(0, groups)
    pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    if FORMAT == "packed":
        byte, low, high = _e4m3_pairs(e, o)
        is_rope = (pair >= (D - 64) // 2) & (pair < D // 2)
        words = values.to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(words + pair, (low | (high << 8)).to(tl.uint16), mask=~is_rope)
        tail = (values + (D - 64)).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(tail + pair - (D - 64) // 2, bf16_bits(e) | (bf16_bits(o) << 16), mask=is_rope)
        padded: tl.constexpr = (groups - 1 + 7) // 8 * 8
        if padded > groups:
            tl.store(scales + tl.arange(0, padded), tl.zeros((padded,), tl.uint8), mask=tl.arange(0, padded) >= groups)
        tl.store(scales + group, tl.where(group < groups - 1, byte, 0).to(tl.uint8), mask=group < padded)
    elif FORMAT == "fp8_index":
        byte, low, high = _e4m3_pairs(e, o)
        words = values.to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(words + pair, (low | (high << 8)).to(tl.uint16))
        bits = tl.where(byte == 255, 0x7FC00000, byte << 23)
        tl.store(scales.to(tl.pointer_type(tl.int32), bitcast=True) + group, bits)
    elif FORMAT == "fp4_index":
        amax = tl.max(tl.maximum(_magnitude(e), _magnitude(o)), 1)
        byte = _scale_byte(amax, 0x01C00000, 0x3FFFFF, 2)  # the bits of 6 * 2^-126
        exponent = (127 - byte)[:, None]
        low = e2m1_code(_times_power_of_two(e, exponent))
        high = e2m1_code(_times_power_of_two(o, exponent))
        tl.store(values + pair, (low | (high << 4)).to(tl.uint8))
        tl.store(scales + group, byte.to(tl.uint8))
    elif FORMAT == "bf16":
        words = values.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(words + pair, bf16_bits(e) | (bf16_bits(o) << 16))
    else:
        floats = values.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(floats + 2 * pair, e)
        tl.store(floats + 2 * pair + 1, o)


@triton.jit(do_not_specialize_on_alignment=["values", "scales"])
def store_rows_kernel(
    x, units, rows, values, scales, unit_bytes,
    D: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """One program per row of x [N, D]."""
    n = tl.program_id(0)
    unit = tl.load(units + n).to(tl.int64)
    row = tl.load(rows + n)
    if unit >= 0:
        e, o = pairs_of(tl.load(x + n.to(tl.int64) * D + tl.arange(0, D)).to(tl.float32), D, GROUP)
        base = unit * unit_bytes
        store_row(e, o, values + base + row * ROW_BYTES, scales + base + row * SCALE_BYTES, FORMAT, D, GROUP)


def store_rows(pool: Rows, units: Tensor, rows: Tensor, x: Tensor) -> None:
    """Store x [N, D] as rows (units[n], rows[n]) of `pool`: `Rows.write` without a host sync. A unit of -1 is left out.

    units, rows: [N] int32.   x: float32 or bfloat16, contiguous.   The pairs must be distinct; what lies outside the
    pool is the caller's fault and is not noticed here.
    """
    if x.dim() != 2 or x.shape != (units.shape[0], pool.width) or rows.shape != units.shape or not x.is_contiguous():
        raise ValueError(f"rows {tuple(x.shape)} for {tuple(units.shape)} places of {pool.width} channels")
    if not uses_triton(x):
        inside = units >= 0
        pool.write(units[inside], rows[inside], x[inside])
        return
    if x.shape[0] == 0:
        return
    values, scales, unit_bytes = row_args(pool)
    store_rows_kernel[(x.shape[0],)](
        x, units, rows, values, scales, unit_bytes, **_constants(pool.format, pool.width), num_warps=4
    )


def variants(arch: str) -> list[Variant]:
    """Return every compilation of store_rows."""
    return [
        Variant(
            op=f"store_rows {fmt} {width}",
            kernel=store_rows_kernel,
            signature={
                "x": "*fp32", "units": "*i32", "rows": "*i32", "values": "*u8", "scales": "*u8", "unit_bytes": "i32"
            },
            constants=_constants(fmt, width),
            num_warps=4,
            num_stages=1,
            tensor_ops=(),
            bytes_per_program=4 * width + value_bytes(fmt, width) + scale_row_bytes(fmt, width),
            unaligned=("values", "scales"),
        )
        for fmt, width in (("packed", 512), ("fp8_index", 128), ("fp4_index", 128), ("bf16", 512), ("fp32", 512))
    ]  # fmt: skip


def _constants(fmt: str, width: int) -> dict[str, Any]:
    return {
        "D": width,
        "FORMAT": fmt,
        "GROUP": group_of(fmt, width),
        "ROW_BYTES": value_bytes(fmt, width),
        "SCALE_BYTES": scale_row_bytes(fmt, width),
    }
