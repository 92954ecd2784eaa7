"""The Triton kernels of moe_decode.py: grouped products of packed expert weights with few tokens each.

A warp reads packed weights (layout: expert_weights.py) straight into the registers in which the tensor cores want their
left operand and unpacks them there; tokens are the narrow right operand. Where an expert has up to 8 tokens, or 16, a
warp works alone, on 16 R rows and a share of the channels, and reads the tokens into registers, too: no shared memory,
no barrier, until the shares are summed. Where it has more, warps take different rows and share the tokens, which
asynchronous copies bring into shared memory, and have more weights on their way, AHEAD steps.

A word of 4 bytes becomes 4 registers of two f16: nine bit operations, since the code's bits were put where one shift
serves four weights. A code's three magnitude bits in the low exponent and top mantissa bits of f16 are its value times
2^-14, also for the one subnormal. One multiplication by the block's scale follows; 2 x 4 significant bits are exact in
f16. NVFP4: the scale times 2^7, the missing 2^7 goes onto the sum. MXFP4: the scale relative to the expert's largest,
times 2^14; the largest is the expert's factor.

The order of channels inside a product is free as long as both operands agree: lane t of a quad holds channels 16 t to
16 t + 15 of each 64, so that it needs one scale for each of its two rows. Activations are stored so that it reads them
in 16-byte pieces, the quad's side by side (expert_weights.to_pieces), or in the product's order (to_products).
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
    channel = (step + (w // RS) * (K // 64 // KS) + s) * 64 + half * 32 + t * 8 + i
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
    """Return f16 [warp, tile, half, g, then the channels of a product in order] of what _load_weights gives."""
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
        w = tl.permute(w, (2, 3, 7, 1, 4, 5, 9, 8, 0, 6))
    return w


@triton.jit
def _product(
    weights, x_ptr, gather_ptr, edges, row_tile,
    K: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr,
    NB: tl.constexpr, FORMAT: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Return [RS, R, 16, 8 NB] float32: rows of an expert times routed rows of x.

    weights: codes, scales and top exponents of the expert.   edges: the first routed row, and one beyond the last.
    gather_ptr: the row of x of each routed row, None if it is the same.   WAIT: for the kernel before, once the first
    weights are on their way.
    """
    codes_ptr, scales_ptr, tops = weights[0], weights[1], weights[2]
    W: tl.constexpr = KS * RS
    STEPS: tl.constexpr = K // 64
    SHARE: tl.constexpr = STEPS // KS
    words, scales = _load_weights(codes_ptr, scales_ptr, row_tile, 0, True, STEPS, PACKED, S, R, KS, RS, FORMAT)
    row, live = _rows(edges, gather_ptr, NB, WAIT)
    total = tl.zeros((W, 16 * R, 8 * NB), tl.float32)
    for step in tl.range(0, SHARE, S, num_stages=1):
        next_words, next_scales = words, scales
        if SHARE > S:
            next_words, next_scales = _load_weights(
                codes_ptr, scales_ptr, row_tile, step + S, step + S < SHARE, STEPS, PACKED, S, R, KS, RS, FORMAT
            )  # fmt: skip
        x = _load_tokens(x_ptr, row, live, step, K, S, NB, KS, RS)
        w = tl.reshape(_unpack(words, scales, tops, S, R, W, FORMAT), (W, 16 * R, 64 * S))
        total = tl.dot(keep(w), x, total)
        words, scales = next_words, next_scales
    if KS > 1:
        total = tl.sum(tl.reshape(total, (KS, RS, 16 * R, 8 * NB)), 0)
    return tl.reshape(total, (RS, R, 16, 8 * NB))


@triton.jit
def _settle(total):
    """Return sums, float32, when the product is done: not left to run on, it would read what comes into its registers.

    On sm_90 Triton lets the products of a pipelined loop run beside the next step's work, and only watches over
    operands in shared memory. Seen there: with two warp groups, weights of the next step in this one's sums.
    """
    if not _PLAIN:
        total = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total


@triton.jit
def _product_shared(
    weights, x_ptr, gather_ptr, edges, row_tile, begin,
    K: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    NB: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Return [R, W, 16, 8 NB] float32: as _product, every warp with other rows; x is in the product's order.

    Of the channels one of SPLIT shares, from step begin on; S steps at once, of which AHEAD are on their way. Weights
    stay in the registers into which they were loaded: to move them would be to wait for them.
    """
    codes_ptr, scales_ptr, tops = weights[0], weights[1], weights[2]
    STEPS: tl.constexpr = K // 64
    end = begin + STEPS // SPLIT
    words, scales = (), ()
    for i in tl.static_range(AHEAD):
        loaded, scale = _load_weights(
            codes_ptr, scales_ptr, row_tile, begin + i * S, True, STEPS, PACKED, S, R, 1, W, FORMAT
        )
        words, scales = words + (loaded,), scales + (scale,)
    at = edges[0] + tl.arange(0, 8 * NB)
    live = at < edges[1]
    if WAIT:
        tl.extra.cuda.gdc_wait()
    row = at
    if gather_ptr is not None:
        row = tl.load(gather_ptr + at, mask=live, other=0)
    x_row = x_ptr + row * K
    total = tl.zeros((16 * R * W, 8 * NB), tl.float32)
    for step in range(begin, end, AHEAD * S):
        next_words, next_scales = (), ()
        for i in tl.static_range(AHEAD):
            later = step + (AHEAD + i) * S
            loaded, scale = _load_weights(
                codes_ptr, scales_ptr, row_tile, later, later < end, STEPS, PACKED, S, R, 1, W, FORMAT
            )
            next_words, next_scales = next_words + (loaded,), next_scales + (scale,)
            channel = (step + i * S) * 64 + tl.arange(0, 64 * S)
            x = tl.load(x_row[:, None] + channel[None, :], mask=live[:, None], other=0.0)
            w = tl.permute(_unpack(words[i], scales[i], tops, S, R, W, FORMAT), (1, 0, 2, 3, 4, 5, 6, 7, 8, 9))
            total = _settle(tl.dot(keep(tl.reshape(w, (16 * R * W, 64 * S))), tl.trans(x), total))
        words, scales = next_words, next_scales
    return tl.reshape(total, (R, W, 16, 8 * NB))


@triton.jit
def _rows(edges, gather_ptr, NB: tl.constexpr, WAIT: tl.constexpr):
    """Return rows [8, NB] of the activations of routed rows from the first edge on, and which are before the second."""
    at = edges[0] + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
    live = at < edges[1]
    if WAIT:
        tl.extra.cuda.gdc_wait()  # costs nothing the second time
    row = at
    if gather_ptr is not None:
        row = tl.load(gather_ptr + at, mask=live, other=0)
    return row, live


@triton.jit
def _top(factor, FORMAT: tl.constexpr):
    """Return the largest exponent byte that an MXFP4 factor, a power of two, stands for."""
    return factor.to(tl.int32, bitcast=True) >> 23 if FORMAT == MXFP4 else 0


@triton.jit
def _hide(
    out, total, weights, edges, tile,
    COLUMNS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Write h of routed rows from start, N at most, from total [A, B, 16, N]: tiles of 8 rows of w1 and 8 of w3.

    In the order in which the last product reads them: that of to_products where MANY, else of to_pieces.
    """
    hidden_ptr, weight_ptr, limit = out
    gate, up = tl.split(tl.permute(tl.reshape(total, (A, B, 2, 8, N)), (0, 1, 3, 4, 2)))
    gate, up = gate * weights[3], up * weights[4]
    # Comparisons and not tl.minimum: NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    row = edges[0] + tl.arange(0, N)
    live = row < edges[1]
    weight = tl.load(weight_ptr + row, mask=live, other=0.0)
    hidden = to_f16(gate / (1.0 + tl.exp(-gate)) * up * weight[None, None, None, :])
    # A tile's 8 channels are those of a lane's half.
    i = tl.arange(0, 8)[None, None, :]
    first, t = (tile // 8 * 64 + tile % 2 * 32)[:, :, None], (tile // 2 % 4)[:, :, None]
    channel = first + (i // 2 * 8 + t * 2 + i % 2 if MANY else t * 8 + i)
    to = hidden_ptr + row.to(tl.int64)[None, None, None, :] * COLUMNS + channel[:, :, :, None]
    tl.store(to, hidden, mask=live[None, None, None, :])


@triton.jit
def _give(out, total, weights, edges, tile, COLUMNS: tl.constexpr, N: tl.constexpr):
    """Write h W2^T of routed rows from start, N at most, from total [.., .., 16, N]."""
    row = edges[0] + tl.arange(0, N)
    channel = tile[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    to = out[0] + row.to(tl.int64)[None, None, None, :] * COLUMNS + channel[:, :, :, None]
    tl.store(to, total * weights[3], mask=(row < edges[1])[None, None, None, :])


@triton.jit
def _few(
    out, weights, x_ptr, gather_ptr, edges, row_tile,
    K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """R RS tiles from row_tile on for routed rows between edges, 8 NB at a time."""
    tile = row_tile + tl.arange(0, RS)[:, None] + tl.arange(0, R)[None, :] * RS
    for start in tl.range(edges[0], edges[1], 8 * NB, num_stages=1):
        part = (start, edges[1])
        total = _product(weights, x_ptr, gather_ptr, part, row_tile, K, PACKED, S, R, KS, RS, NB, FORMAT, WAIT)
        if UP:
            _hide(out, total, weights, part, tile, COLUMNS, RS, R, 8 * NB, False)
        else:
            _give(out, total, weights, part, tile, COLUMNS, 8 * NB)


@triton.jit
def _many(
    out, weights, x_ptr, gather_ptr, edges, row_tile, shares, share, place,
    K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """As _few, R W tiles with shared tokens.

    SPLIT > 1: a share of the sums; the last of an item's programs to finish adds them up, in their order.
    """
    tile = row_tile + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    begin = share * (K // 64 // SPLIT)
    for start in tl.range(edges[0], edges[1], 8 * NB, num_stages=1):
        part = (start, edges[1])
        total = _product_shared(
            weights, x_ptr, gather_ptr, part, row_tile, begin, K, PACKED, S, AHEAD, R, W, NB, SPLIT, FORMAT, WAIT
        )
        if SPLIT > 1:
            at, live = _place_share(part, place, row_tile, 2 * COLUMNS, 16 * R * W, 8 * NB)
            tl.store(shares[0] + share * shares[2] + at, tl.reshape(total, (16 * R * W, 8 * NB)), mask=live)
        elif UP:
            _hide(out, total, weights, part, tile, COLUMNS, R, W, 8 * NB, True)
        else:
            _give(out, total, weights, part, tile, COLUMNS, 8 * NB)
    if SPLIT > 1:
        tl.debug_barrier()  # all have stored before one says so; that releases their stores and acquires others'
        counter = shares[1] + (place * (2 * COLUMNS // 16) + row_tile)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counter, 0)  # for the next call
            for start in tl.range(edges[0], edges[1], 8 * NB, num_stages=1):
                part = (start, edges[1])
                at, live = _place_share(part, place, row_tile, 2 * COLUMNS, 16 * R * W, 8 * NB)
                total = tl.load(shares[0] + at, mask=live, other=0.0, cache_modifier=".cg")
                for i in tl.static_range(1, SPLIT):
                    total += tl.load(shares[0] + i * shares[2] + at, mask=live, other=0.0, cache_modifier=".cg")
                total = tl.reshape(total, (R, W, 16, 8 * NB))
                _hide(out, total, weights, part, tile, COLUMNS, R, W, 8 * NB, True)


@triton.jit
def _place_share(edges, place, row_tile, ROWS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return where [M, N] of a share lies, from a tile on, and which of it there is.

    N routed rows at a time lie row by row innermost; N rows apart for each expert before, to stay clear of the next.
    """
    column = tl.arange(0, N)
    at = (edges[0] + place * N) * ROWS + row_tile * (16 * N) + tl.arange(0, M)[:, None] * N + column[None, :]
    return at, (edges[0] + column < edges[1])[None, :]


@triton.jit
def _take(
    out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, gather_ptr, active_ptr, entries, capacity, shares,
    ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    KS: tl.constexpr, RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr,
    AHEAD: tl.constexpr, MANY_R: tl.constexpr, SPLIT: tl.constexpr, LOOPS: tl.constexpr, FORMAT: tl.constexpr,
    UP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Do items, each of one expert, for all of its routed rows: one a program, or every so manyth where it LOOPS.

    First come those of the experts with many rows: MANY_R KS RS tiles, of ROWS / 16, 8 NB routed rows at once, one of
    SPLIT shares of the channels. Then those of the others: R RS tiles, 16 routed rows at once, PAIR_S steps at a time,
    if there are more than 8. NB 0: no expert has many; PAIR_S 0: none has more than 8.
    entries: that the list of experts has room for.   capacity: of an expert's lists of what goes with its rows.
    shares: sums [SPLIT, size], counters, size: of _place_share.
    """
    BLOCKS: tl.constexpr = ROWS // (16 * R * RS)
    MANY_ITEMS: tl.constexpr = ROWS // (16 * MANY_R * KS * RS) * SPLIT
    number, many = tl.load(active_ptr), tl.load(active_ptr + 1)
    item = tl.program_id(0)
    of_many = many * MANY_ITEMS if NB > 0 else 0
    items = of_many + (number - many) * BLOCKS if NB > 0 else number * BLOCKS
    if LOOPS:
        for i in tl.range(item, items, tl.num_programs(0), num_stages=1):
            place, block = _place(i, many, NB, BLOCKS, MANY_ITEMS)
            expert, first, count = _entry(active_ptr, place, entries)
            _do(
                place, block, expert, first, count, many, out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr,
                gather_ptr, capacity, shares, ROWS, K, COLUMNS, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD,
                MANY_R, SPLIT, FORMAT, UP, WAIT,
            )  # fmt: skip
    else:
        # Asked for before it is known how many experts have many rows: a wait less, if none has, or this item's does.
        expert, first, count = _entry(active_ptr, item // BLOCKS, entries)
        if NB > 0:
            guess = _entry(active_ptr, item // MANY_ITEMS, entries)
        if item < items:
            place, block = _place(item, many, NB, BLOCKS, MANY_ITEMS)
            if NB > 0:
                if item < of_many:
                    expert, first, count = guess[0], guess[1], guess[2]
                elif many > 0:
                    expert, first, count = _entry(active_ptr, place, entries)
            _do(
                place, block, expert, first, count, many, out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr,
                gather_ptr, capacity, shares, ROWS, K, COLUMNS, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD,
                MANY_R, SPLIT, FORMAT, UP, WAIT,
            )  # fmt: skip


@triton.jit
def _place(item, many, NB: tl.constexpr, BLOCKS: tl.constexpr, MANY_ITEMS: tl.constexpr):
    """Return an item's expert's place in the list, and which of the expert's items it is."""
    place, block = item // BLOCKS, item % BLOCKS
    if NB > 0:
        rest = item - many * MANY_ITEMS
        place = tl.where(rest < 0, item // MANY_ITEMS, many + rest // BLOCKS)
        block = tl.where(rest < 0, item % MANY_ITEMS, rest % BLOCKS)
    return place, block


@triton.jit
def _entry(active_ptr, place, entries):
    """Return expert, first row and number of rows at a place of the list, which may be beyond its end."""
    at, exists = active_ptr + 4 + place * 4, place < entries
    return (
        tl.load(at, mask=exists, other=0), tl.load(at + 1, mask=exists, other=0), tl.load(at + 2, mask=exists, other=0)
    )  # fmt: skip


@triton.jit
def _do(
    place, block, expert, first, count, many, out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, gather_ptr,
    capacity, shares,
    ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    KS: tl.constexpr, RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr,
    AHEAD: tl.constexpr, MANY_R: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Do an item of _take's."""
    W: tl.constexpr = KS * RS
    codes = codes_ptr + expert.to(tl.int64) * (ROWS * K // 8)
    scaled = scales_ptr + expert.to(tl.int64) * (ROWS * K // (32 if FORMAT == NVFP4 else 64))
    low = tl.load(factors_ptr + expert * (2 if UP else 1))
    high = tl.load(factors_ptr + expert * 2 + 1) if UP else low
    LIFT: tl.constexpr = _NVFP4_LIFT if FORMAT == NVFP4 else 1.0
    weights = (codes, scaled, (_top(low, FORMAT), _top(high, FORMAT)), low * LIFT, high * LIFT)
    edges = (first, first + count)
    if UP:
        lists = expert.to(tl.int64) * capacity - first
        gather_ptr += lists
        out = (out[0], out[1] + lists, out[2])
    if NB > 0 and place < many:
        _many(
            out, weights, x_many_ptr, gather_ptr, edges, block // SPLIT * (MANY_R * W), shares, block % SPLIT, place,
            K, COLUMNS, PACKED, MANY_S, AHEAD, MANY_R, W, NB, SPLIT, FORMAT, UP, WAIT,
        )  # fmt: skip
    elif PAIR_S > 0 and count > 8:
        _few(
            out, weights, x_ptr, gather_ptr, edges, block * (R * RS),
            K, COLUMNS, PACKED, PAIR_S, R, KS, RS, 2, FORMAT, UP, WAIT,
        )  # fmt: skip
    else:
        _few(
            out, weights, x_ptr, gather_ptr, edges, block * (R * RS),
            K, COLUMNS, PACKED, S, R, KS, RS, 1, FORMAT, UP, WAIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["entries", "capacity", "share_size"])
def up_kernel(
    hidden_ptr, x_ptr, x_many_ptr, codes_ptr, scales_ptr, factors_ptr, token_ptr, weight_ptr, active_ptr, share_ptr,
    counter_ptr, entries, capacity, share_size, limit,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr, AHEAD: tl.constexpr,
    MANY_R: tl.constexpr, SPLIT: tl.constexpr, LOOPS: tl.constexpr, FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden[r] = weight * silu(min(x W1^T, limit)) * clamp(x W3^T, limit) for routed rows r, f16."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _take(
        (hidden_ptr, weight_ptr, limit), codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, token_ptr, active_ptr,
        entries, capacity, (share_ptr, counter_ptr, share_size),
        2 * INNER, H, INNER, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD, MANY_R, SPLIT, LOOPS, FORMAT, True, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["entries"])
def down_kernel(
    part_ptr, hidden_ptr, codes_ptr, scales_ptr, factors_ptr, active_ptr, entries,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr, AHEAD: tl.constexpr,
    MANY_R: tl.constexpr, LOOPS: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part[r] = hidden[r] W2^T for routed rows r, float32.

    The list of items is older than up_kernel, which waited for it before this kernel could be launched: it is read,
    and the first weights are, before up_kernel has ended.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _take(
        (part_ptr,), codes_ptr, scales_ptr, factors_ptr, hidden_ptr, hidden_ptr, None, active_ptr, entries, 0, None,
        H, INNER, H, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD, MANY_R, 1, LOOPS, FORMAT, False, PDL,
    )  # fmt: skip
    # Whoever waits for this kernel relies on all that came before. One program is enough, and those that find nothing
    # to do must not fill the multiprocessors waiting.
    if PDL and tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def sum_kernel(
    out_ptr, part_ptr, ids_ptr, rank_ptr, first_ptr, add_ptr,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = part[row of t's first choice] + part[of its second] + ..., in that order, and then add[t].

    Grid (tokens, blocks).
    """
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < H
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Of routing, which has long ended.
    is_real = tl.load(ids_ptr + token * TOP_K) >= 0
    rows = ()
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + k)
        row = tl.load(first_ptr + expert, mask=is_real, other=0) + tl.load(rank_ptr + token * TOP_K + k)
        rows = rows + (row,)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        at = part_ptr + rows[k].to(tl.int64) * H + channel
        total += tl.load(at, mask=inside & is_real, other=0.0)
    if add_ptr is not None:
        total += tl.load(add_ptr + token.to(tl.int64) * H + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * H + channel, total.to(out_ptr.dtype.element_ty), mask=inside)
