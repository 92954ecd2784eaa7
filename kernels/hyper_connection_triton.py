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
def _inverse(x):
    """Return 1 / x for x of ordinary size, one unit in the last place off at most."""
    if _PLAIN:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _mixing_matrices(logits, eps, N: tl.constexpr, S: tl.constexpr, ITERS: tl.constexpr):
    """Return C [4, 8, W, S, S] of its logits, each lane's own; 0 beyond N: 0 / (0 + eps)."""
    j = tl.arange(0, S)[None, None, None, :, None]
    k = tl.arange(0, S)[None, None, None, None, :]
    inside = (j < N) & (k < N)
    # NaN is no maximum, but it becomes one exponential, and so its row.
    m = tl.exp(logits - tl.max(tl.where(inside, logits, -float("inf")), 4)[:, :, :, :, None])
    m = tl.where(inside, m, 0.0)
    m = tl.where(inside, m / tl.sum(m, 4)[:, :, :, :, None] + eps, 0.0)
    m = m * _inverse(tl.sum(m, 3) + eps)[:, :, :, None, :]
    for _ in range(ITERS - 1):
        m = m * _inverse(tl.sum(m, 4) + eps)[:, :, :, :, None]
        m = m * _inverse(tl.sum(m, 3) + eps)[:, :, :, None, :]
    return m


@triton.jit
def _load_carry(carry_ptr, token, live, N: tl.constexpr, S: tl.constexpr):
    """Return post [4, 8, W, 1, S] and the logits [4, 8, W, S, S] of each lane's token [4, 8, W], past L1: that may hold
    what is no more."""
    live = live[:, :, :, None, None]
    j = tl.arange(0, S)[None, None, None, :, None]
    k = tl.arange(0, S)[None, None, None, None, :]
    row = carry_ptr + (token.to(tl.int64) * (4 * (1 + N)))[:, :, :, None, None] + k
    post = tl.load(row, mask=live & (k < N), other=0.0, cache_modifier=".cg")
    return post, tl.load(row + (1 + j) * 4, mask=live & (j < N) & (k < N), other=0.0, cache_modifier=".cg")


@triton.jit
def _of(x, t: tl.constexpr):
    """Return what the lanes (t, g) of each warp hold of x [4, 8, W, ...]."""
    return tl.sum(tl.where(tl.reshape(tl.arange(0, 4), (4, 1, 1, 1, 1)) == t, x, 0.0), 0)


@triton.jit
def _weights(post, logits, eps, N: tl.constexpr, S: tl.constexpr, ITERS: tl.constexpr):
    """Return post [8, W, 1, S] and the transposed C [8, W, S, S] of the tokens g, then of the tokens g + 8.

    Of a carry of which lane (t, g) has token 8 (t % 2) + g: each works on one token alone.
    """
    c = tl.permute(_mixing_matrices(logits, eps, N, S, ITERS), (0, 1, 2, 4, 3))
    return _of(post, 0), _of(c, 0), _of(post, 1), _of(c, 1)


@triton.jit
def _columns(x, S: tl.constexpr):
    """Return the S columns of x [.., .., .., S]."""
    if S == 2:
        found = tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        found = (a, b, c, d)
    return found


@triton.jit
def _both(first, second):
    """Return [1, 8, W, 2, S, 1] of [8, W, S] of the tokens g, and g + 8."""
    is_first = tl.arange(0, 2)[None, None, None, :, None, None] == 0
    return tl.where(is_first, first[None, :, :, None, :, None], second[None, :, :, None, :, None])


@triton.jit
def _changed(post, logits, post_now, logits_now):
    """Return whether two readings of the carry differ in any bit."""
    first = post.to(tl.int32, bitcast=True) ^ post_now.to(tl.int32, bitcast=True)
    second = logits.to(tl.int32, bitcast=True) ^ logits_now.to(tl.int32, bitcast=True)
    return tl.max(((first | second) != 0).to(tl.int32)) > 0


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
def _right_parts(rights, GROUPS: tl.constexpr, S: tl.constexpr, W: tl.constexpr):
    """Return rows of fn as right operands [W, 16 S, 8]: three pieces of each [4, 8, W, S, 4]."""
    found = ()
    for o in tl.static_range(GROUPS):
        three = _pieces(rights[o], 3)
        for p in tl.static_range(3):
            b = tl.permute(tl.reshape(three[p], (4, 8, W, S, 2, 2)), (2, 3, 4, 0, 5, 1))
            found = found + (tl.reshape(b, (W, 16 * S, 8)),)
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
    S: tl.constexpr = 2 if N == 2 else 4
    split = tl.program_id(1)
    first = tl.program_id(0) * _TOKENS
    # Dimensions in the order in which the compiler hands them out: lanes, warps, then registers, the last one excepted.
    t = tl.arange(0, 4)[:, None, None]
    g = tl.arange(0, 8)[None, :, None]
    channel = (split * W + tl.arange(0, W)[None, None, :]) * 16 + t * 4
    i = tl.arange(0, 4)

    rights = ()
    if ROWS > 0:
        k = tl.arange(0, S)[None, None, None, :, None]
        for o in tl.static_range(GROUPS):
            row = (o * 8 + g)[:, :, :, None, None]
            at = (row * N + k) * H + channel[:, :, :, None, None] + i[None, None, None, None, :]
            rights = rights + (tl.load(fn_ptr + at, mask=(row < ROWS) & (k < N), other=0.0),)
    parts = ()
    for _ in tl.static_range(3 * GROUPS):
        parts = parts + (tl.zeros((W, 16 * S, 8), tl.bfloat16),)
    if SPREAD:
        own = first + t % 2 * 8 + g + tl.arange(0, W)[None, None, :] * 0
        has = own < tokens
        if sequence_ptr is not None:
            has = tl.load(sequence_ptr + own, mask=has, other=-1) >= 0
        post, logits = _load_carry(carry_ptr, own, has, N, S)
        post_0, c_0 = tl.zeros((8, W, 1, S), tl.float32), tl.zeros((8, W, S, S), tl.float32)
        post_1, c_1 = post_0, c_0
    if first < tokens:  # always; but the compiler would work these out where they are used, behind the wait
        if SPREAD:
            post_0, c_0, post_1, c_1 = _weights(post, logits, eps, N, S, ITERS)
        parts = _right_parts(rights, GROUPS, S, W)

    token = first + tl.arange(0, 2)[None, None, None, :, None, None] * 8 + g[:, :, :, None, None, None]
    channel = channel[:, :, :, None, None, None] + i[None, None, None, None, None, :]
    k = tl.arange(0, S)[None, None, None, None, :, None]
    there = token < tokens
    live = there
    if sequence_ptr is not None:
        live = tl.load(sequence_ptr + token, mask=there, other=-1) >= 0
    at = token.to(tl.int64) * token_stride + channel
    to = token.to(tl.int64) * (N * H) + k * H + channel
    y_at = token.to(tl.int64) * H + channel
    if PDL:
        tl.extra.cuda.gdc_wait()

    dtype: tl.constexpr = streams_ptr.dtype.element_ty
    if SPREAD:
        x = ()
        for j in tl.static_range(N):
            x = x + (tl.load(streams_ptr + at + j * stream_stride, mask=live, other=0.0),)
        y = tl.load(y_ptr + y_at, mask=live, other=0.0).to(tl.float32)
        post_now, logits_now = _load_carry(carry_ptr, own, has, N, S)
        if _changed(post, logits, post_now, logits_now):
            post_0, c_0, post_1, c_1 = _weights(post_now, logits_now, eps, N, S, ITERS)
        s = _both(tl.sum(post_0, 2), tl.sum(post_1, 2)) * y
        firsts, seconds = _columns(c_0, S), _columns(c_1, S)
        for j in tl.static_range(N):
            s += _both(firsts[j], seconds[j]) * x[j].to(tl.float32)
        all_x = _round(s, dtype)
        tl.store(out_ptr + to, all_x, mask=there & (k < N))
    else:
        all_x = tl.load(streams_ptr + at + k * stream_stride, mask=live & (k < N), other=0.0)

    if ROWS > 0:
        LEFT: tl.constexpr = 1 if dtype == tl.bfloat16 else 3
        s = all_x.to(tl.float32)
        lefts = _pieces(s, LEFT)
        totals = ()
        for o in tl.static_range(GROUPS):
            for p in tl.static_range(3):
                total = tl.zeros((W, 16, 8), tl.float32)
                for q in tl.static_range(LEFT):
                    if p + q < 3:
                        a = tl.permute(tl.reshape(lefts[q], (4, 8, W, 2, S, 2, 2)), (2, 3, 1, 4, 5, 0, 6))
                        total = tl.dot(tl.reshape(a, (W, 16, 16 * S)), parts[o * 3 + p], total)
                totals = totals + (total,)
        squares = tl.sum(tl.sum(s * s, 5), 4)
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
