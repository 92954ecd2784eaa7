"""The two kernels of hyper_connection_decode.py: spread a sublayer's output and begin the mix; finish it.

`spread_kernel` has one program for 16 tokens and 16 W channels of every stream: it spreads, stores the next streams and
multiplies them with its slice of fn. Nothing is shared but the sum over its warps: a lane loads what the tensor cores
want in its registers. Lane 4 g + t holds tokens g and g + 8 and channels 4 t to 4 t + 3 of its warp's 16, and row g of
eight of fn at the same channels; the order of channels inside a product is free as long as both operands agree.

Products are exact: float32 is the sum of three bf16 values, bf16 streams are one. So a sum is as good as one of float32
products, whatever the tensor cores round is of the order of float32's own last place.

What earlier launches of this step have written may be read after the wait only. The mixing matrices take 40 dependent
normalisations and are needed right after it; their logits were written a whole sublayer ago, but nothing promises that
they have arrived. So they are read before the wait, worked on, and read again after it: if any bit has changed since,
the work is done again.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index"
# ruff: noqa: RUF005, SIM300 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
TOKENS = 16  # of a program of spread_kernel
_TOKENS = tl.constexpr(TOKENS)


@triton.jit
def _quarters(x):
    """Return the four columns of x [.., .., .., 4]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _larger(a, b):
    """Return the larger of a and b; which one is free where one is NaN: its exponential will be NaN either way."""
    return tl.where(a > b, a, b)


@triton.jit
def _exponentials(row, eps, N: tl.constexpr):
    """Return the softmax of a row's first N logits, plus eps; 0 beyond."""
    a, b, c, d = _quarters(row)
    top = _larger(a, b)
    if N > 2:
        top = _larger(top, c)
    if N > 3:
        top = _larger(top, d)
    a, b = tl.exp(a - top), tl.exp(b - top)
    total = a + b
    if N > 2:
        c = tl.exp(c - top)
        total += c
    if N > 3:
        d = tl.exp(d - top)
        total += d
    factor = 1.0 / total
    a, b = a * factor + eps, b * factor + eps
    c = c * factor + eps if N > 2 else tl.zeros_like(a)
    d = d * factor + eps if N > 3 else tl.zeros_like(a)
    return a, b, c, d


@triton.jit
def _turned(m):
    """Return 4 x 4 values the other way round."""
    return m[0], m[4], m[8], m[12], m[1], m[5], m[9], m[13], m[2], m[6], m[10], m[14], m[3], m[7], m[11], m[15]


@triton.jit
def _normalised(m, eps):
    """Return the rows of 4 x 4 values divided by their sums and eps."""
    found = ()
    for r in tl.static_range(4):
        total = (m[4 * r] + m[4 * r + 1]) + (m[4 * r + 2] + m[4 * r + 3]) + eps
        if _PLAIN:
            factor = 1.0 / total
        else:  # one unit in the last place off at most, for sums of ordinary size
            factor = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1
            )
        found = found + (m[4 * r] * factor, m[4 * r + 1] * factor, m[4 * r + 2] * factor, m[4 * r + 3] * factor)
    return found


@triton.jit
def _mixing_matrices(rows, eps, N: tl.constexpr, ITERS: tl.constexpr):
    """Return C[j, k] at 4 j + k, each as long as there are lanes; rows: of the carry, the logits from 1 on."""
    m = _exponentials(rows[1], eps, N) + _exponentials(rows[2], eps, N)
    nothing = tl.zeros_like(m[0])  # a row or column that is not there stays 0: 0 / (0 + eps)
    m += _exponentials(rows[3], eps, N) if N > 2 else (nothing, nothing, nothing, nothing)
    m += _exponentials(rows[4], eps, N) if N > 3 else (nothing, nothing, nothing, nothing)
    m = _turned(_normalised(_turned(m), eps))
    for _ in range(ITERS - 1):
        m = _turned(_normalised(_turned(_normalised(m, eps)), eps))
    return m


@triton.jit
def _carry_rows(carry_ptr, token, live, N: tl.constexpr):
    """Return the 1 + N rows of the carry [4, 8, W, 4] of each lane's token, past L1, which may hold what is no more."""
    column = tl.arange(0, 4)[None, None, None, :]
    at = carry_ptr + token.to(tl.int64) * (4 * (1 + N)) + column
    mask = live
    if N < 4:
        mask = mask & (column < N)
    rows = ()
    for r in tl.static_range(1 + N):
        rows = rows + (tl.load(at + 4 * r, mask=mask, other=0.0, cache_modifier=".cg"),)
    return rows


@triton.jit
def _of(x, t: tl.constexpr):
    """Return [8, W] of x [4, 8, W]: what the lanes (t, g) of each warp hold."""
    return tl.sum(tl.where(tl.arange(0, 4)[:, None, None] == t, x, 0.0), 0)


@triton.jit
def _weights(rows, eps, N: tl.constexpr, ITERS: tl.constexpr):
    """Return what streams are spread with, each [8, W]: post[k] at 2 k, C[j, k] at 8 + 2 (4 j + k), for token g, and
    next to each that for token g + 8. rows: of the carry; lane (t, g) takes token 8 (t % 2) + g and works on no other.
    """
    matrices = _mixing_matrices(rows, eps, N, ITERS)
    post = _quarters(rows[0])
    found = ()
    for k in tl.static_range(4):
        found = found + (_of(post[k], 0), _of(post[k], 1))
    for at in tl.static_range(16):
        found = found + (_of(matrices[at], 0), _of(matrices[at], 1))
    return found


@triton.jit
def _both(weights, at: tl.constexpr):
    """Return a weight of _weights [1, 8, W, 2, 1]."""
    is_first = tl.arange(0, 2)[None, None, None, :, None] == 0
    return tl.where(is_first, weights[2 * at][None, :, :, None, None], weights[2 * at + 1][None, :, :, None, None])


@triton.jit
def _changed(rows, again, N: tl.constexpr):
    """Return whether two readings of the carry differ in any bit."""
    differs = rows[0].to(tl.int32, bitcast=True) ^ again[0].to(tl.int32, bitcast=True)
    for r in tl.static_range(1, 1 + N):
        differs = differs | (rows[r].to(tl.int32, bitcast=True) ^ again[r].to(tl.int32, bitcast=True))
    return tl.max((differs != 0).to(tl.int32)) > 0


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """Return x float32 in DTYPE. Two values at once, which the compiler does not find where they go separate ways."""
    if DTYPE == tl.float32:
        y = x
    elif _PLAIN:
        y = x.to(DTYPE)
    else:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return y


@triton.jit
def _pieces(x, COUNT: tl.constexpr):
    """Return x float32 as a sum of COUNT bf16 values, cut off: exact if COUNT is 3, or 1 and x a bf16 value."""
    found = ()
    for _ in tl.static_range(COUNT):
        bits = x.to(tl.int32, bitcast=True)
        x = x - (bits & -65536).to(tl.float32, bitcast=True)
        found = found + ((bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),)
    return found


@triton.jit
def _right_parts(rights, COUNT: tl.constexpr, W: tl.constexpr):
    """Return rows of fn as right operands [W, 16, 8]: three pieces of each [4, 8, W, 4]."""
    found = ()
    for at in tl.static_range(COUNT):
        three = _pieces(rights[at], 3)
        for p in tl.static_range(3):
            b = tl.permute(tl.reshape(three[p], (4, 8, W, 2, 2)), (2, 3, 0, 4, 1))
            found = found + (tl.reshape(b, (W, 16, 8)),)
    return found


@triton.jit
def spread_kernel(
    out_ptr, part_ptr, streams_ptr, token_stride, stream_stride, y_ptr, carry_ptr, fn_ptr, sequence_ptr, tokens, eps,
    H: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, ITERS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr,
    SPREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tokens 16 a on, channels 16 W b on) of N streams [T, N, H].

    SPREAD: out = post * y + C^T streams, else the streams themselves.   ROWS: of fn, 0: no mix.
    part: [T, COLUMNS / 4, H / 16 W, 4], row r of the product at column r, the sum of squares in the last eight columns.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = (ROWS + 7) // 8
    split = tl.program_id(1)
    first = tl.program_id(0) * _TOKENS
    # Dimensions in the order in which the compiler hands them out: lanes, warps, then registers, the last one excepted.
    t = tl.arange(0, 4)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None]
    w = tl.arange(0, W)[None, None, :, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None]
    i = tl.arange(0, 4)[None, None, None, None, :]
    channel = (split * W + w) * 16 + t * 4 + i
    token = first + half * 8 + g
    there = token < tokens
    live = there
    if sequence_ptr is not None:
        live = tl.load(sequence_ptr + token, mask=there, other=-1) >= 0

    rights = ()
    if ROWS > 0:
        t4 = tl.arange(0, 4)[:, None, None, None]
        w4 = tl.arange(0, W)[None, None, :, None]
        i4 = tl.arange(0, 4)[None, None, None, :]
        g4 = tl.arange(0, 8)[None, :, None, None]
        at = (split * W + w4) * 16 + t4 * 4 + i4
        for k in tl.static_range(N):
            for o in tl.static_range(GROUPS):
                row = o * 8 + g4
                f = fn_ptr + (row * N + k) * H + at
                rights = rights + (tl.load(f, mask=row < ROWS, other=0.0),)
    weights, parts = (), ()
    if SPREAD:
        own = first + (tl.arange(0, 4)[:, None, None, None] % 2) * 8 + tl.arange(0, 8)[None, :, None, None]
        own += tl.arange(0, W)[None, None, :, None] * 0
        has = own < tokens
        if sequence_ptr is not None:
            has = tl.load(sequence_ptr + own, mask=has, other=-1) >= 0
        rows = _carry_rows(carry_ptr, own, has, N)
        for _ in tl.static_range(40):
            weights = weights + (tl.zeros((8, W), tl.float32),)
    for _ in tl.static_range(3 * N * GROUPS):
        parts = parts + (tl.zeros((W, 16, 8), tl.bfloat16),)
    if first < tokens:  # always; but the compiler would work these out where they are used, behind the wait
        if SPREAD:
            weights = _weights(rows, eps, N, ITERS)
        parts = _right_parts(rights, N * GROUPS, W)
    if PDL:
        tl.extra.cuda.gdc_wait()

    place = token.to(tl.int64) * token_stride + channel
    x = ()
    for j in tl.static_range(N):
        x = x + (tl.load(streams_ptr + (place + j * stream_stride), mask=live, other=0.0),)
    dtype: tl.constexpr = streams_ptr.dtype.element_ty
    if SPREAD:
        y = tl.load(y_ptr + (token.to(tl.int64) * H + channel), mask=live, other=0.0).to(tl.float32)
        again = _carry_rows(carry_ptr, own, has, N)
        if _changed(rows, again, N):
            weights = _weights(again, eps, N, ITERS)
        spread = ()
        for k in tl.static_range(N):
            s = _both(weights, k) * y
            for j in tl.static_range(N):
                s += _both(weights, 4 + 4 * j + k) * x[j].to(tl.float32)
            spread = spread + (_round(s, dtype),)
            to = out_ptr + (token.to(tl.int64) * (N * H) + k * H + channel)
            tl.store(to, spread[k], mask=there)
        x = spread

    if ROWS > 0:
        LEFT: tl.constexpr = 1 if dtype == tl.bfloat16 else 3
        squares = tl.zeros((4, 8, W, 2), tl.float32)
        totals = ()
        for _ in tl.static_range(3 * GROUPS):
            totals = totals + (tl.zeros((W, 16, 8), tl.float32),)
        for k in tl.static_range(N):
            s = x[k].to(tl.float32)
            squares += tl.sum(s * s, 4)
            lefts = _pieces(s, LEFT)
            now = ()
            for o in tl.static_range(GROUPS):
                for p in tl.static_range(3):
                    total = totals[o * 3 + p]
                    for q in tl.static_range(LEFT):
                        if p + q < 3:
                            a = tl.permute(tl.reshape(lefts[q], (4, 8, W, 2, 2, 2)), (2, 3, 1, 4, 0, 5))
                            total = tl.dot(tl.reshape(a, (W, 16, 16)), parts[(k * GROUPS + o) * 3 + p], total)
                    now = now + (total,)
            totals = now
        _store_parts(part_ptr, totals, squares, first, tokens, split, H // (16 * W), GROUPS, COLUMNS, W)


@triton.jit
def _store_parts(
    part_ptr, totals, squares, first, tokens, split,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Sum over the warps and store [16, COLUMNS]: the products by groups of eight, then the squares eight times."""
    squares = tl.reshape(tl.permute(tl.sum(squares, 0), (1, 2, 0)), (W, 16))
    squares = tl.broadcast_to(squares[:, :, None], (W, 16, 8))
    a = totals[0] + (totals[1] + totals[2])
    if GROUPS == 1:
        both = tl.reshape(tl.join(a, squares), (W, 16, 8, 1, 2))
    else:
        b = totals[3] + (totals[4] + totals[5])
        c = squares
        if GROUPS > 2:
            c = totals[6] + (totals[7] + totals[8])
        both = tl.permute(tl.join(tl.join(a, b), tl.join(c, squares)), (0, 1, 2, 4, 3))
    total = tl.sum(both, 0)
    token = first + tl.arange(0, _TOKENS)[:, None, None, None]
    m = tl.arange(0, 8)[None, :, None, None]
    high = tl.arange(0, COLUMNS // 16)[None, None, :, None]
    low = tl.arange(0, 2)[None, None, None, :]
    four = token.to(tl.int64) * (COLUMNS // 4) + (high * 2 + low) * 2 + m // 4
    tl.store(part_ptr + ((four * SPLITS + split) * 4 + m % 4), total, mask=token < tokens)


@triton.jit
def _add_five(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _collapse(
    token, live, x_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr, scale_ptr, norm_ptr,
    eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x = norm(sum_j pre[j] streams[j]) of one token. BLOCK: splits at once."""
    channel = tl.arange(0, triton.next_power_of_2(H))
    inside = channel < H
    gain = tl.load(norm_ptr + channel, mask=inside, other=0.0)
    scale = tl.load(scale_ptr)
    base = ()
    for j in tl.static_range(N):
        base = base + (tl.load(base_ptr + j),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    mixed = tl.zeros((BLOCK, 4), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    first = part_ptr + token.to(tl.int64) * (COLUMNS * SPLITS)
    for start in tl.static_range(0, SPLITS, BLOCK):
        split = start + tl.arange(0, BLOCK)
        four = first + split[:, None] * 4 + tl.arange(0, 4)[None, :]
        mixed += tl.load(four, mask=split[:, None] < SPLITS, other=0.0)
        squares += tl.load(first + ((COLUMNS - 4) * SPLITS + split * 4), mask=split < SPLITS, other=0.0)
    x = ()
    for j in tl.static_range(N):
        at = streams_ptr + (token.to(tl.int64) * token_stride + j * stream_stride)
        x = x + (tl.load(at + channel, mask=inside & live, other=0.0),)
    even, odd = tl.split(tl.reshape(mixed, (BLOCK, 2, 2)))
    m0, m2 = tl.split(even)
    m1, m3 = tl.split(odd)
    sums = tl.reduce((m0, m1, m2, m3, squares), 0, _add_five)
    rms = tl.rsqrt(sums[4] / (N * H) + norm_eps)
    total = tl.zeros_like(gain)
    for j in tl.static_range(N):
        total += (tl.sigmoid(sums[j] * rms * scale + base[j]) + eps) * x[j].to(tl.float32)
    total = _round(total, streams_ptr.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(total * total) / H + norm_eps)
    out = (total * factor * gain).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + (token.to(tl.int64) * H + channel), out, mask=inside)


@triton.jit
def _carry(
    token, carry_ptr, part_ptr, base_ptr, scale_ptr, norm_eps,
    H: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store what the next spread needs of one token: post[k], and the logits of C."""
    ROWS: tl.constexpr = (2 + N) * N
    column = tl.arange(0, COLUMNS)
    is_post = column < 2 * N
    wanted = (column >= N) & (column < ROWS)
    base = tl.load(base_ptr + column, mask=wanted, other=0.0)
    scale = tl.load(scale_ptr + tl.where(is_post, 1, 2))
    if PDL:
        tl.extra.cuda.gdc_wait()
    split = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None]
    at = token.to(tl.int64) * (COLUMNS * SPLITS) + ((column // 4) * (4 * SPLITS) + column % 4)[None, :]
    total = tl.sum(tl.load(part_ptr + (at + split * 4), mask=split < SPLITS, other=0.0), 0)
    squares = tl.sum(tl.where(column == COLUMNS - 8, total, 0.0), 0)
    value = total * tl.rsqrt(squares / (N * H) + norm_eps) * scale + base
    value = tl.where(is_post, 2.0 * tl.sigmoid(value), value)
    at = column - 2 * N
    place = tl.where(is_post, column - N, 4 + at // N * 4 + at % N)
    tl.store(carry_ptr + (token.to(tl.int64) * (4 * (1 + N)) + place), value, mask=wanted)


@triton.jit
def finish_kernel(
    x_ptr, carry_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr, scale_ptr, norm_ptr, sequence_ptr,
    eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (0, token): the input of the sublayer. (1, token): the carry, unless this is the head, which has none."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    if tl.program_id(0) == 0:
        live = True
        if sequence_ptr is not None:
            live = tl.load(sequence_ptr + token) >= 0
        _collapse(
            token, live, x_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr, scale_ptr, norm_ptr,
            eps, norm_eps, H, N, SPLITS, COLUMNS, BLOCK, PDL,
        )  # fmt: skip
    else:
        if carry_ptr is not None:
            _carry(token, carry_ptr, part_ptr, base_ptr, scale_ptr, norm_eps, H, N, SPLITS, COLUMNS, PDL)
