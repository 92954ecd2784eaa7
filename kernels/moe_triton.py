"""The Triton kernels of moe_decode.py: grouped products of packed expert weights with few tokens each.

Every warp works alone: it takes 16 R rows of one expert and a share of its channels, reads packed weights (layout:
expert_weights.py) straight into the registers in which the tensor cores want their left operand, unpacks them there,
and multiplies with 8 tokens or more as the narrow right operand, read the same way. No shared memory, no barrier, until
the shares of the channels are summed.

A word of 4 bytes becomes 4 registers of two f16: nine bit operations, since the code's bits were put where one shift
serves four weights. A code's three magnitude bits in the low exponent and top mantissa bits of f16 are its value times
2^-14, also for the one subnormal. One multiplication by the block's scale follows; 2 x 4 significant bits are exact in
f16. NVFP4: the scale times 2^7, the missing 2^7 goes onto the sum. MXFP4: the scale relative to the expert's largest,
times 2^14; the largest is the expert's factor.

The order of channels inside a product is free as long as both operands agree: lane t of a quad holds channels 16 t to
16 t + 15 of each 64, so that it needs one scale for each of its two rows and reads activations in 16-byte pieces.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_load import keep, to_f16
from kernels.triton_env import INTERPRETED

NVFP4, MXFP4 = tl.constexpr(0), tl.constexpr(1)

_PLAIN = tl.constexpr(INTERPRETED)
_NVFP4_LIFT = tl.constexpr(128.0)

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
def _load_weights(
    codes_ptr, scales_ptr, row_tile, step, wanted,
    STEPS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Return words [4, 8, W, R, S, 4] and scales [4, 8, W, R, S] of each warp's rows at its step, step + 1, ...

    STEPS: of 64 channels in all.   PACKED: steps whose scales lie together.
    """
    W: tl.constexpr = KS * RS
    # Dimensions in the order in which the compiler hands them out: lanes, warps, then registers, the last one excepted.
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None]
    w = tl.arange(0, W)[None, None, :, None, None, None]
    r = tl.arange(0, R)[None, None, None, :, None, None]
    s = tl.arange(0, S)[None, None, None, None, :, None]
    c = tl.arange(0, 4)[None, None, None, None, None, :]
    tile = row_tile + (w % RS) * R + r
    at = tile * STEPS + step + (w // RS) * (STEPS // KS) + s
    words = tl.load(codes_ptr + (at * 128 + g * 16 + t * 4 + c), mask=wanted, cache_modifier=".cg")
    t = tl.arange(0, 4)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None]
    w = tl.arange(0, W)[None, None, :, None, None]
    r = tl.arange(0, R)[None, None, None, :, None]
    s = tl.arange(0, S)[None, None, None, None, :]
    tile = row_tile + (w % RS) * R + r
    first = step + (w // RS) * (STEPS // KS)
    at = tile * (STEPS // PACKED) + first // PACKED
    lane = at * 32 + g * 4 + t if FORMAT == NVFP4 else at * 16 + g * 2 + t // 2
    place = lane * PACKED + s
    if S < PACKED:
        place += tl.multiple_of(first % PACKED, (S, S, S, S, S))
    return words, tl.load(scales_ptr + place, mask=wanted, cache_modifier=".cg")


@triton.jit
def _load_tokens(
    x_ptr, row, live, step, K: tl.constexpr, S: tl.constexpr, NB: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr
):  # fmt: skip
    """Return the right operand [W, 64 S, 8 NB] f16: channels of rows [8, NB] of x at each warp's step, ..."""
    W: tl.constexpr = KS * RS
    t = tl.arange(0, 4)[:, None, None, None, None, None, None]
    w = tl.arange(0, W)[None, None, :, None, None, None, None]
    s = tl.arange(0, S)[None, None, None, None, :, None, None]
    half = tl.arange(0, 2)[None, None, None, None, None, :, None]
    i = tl.arange(0, 8)[None, None, None, None, None, None, :]
    row = row[None, :, None, :, None, None, None]
    live = live[None, :, None, :, None, None, None]
    channel = (step + (w // RS) * (K // 64 // KS) + s) * 64 + t * 16 + half * 8 + i
    x = tl.load(x_ptr + (row * K + channel), mask=live, other=0.0)
    x = tl.reshape(x, (4, 8, W, NB, S, 2, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 4, 5, 6, 7, 0, 8, 3, 1)), (W, 64 * S, 8 * NB))


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
    return tl.reshape(tl.permute(value, (2, 3, 8, 1, 4, 5, 6, 9, 0, 7)), (W, 16 * R, 64 * S))


@triton.jit
def _factors(scales, tops, FORMAT: tl.constexpr):
    """Return what each lane's first and second row are multiplied with, from scales [..] int16: f16, two in an int32.

    tops: MXFP4's largest exponent bytes, of first rows and of second rows.
    """
    if FORMAT == MXFP4:
        both = scales.to(tl.int32)
        low = tl.maximum((both & 255) - (tops[0] - 29), 0)
        high = tl.maximum(((both >> 8) & 255) - (tops[1] - 29), 0)
        if _PLAIN:
            low = (low << 10).to(tl.int16).to(tl.float16, bitcast=True)
            high = (high << 10).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            low, high = low * 0x04000400, high * 0x04000400
    elif _PLAIN:
        both = scales.to(tl.int32)
        low = (both & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16) * _NVFP4_LIFT
        high = ((both >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16) * _NVFP4_LIFT
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            _SCALES, "=r,=r,h", [scales], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return low, high


@triton.jit
def _unpack(
    words, scales, tops, S: tl.constexpr, R: tl.constexpr, W: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Return the left operand [W, 16 R, 64 S] f16 of words and scales as _load_weights gives them."""
    low, high = _factors(scales, tops, FORMAT)
    if _PLAIN:
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
        w = keep(tl.reshape(tl.permute(w, (2, 3, 7, 1, 4, 5, 9, 8, 0, 6)), (W, 16 * R, 64 * S)))
    return w


@triton.jit
def _product(
    codes_ptr, scales_ptr, words, scales, tops, x_ptr, row, live, row_tile,
    K: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr,
    NB: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Return [RS R, 16, 8 NB] float32: rows of an expert times rows [8, NB] of x. words, scales: of the first step."""
    W: tl.constexpr = KS * RS
    STEPS: tl.constexpr = K // 64
    SHARE: tl.constexpr = STEPS // KS
    total = tl.zeros((W, 16 * R, 8 * NB), tl.float32)
    for step in range(0, SHARE, S):
        next_words, next_scales = words, scales
        if SHARE > S:
            next_words, next_scales = _load_weights(
                codes_ptr, scales_ptr, row_tile, step + S, step + S < SHARE, STEPS, PACKED, S, R, KS, RS, FORMAT
            )  # fmt: skip
        x = _load_tokens(x_ptr, row, live, step, K, S, NB, KS, RS)
        total = tl.dot(_unpack(words, scales, tops, S, R, W, FORMAT), x, total)
        words, scales = next_words, next_scales
    if KS > 1:
        total = tl.sum(tl.reshape(total, (KS, RS, 16 * R, 8 * NB)), 0)
    return tl.reshape(total, (RS * R, 16, 8 * NB))


@triton.jit
def _top(factor, FORMAT: tl.constexpr):
    """Return the largest exponent byte that an MXFP4 factor, a power of two, stands for."""
    return factor.to(tl.int32, bitcast=True) >> 23 if FORMAT == MXFP4 else 0


@triton.jit
def _hide(
    hidden_ptr, codes_ptr, scales_ptr, words, scales, gate_factor, up_factor, x_ptr, token_ptr, weight_ptr,
    start, end, row_tile, limit,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write weight * silu(gate) * up of 8 RS R channels of routed rows start to end, at most 8 NB."""
    at = start + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
    live = at < end
    token = tl.load(token_ptr + at, mask=live, other=0)
    tops = (_top(gate_factor, FORMAT), _top(up_factor, FORMAT))
    total = _product(
        codes_ptr, scales_ptr, words, scales, tops, x_ptr, token, live, row_tile,
        H, PACKED, S, R, KS, RS, NB, FORMAT,
    )  # fmt: skip
    total = tl.reshape(total, (RS * R, 2, 8, 8 * NB))
    gate, up = tl.split(tl.permute(total, (0, 2, 3, 1)))
    lift: tl.constexpr = _NVFP4_LIFT if FORMAT == NVFP4 else 1.0
    gate, up = gate * (gate_factor * lift), up * (up_factor * lift)
    # Comparisons and not tl.minimum: NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    column = start + tl.arange(0, 8 * NB)
    is_row = column < end
    weight = tl.load(weight_ptr + column, mask=is_row, other=0.0)
    hidden = to_f16(gate / (1.0 + tl.exp(-gate)) * up * weight[None, None, :])
    channel = (row_tile + tl.arange(0, RS * R)[:, None]) * 8 + tl.arange(0, 8)[None, :]
    to = hidden_ptr + column.to(tl.int64)[None, None, :] * INNER + channel[:, :, None]
    tl.store(to, hidden, mask=is_row[None, None, :])


@triton.jit
def up_kernel(
    hidden_ptr, x_ptr, codes_ptr, scales_ptr, factors_ptr, token_ptr, weight_ptr, active_ptr, limit,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, WIDE: tl.constexpr, WIDE_S: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[r] = weight * silu(min(x W1^T, limit)) * clamp(x W3^T, limit) for every routed row r, f16.

    A program takes items of a list, expert by expert, each 8 RS R channels of an expert for all of its rows. WIDE: rows
    taken at once, in eights, where an expert has more than 8; 0 if none can.   active_ptr: as moe_routing.py writes it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = 2 * INNER // (16 * R * RS)
    STEPS: tl.constexpr = H // 64
    GROUP: tl.constexpr = 16 if FORMAT == NVFP4 else 32
    items = tl.load(active_ptr) * BLOCKS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        entry = active_ptr + 4 + (item // BLOCKS) * 4
        expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        row_tile = (item % BLOCKS) * (R * RS)
        codes = codes_ptr + expert.to(tl.int64) * (2 * INNER * H // 8)
        scaled = scales_ptr + expert.to(tl.int64) * (2 * INNER * H // (2 * GROUP))
        gate_factor, up_factor = tl.load(factors_ptr + expert * 2), tl.load(factors_ptr + expert * 2 + 1)
        end = first + count
        if count <= 8 or WIDE == 0:
            for start in range(first, end, 8):
                words, scales = _load_weights(codes, scaled, row_tile, 0, True, STEPS, PACKED, S, R, KS, RS, FORMAT)
                _hide(
                    hidden_ptr, codes, scaled, words, scales, gate_factor, up_factor, x_ptr, token_ptr, weight_ptr,
                    start, end, row_tile, limit, H, INNER, PACKED, S, R, KS, RS, 1, FORMAT,
                )  # fmt: skip
        else:
            for start in range(first, end, 8 * WIDE):
                words, scales = _load_weights(
                    codes, scaled, row_tile, 0, True, STEPS, PACKED, WIDE_S, R, KS, RS, FORMAT
                )  # fmt: skip
                _hide(
                    hidden_ptr, codes, scaled, words, scales, gate_factor, up_factor, x_ptr, token_ptr, weight_ptr,
                    start, end, row_tile, limit, H, INNER, PACKED, WIDE_S, R, KS, RS, WIDE, FORMAT,
                )  # fmt: skip


@triton.jit
def _give(
    part_ptr, codes_ptr, scales_ptr, words, scales, factor, hidden_ptr, start, end, row_tile,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write 16 RS R channels of what routed rows start to end, at most 8 NB, add to their tokens."""
    row = start + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
    tops = (_top(factor, FORMAT), _top(factor, FORMAT))
    total = _product(
        codes_ptr, scales_ptr, words, scales, tops, hidden_ptr, row, row < end, row_tile,
        INNER, PACKED, S, R, KS, RS, NB, FORMAT,
    )  # fmt: skip
    total *= factor * (_NVFP4_LIFT if FORMAT == NVFP4 else 1.0)
    column = start + tl.arange(0, 8 * NB)
    channel = (row_tile + tl.arange(0, RS * R)[:, None]) * 16 + tl.arange(0, 16)[None, :]
    to = part_ptr + column.to(tl.int64)[None, None, :] * H + channel[:, :, None]
    tl.store(to, total.to(part_ptr.dtype.element_ty), mask=(column < end)[None, None, :])


@triton.jit
def down_kernel(
    part_ptr, hidden_ptr, codes_ptr, scales_ptr, factors_ptr, active_ptr,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, WIDE: tl.constexpr, WIDE_S: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part[r] = hidden[r] W2^T for every routed row r. Items as in up_kernel, each 16 RS R channels.

    The list is older than up_kernel, which waited for it before this kernel could be launched: it is read, and the
    first weights are, before up_kernel has ended.
    """
    BLOCKS: tl.constexpr = H // (16 * R * RS)
    STEPS: tl.constexpr = INNER // 64
    GROUP: tl.constexpr = 16 if FORMAT == NVFP4 else 32
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    items = tl.load(active_ptr) * BLOCKS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        entry = active_ptr + 4 + (item // BLOCKS) * 4
        expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        row_tile = (item % BLOCKS) * (R * RS)
        codes = codes_ptr + expert.to(tl.int64) * (H * INNER // 8)
        scaled = scales_ptr + expert.to(tl.int64) * (H * INNER // (2 * GROUP))
        factor = tl.load(factors_ptr + expert)
        end = first + count
        if count <= 8 or WIDE == 0:
            for start in range(first, end, 8):
                words, scales = _load_weights(codes, scaled, row_tile, 0, True, STEPS, PACKED, S, R, KS, RS, FORMAT)
                if PDL:
                    tl.extra.cuda.gdc_wait()  # costs nothing the second time
                _give(
                    part_ptr, codes, scaled, words, scales, factor, hidden_ptr, start, end, row_tile,
                    H, INNER, PACKED, S, R, KS, RS, 1, FORMAT,
                )  # fmt: skip
        else:
            for start in range(first, end, 8 * WIDE):
                words, scales = _load_weights(
                    codes, scaled, row_tile, 0, True, STEPS, PACKED, WIDE_S, R, KS, RS, FORMAT
                )  # fmt: skip
                if PDL:
                    tl.extra.cuda.gdc_wait()
                _give(
                    part_ptr, codes, scaled, words, scales, factor, hidden_ptr, start, end, row_tile,
                    H, INNER, PACKED, WIDE_S, R, KS, RS, WIDE, FORMAT,
                )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()  # whoever waits for this kernel relies on all that came before


@triton.jit
def sum_kernel(
    out_ptr, part_ptr, place_ptr, add_ptr,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = part[place[t, 0]] + part[place[t, 1]] + ..., in that order, and then add[t]. Grid (tokens, blocks)."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < H
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(place_ptr + token * TOP_K + k)
        at = part_ptr + row.to(tl.int64) * H + channel
        total += tl.load(at, mask=channel < tl.where(row >= 0, H, 0), other=0.0).to(tl.float32)
    if add_ptr is not None:
        total += tl.load(add_ptr + token.to(tl.int64) * H + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * H + channel, total.to(out_ptr.dtype.element_ty), mask=inside)
