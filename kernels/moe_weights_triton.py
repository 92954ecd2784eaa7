"""Packed expert weights on their way into tensor cores: loaded as they lie, unpacked in registers.

A word of 4 bytes becomes 4 registers of two f16: nine bit operations, since the code's bits were put where one shift
serves four weights. A code's three magnitude bits in the low exponent and top mantissa bits of f16 are its value times
2^-14, also for the one subnormal. One multiplication by the block's scale follows; 2 x 4 significant bits are exact in
f16. NVFP4: the scale times 2^7, the missing 2^7 goes onto the sum. MXFP4: the scale relative to the expert's largest,
times 2^14; the largest is the expert's factor.

The order of channels inside a product is free as long as both operands agree: lane t of a quad holds channels 16 t to
16 t + 15 of each 64, so that it needs one scale for each of its two rows.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

NVFP4, MXFP4 = tl.constexpr(0), tl.constexpr(1)

PLAIN = tl.constexpr(INTERPRETED)
NVFP4_LIFT = tl.constexpr(128.0)

# Two words in $8, $9 and the scales of a lane's two rows, twice each, in $10, $12. Of a word: register i = 2 kk + row.
_UNPACK = tl.constexpr(
    """{
    .reg .b32 s, m, a0, a1, a2, a3, b0, b1, b2, b3;
    and.b32 a0, $8, 0x8E008E00;
    shl.b32 s, $8, 8;
    and.b32 a1, s, 0x8E008E00;
    shr.b32 s, $8, 3;
    shl.b32 m, $8, 7;
    lop3.b32 m, s, m, 0x80808080, 0xD8;
    and.b32 a2, m, 0x8E008E00;
    shl.b32 s, m, 8;
    and.b32 a3, s, 0x8E008E00;
    and.b32 b0, $9, 0x8E008E00;
    shl.b32 s, $9, 8;
    and.b32 b1, s, 0x8E008E00;
    shr.b32 s, $9, 3;
    shl.b32 m, $9, 7;
    lop3.b32 m, s, m, 0x80808080, 0xD8;
    and.b32 b2, m, 0x8E008E00;
    shl.b32 s, m, 8;
    and.b32 b3, s, 0x8E008E00;
    mul.rn.f16x2 $0, a0, $10;
    mul.rn.f16x2 $1, a1, $12;
    mul.rn.f16x2 $2, a2, $10;
    mul.rn.f16x2 $3, a3, $12;
    mul.rn.f16x2 $4, b0, $10;
    mul.rn.f16x2 $5, b1, $12;
    mul.rn.f16x2 $6, b2, $10;
    mul.rn.f16x2 $7, b3, $12;
}"""
)
# Two e4m3 codes, those of a lane's rows, become f16 times 2^7, each twice.
_SCALES = tl.constexpr(
    """{
    .reg .b32 v, lift;
    cvt.rn.f16x2.e4m3x2 v, $2;
    mov.b32 lift, 0x58005800;
    mul.rn.f16x2 v, v, lift;
    prmt.b32 $0, v, v, 0x1010;
    prmt.b32 $1, v, v, 0x3232;
}"""
)


@triton.jit
def load_weights(
    codes_ptr, scales_ptr, row_tile, step, wanted,
    STEPS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Return words [4, 8, W, R, S, 4] and scales [4, 8, W, R, S] of each warp's rows at its step, step + 1, ...

    Warp ks RS + rs takes tiles rs, rs + RS, ... of 16 rows.   STEPS: of 64 channels in all.   PACKED: steps whose
    scales lie together.
    """
    W: tl.constexpr = KS * RS
    # Dimensions in the order in which the compiler hands them out: lanes, warps, then registers, the last one excepted.
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None]
    w = tl.arange(0, W)[None, None, :, None, None, None]
    r = tl.arange(0, R)[None, None, None, :, None, None]
    s = tl.arange(0, S)[None, None, None, None, :, None]
    c = tl.arange(0, 4)[None, None, None, None, None, :]
    tile = row_tile + r * RS + w % RS
    at = tile * STEPS + step + (w // RS) * (STEPS // KS) + s
    words = tl.load(codes_ptr + (at * 128 + g * 16 + t * 4 + c), mask=wanted, cache_modifier=".cg")
    t = tl.arange(0, 4)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None]
    w = tl.arange(0, W)[None, None, :, None, None]
    r = tl.arange(0, R)[None, None, None, :, None]
    s = tl.arange(0, S)[None, None, None, None, :]
    tile = row_tile + r * RS + w % RS
    first = step + (w // RS) * (STEPS // KS)
    at = tile * (STEPS // PACKED) + first // PACKED
    lane = at * 32 + g * 4 + t if FORMAT == NVFP4 else at * 16 + g * 2 + t // 2
    place = lane * PACKED + s
    if S < PACKED:
        rest = first % PACKED
        if W > 1:  # else it is folded into something that takes no hint
            rest = tl.multiple_of(rest, (S, S, S, S, S))
        place += rest
    return words, tl.load(scales_ptr + place, mask=wanted, cache_modifier=".cg")


@triton.jit
def _unpack_plain(words, low, high, S: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Return what _unpack does, without inline assembly: for the interpreter."""
    word = tl.reshape(words, (4, 8, W, R, S, 2, 2, 1, 1, 1))
    p = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 1, 1, 2, 1, 1))
    half = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 1, 1, 1, 2, 1))
    kk = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 1, 1, 1, 1, 2))
    byte = word >> (16 * p + 8 - 8 * half)
    bits = tl.where(kk == 0, (byte & 0x8E) << 8, ((byte & 0x01) << 15) | ((byte & 0x70) << 5))
    factor = tl.reshape(tl.join(low, high), (4, 8, W, R, S, 1, 1, 1, 2, 1))
    value = bits.to(tl.int16).to(tl.float16, bitcast=True) * factor
    return tl.permute(value, (2, 3, 8, 1, 4, 5, 6, 9, 0, 7))


@triton.jit
def _factors(scales, tops, FORMAT: tl.constexpr):
    """Return what each lane's first and second row are multiplied with, from scales [..] int16: f16, two in an int32.

    tops: MXFP4's largest exponent bytes, of first rows and of second rows.
    """
    if FORMAT == MXFP4:
        both = scales.to(tl.int32)
        low = tl.maximum((both & 255) - (tops[0] - 29), 0)
        high = tl.maximum(((both >> 8) & 255) - (tops[1] - 29), 0)
        if PLAIN:
            low = (low << 10).to(tl.int16).to(tl.float16, bitcast=True)
            high = (high << 10).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            low, high = low * 0x04000400, high * 0x04000400
    elif PLAIN:
        both = scales.to(tl.int32)
        low = (both & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16) * NVFP4_LIFT
        high = ((both >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16) * NVFP4_LIFT
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            _SCALES, "=r,=r,h", [scales], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return low, high


@triton.jit
def unpack(
    words, scales, tops, S: tl.constexpr, R: tl.constexpr, W: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Return f16 [warp, tile, half, g, then the channels of a product in order] of what load_weights gives."""
    low, high = _factors(scales, tops, FORMAT)
    if PLAIN:
        w = _unpack_plain(words, low, high, S, R, W)
    else:
        SHAPE: tl.constexpr = (4, 8, W, R, S, 4)
        low = tl.broadcast_to(low[:, :, :, :, :, None], SHAPE)
        high = tl.broadcast_to(high[:, :, :, :, :, None], SHAPE)
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [words, low, high],
            dtype=(
                tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
            ), is_pure=True, pack=2,
        )  # fmt: skip
        a = tl.join(tl.join(a0, a1), tl.join(a2, a3))
        b = tl.join(tl.join(b0, b1), tl.join(b2, b3))
        w = tl.reshape(tl.join(a, b), (4, 8, W, R, S, 2, 2, 2, 2, 2))
        w = tl.permute(w, (2, 3, 7, 1, 4, 5, 9, 8, 0, 6))
    return w
