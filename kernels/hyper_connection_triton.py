"""The two kernels of hyper_connection_decode.py: spread a sublayer's output and begin the mix; finish it.

`spread_kernel` has one warp for 16 tokens and 16 L channels of every stream: it spreads, stores the next streams and
multiplies them with its slice of fn. Warps of a program have other tokens and the same fn; they share nothing else. A
lane loads what the tensor cores want in its registers: lane 4 g + t holds tokens g and g + 8 and channels 4 t to
4 t + 3 of each 16, and row g of eight of fn at the same channels; the order of channels inside a product is free as
long as both operands agree.

Products are exact: float32 is the sum of three bf16 values, bf16 streams are one. So a sum is as good as one of float32
products, whatever the tensor cores round is of the order of float32's own last place.

What earlier launches of this step have written may be read after the wait only. The mixing matrices take 40 dependent
normalisations and are needed right after it; their logits were written a whole sublayer ago, but nothing promises that
they have arrived. So they are read before the wait, worked on, and read again after it: if any bit has changed since,
the work is done again.

A token's bits depend neither on W and L nor on what else is compiled with the kernel: spans are added in one order, and
no product may be rounded or not before it is added to something.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"
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
def _exponential(x):
    """Return e^x for x not above 0, as tl.exp does but for what that adds where a result is subnormal."""
    if _PLAIN:
        y = tl.exp(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _product(x, y):
    """Return x * y, rounded before anything is added to it, whatever else a compilation holds."""
    if _PLAIN:
        z = x * y
    else:
        z = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return z


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
def _normalised(lines, factors, before, eps, W: tl.constexpr, S: tl.constexpr):
    """Return r [4, 8, W, S] = eps before + sum_i lines[i] factors[.., i], a line [32, W, S].

    If `before` is one over the factors of the rows, so is r of those that normalise them, given the columns' factors.
    """
    total = before * eps
    one = _columns(factors, S)
    for i in tl.static_range(S):
        factor = tl.broadcast_to(one[i][:, :, :, None], total.shape)
        total = tl.fma(tl.reshape(lines[i], (4, 8, W, S)), factor, total)
    return total


@triton.jit
def _mixing_matrices(logits, eps, N: tl.constexpr, S: tl.constexpr, ITERS: tl.constexpr, W: tl.constexpr):
    """Return C [4, 8, W, S, S] of its logits, each lane's own; 0 beyond N.

    With m[j, k] = rows[j] start[j, k] columns[k], a normalisation of rows makes rows[j] / (rows[j] s[j] + eps) of
    rows[j], s[j] = sum_k start[j, k] columns[k]. That is 1 / (s[j] + eps / rows[j]), so what is kept is one over each
    factor: a chain of S sums and a reciprocal, a third fewer instructions than dividing the matrix.
    """
    j = tl.arange(0, S)[None, None, None, :, None]
    k = tl.arange(0, S)[None, None, None, None, :]
    inside = (j < N) & (k < N)
    # NaN is no maximum, but it becomes one exponential, and so its row.
    start = _exponential(logits - tl.max(tl.where(inside, logits, -float("inf")), 4)[:, :, :, :, None])
    start = tl.where(inside, start, 0.0)
    share = tl.broadcast_to(_inverse(tl.sum(start, 4))[:, :, :, :, None], start.shape)
    start = tl.where(inside, tl.fma(start, share, tl.zeros_like(start) + eps), 0.0)
    by_column = _columns(tl.reshape(start, (32, W, S, S)), S)
    by_row = _columns(tl.reshape(tl.permute(start, (0, 1, 2, 4, 3)), (32, W, S, S)), S)
    rows = tl.full((4, 8, W, S), 1.0, tl.float32)
    # Beyond N sums are 0, and eps would drive the factors out of bounds.
    small = tl.where(tl.arange(0, S)[None, None, None, :] < N, eps, 1.0)
    columns = _normalised(by_row, rows, rows, small, W, S)
    for _ in range(ITERS - 1):
        rows = _normalised(by_column, _inverse(columns), rows, small, W, S)
        columns = _normalised(by_row, _inverse(rows), columns, small, W, S)
    return start * _inverse(rows)[:, :, :, :, None] * _inverse(columns)[:, :, :, None, :]


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
def _exchange(x, W: tl.constexpr):
    """Return x [4, 8, W, ., .] of the tokens g, and of the tokens g + 8, of what lane (t, g) holds of 8 (t % 2) + g."""
    A: tl.constexpr = x.shape[3]
    B: tl.constexpr = x.shape[4]
    own = tl.reshape(x.to(tl.int32, bitcast=True), (2, 2, 8, W, A, B))
    other = own ^ tl.xor_sum(own, 1, keep_dims=True)
    is_first = tl.arange(0, 2)[None, :, None, None, None, None] == 0
    first = tl.reshape(tl.where(is_first, own, other), (4, 8, W, A, B))
    second = tl.reshape(tl.where(is_first, other, own), (4, 8, W, A, B))
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def _weights(post, logits, eps, N: tl.constexpr, S: tl.constexpr, ITERS: tl.constexpr, W: tl.constexpr):
    """Return post [4, 8, W, 1, S] and the transposed C [4, 8, W, S, S] of the tokens g, then of the tokens g + 8.

    Of a carry of which lane (t, g) has token 8 (t % 2) + g: each works on one token alone.
    """
    c = tl.permute(_mixing_matrices(logits, eps, N, S, ITERS, W), (0, 1, 2, 4, 3))
    post_0, post_1 = _exchange(post, W)
    c_0, c_1 = _exchange(c, W)
    return post_0, c_0, post_1, c_1


@triton.jit
def _both(first, second):
    """Return [4, 8, W, 2, S, 1] of [4, 8, W, S] of the tokens g, and g + 8."""
    is_first = tl.arange(0, 2)[None, None, None, :, None, None] == 0
    return tl.where(is_first, first[:, :, :, None, :, None], second[:, :, :, None, :, None])


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
def _load_rights(fn_ptr, channel, H: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr):
    """Return fn in eights of rows, each [4, 8, W, S, 4]: four channels from `channel` [4, 1, W] on of each stream."""
    g = tl.arange(0, 8)[None, :, None, None, None]
    k = tl.arange(0, S)[None, None, None, :, None]
    found = ()
    for o in tl.static_range((ROWS + 7) // 8):
        row = o * 8 + g
        at = (row * N + k) * H + (channel[:, :, :, None, None] + tl.arange(0, 4)[None, None, None, None, :])
        found = found + (tl.load(fn_ptr + at, mask=(row < ROWS) & (k < N), other=0.0),)
    return found


@triton.jit
def _prefetch_rights(fn_ptr, channel, H: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr):
    """Have what _load_rights will load brought to L2."""
    if not _PLAIN:
        g = tl.arange(0, 8)[None, :, None, None]
        k = tl.arange(0, S)[None, None, None, :]
        for o in tl.static_range((ROWS + 7) // 8):
            row = o * 8 + g
            at = tl.where((row < ROWS) & (k < N), row * N + k, 0) * H + channel[:, :, :, None]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [fn_ptr + at], dtype=tl.int32, is_pure=False, pack=1
            )


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
    L: tl.constexpr, SPREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tokens 16 W a on, channels 16 L b on) of N streams [T, N, H].

    SPREAD: out = post * y + C^T streams, else the streams themselves.   ROWS: of fn, 0: no mix.
    part: [T, COLUMNS / 4, H / 16 L, 4], row r of the product at column r, the sum of squares in the last eight columns.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = (ROWS + 7) // 8
    S: tl.constexpr = 2 if N == 2 else 4
    split = tl.program_id(1)
    first = tl.program_id(0) * (_TOKENS * W)
    # Dimensions in the order in which the compiler hands them out: lanes, warps, then registers, the last one excepted.
    t = tl.arange(0, 4)[:, None, None]
    g = tl.arange(0, 8)[None, :, None]
    w = tl.arange(0, W)[None, None, :]
    channel = split * (16 * L) + t * 4 + w * 0
    i = tl.arange(0, 4)

    rights = ()
    if ROWS > 0:
        rights = _load_rights(fn_ptr, channel, H, N, ROWS, S)
        for span in tl.static_range(1, L):  # registers hold no more than one span
            _prefetch_rights(fn_ptr, channel + span * 16, H, N, ROWS, S)
    parts = ()
    for _ in tl.static_range(3 * GROUPS):
        parts = parts + (tl.zeros((W, 16 * S, 8), tl.bfloat16),)
    if SPREAD:
        own = first + w * 16 + t % 2 * 8 + g
        has = own < tokens
        if sequence_ptr is not None:
            has = tl.load(sequence_ptr + own, mask=has, other=-1) >= 0
        post, logits = _load_carry(carry_ptr, own, has, N, S)
        post_0, c_0 = tl.zeros((4, 8, W, 1, S), tl.float32), tl.zeros((4, 8, W, S, S), tl.float32)
        post_1, c_1 = post_0, c_0
    if first < tokens:  # always; but the compiler would work these out where they are used, behind the wait
        if SPREAD:
            post_0, c_0, post_1, c_1 = _weights(post, logits, eps, N, S, ITERS, W)
        parts = _right_parts(rights, GROUPS, S, W)

    token = first + w[:, :, :, None, None, None] * 16 + tl.arange(0, 2)[None, None, None, :, None, None] * 8
    token += g[:, :, :, None, None, None]
    own_channel = channel
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
    x, y = (), ()
    for span in tl.static_range(L):
        if SPREAD:
            for j in tl.static_range(N):
                x = x + (tl.load(streams_ptr + at + (j * stream_stride + span * 16), mask=live, other=0.0),)
            y = y + (tl.load(y_ptr + y_at + span * 16, mask=live, other=0.0),)
        else:
            x = x + (tl.load(streams_ptr + at + (k * stream_stride + span * 16), mask=live & (k < N), other=0.0),)
    if SPREAD:
        post_now, logits_now = _load_carry(carry_ptr, own, has, N, S)
        if _changed(post, logits, post_now, logits_now):
            post_0, c_0, post_1, c_1 = _weights(post_now, logits_now, eps, N, S, ITERS, W)
        post = _both(tl.sum(post_0, 3), tl.sum(post_1, 3))
        firsts, seconds = _columns(_flat(c_0, W, S), S), _columns(_flat(c_1, W, S), S)
    LEFT: tl.constexpr = 1 if dtype == tl.bfloat16 else 3
    totals = ()
    squares = tl.zeros((8, W, 2), tl.float32)
    for span in tl.static_range(L):
        if ROWS > 0 and span > 0:
            rights = _load_rights(fn_ptr, own_channel + span * 16, H, N, ROWS, S)
        if SPREAD:
            # No sum of a product that may be rounded or not: bits would depend on what else is compiled with it.
            s = post * y[span].to(tl.float32)
            for j in tl.static_range(N):
                c = _both(tl.reshape(firsts[j], (4, 8, W, S)), tl.reshape(seconds[j], (4, 8, W, S)))
                s = tl.fma(tl.broadcast_to(c, s.shape), tl.broadcast_to(x[span * N + j].to(tl.float32), s.shape), s)
            all_x = _round(s, dtype)
            tl.store(out_ptr + to + span * 16, all_x, mask=there & (k < N))
        else:
            all_x = x[span]
        if ROWS > 0:
            s = all_x.to(tl.float32)
            lefts = _pieces(s, LEFT)
            sums = ()
            if span > 0:
                parts = _right_parts(rights, GROUPS, S, W)
            for o in tl.static_range(GROUPS):
                three = ()
                for p in tl.static_range(3):
                    total = tl.zeros((W, 16, 8), tl.float32)
                    for q in tl.static_range(LEFT):
                        if p + q < 3:
                            a = tl.permute(tl.reshape(lefts[q], (4, 8, W, 2, S, 2, 2)), (2, 3, 1, 4, 5, 0, 6))
                            total = tl.dot(tl.reshape(a, (W, 16, 16 * S)), parts[o * 3 + p], total)
                    three = three + (total,)
                sums = sums + (three[0] + (three[1] + three[2]),)
            # Spans are added one by one, so that a sum of L is the one that the second launch makes of L sums.
            own_squares = tl.sum(tl.sum(tl.sum(_product(s, s), 5), 4), 0)
            if span == 0:
                totals, squares = sums, own_squares
            else:
                more = ()
                for o in tl.static_range(GROUPS):
                    more = more + (totals[o] + sums[o],)
                totals, squares = more, squares + own_squares
    if ROWS > 0:
        _store_parts(part_ptr, totals, squares, first, tokens, split, H // (16 * L), GROUPS, COLUMNS, W)


@triton.jit
def _flat(x, W: tl.constexpr, S: tl.constexpr):
    return tl.reshape(x, (32, W, S, S))


@triton.jit
def _store_parts(
    part_ptr, totals, squares, first, tokens, split,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Store [16 W, COLUMNS]: the products by groups of eight, then the squares eight times."""
    squares = tl.reshape(tl.permute(squares, (1, 2, 0)), (W, 16))
    squares = tl.broadcast_to(squares[:, :, None], (W, 16, 8))
    if GROUPS == 1:
        both = tl.reshape(tl.join(totals[0], squares), (W, 16, 8, 1, 2))
    else:
        c = squares
        if GROUPS > 2:
            c = totals[2]
        both = tl.permute(tl.join(tl.join(totals[0], totals[1]), tl.join(c, squares)), (0, 1, 2, 4, 3))
    token = tl.arange(0, W)[:, None, None, None, None] * _TOKENS + tl.arange(0, _TOKENS)[None, :, None, None, None]
    token += first
    m = tl.arange(0, 8)[None, None, :, None, None]
    high = tl.arange(0, COLUMNS // 16)[None, None, None, :, None]
    low = tl.arange(0, 2)[None, None, None, None, :]
    four = token.to(tl.int64) * (COLUMNS // 4) + (high * 2 + low) * 2 + m // 4
    tl.store(part_ptr + ((four * SPLITS + split) * 4 + m % 4), both, mask=token < tokens)


@triton.jit
def _add_five(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _collapse(
    token, live, x_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr, scale_ptr, norm_ptr,
    eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr, ADDED: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x = norm(sum_j pre[j] streams[j]) of one token. BLOCK: sums at once, each of ADDED parts."""
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
    first = part_ptr + token.to(tl.int64) * (COLUMNS * SUMS * ADDED)
    last = first + (COLUMNS - 4) * SUMS * ADDED
    for start in tl.static_range(0, SUMS, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < SUMS
        at = place * (4 * ADDED)
        own = tl.load(first + at[:, None] + tl.arange(0, 4)[None, :], mask=there[:, None], other=0.0)
        own_squares = tl.load(last + at, mask=there, other=0.0)
        for part in tl.static_range(1, ADDED):
            own += tl.load(first + at[:, None] + (part * 4 + tl.arange(0, 4)[None, :]), mask=there[:, None], other=0.0)
            own_squares += tl.load(last + at + part * 4, mask=there, other=0.0)
        mixed += own
        squares += own_squares
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
        pre = tl.sigmoid(tl.fma(sums[j] * rms, scale, base[j])) + eps
        total = tl.fma(tl.broadcast_to(pre, total.shape), x[j].to(tl.float32), total)
    total = _round(total, streams_ptr.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(_product(total, total)) / H + norm_eps)
    out = (total * factor * gain).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + (token.to(tl.int64) * H + channel), out, mask=inside)


@triton.jit
def _carry(
    token, carry_ptr, part_ptr, base_ptr, scale_ptr, norm_eps,
    H: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr, ADDED: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
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
    place = tl.arange(0, triton.next_power_of_2(SUMS))[:, None]
    at = token.to(tl.int64) * (COLUMNS * SUMS * ADDED) + ((column // 4) * (4 * SUMS * ADDED) + column % 4)[None, :]
    at += place * (4 * ADDED)
    own = tl.load(part_ptr + at, mask=place < SUMS, other=0.0)
    for part in tl.static_range(1, ADDED):
        own += tl.load(part_ptr + (at + part * 4), mask=place < SUMS, other=0.0)
    total = tl.sum(own, 0)
    squares = tl.sum(tl.where(column == COLUMNS - 8, total, 0.0), 0)
    value = tl.fma(total * tl.rsqrt(squares / (N * H) + norm_eps), scale, base)
    value = tl.where(is_post, 2.0 * tl.sigmoid(value), value)
    at = column - 2 * N
    place = tl.where(is_post, column - N, 4 + at // N * 4 + at % N)
    tl.store(carry_ptr + (token.to(tl.int64) * (4 * (1 + N)) + place), value, mask=wanted)


@triton.jit
def finish_kernel(
    x_ptr, carry_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr, scale_ptr, norm_ptr, sequence_ptr,
    eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr, ADDED: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
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
            eps, norm_eps, H, N, SUMS, ADDED, COLUMNS, BLOCK, PDL,
        )  # fmt: skip
    else:
        if carry_ptr is not None:
            _carry(token, carry_ptr, part_ptr, base_ptr, scale_ptr, norm_eps, H, N, SUMS, ADDED, COLUMNS, PDL)
