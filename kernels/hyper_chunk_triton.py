"""Both launches of hyper_connection_chunk.py: the streams as a plain stream, then a token's x and its matrix.

A program of the first launch has M tokens and SPAN channels of every stream, C at a time: coefficients stay in
registers, fn is read once for M tokens, and the sums of a span leave the program, not those of every C channels.

Products are exact (see hyper_spread_triton.py), their sums of 4 C terms begin at 0, smallest pieces first, and are then
added up outside the tensor cores, which cut off what they add.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"
# ruff: noqa: RUF005 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.hyper_arithmetic_triton import product, round_to
from kernels.hyper_finish_triton import add_five
from kernels.hyper_matrices_triton import mixing_matrices
from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x):
    """Return x float32 in bfloat16, once: the compiler may not work it out again in another layout."""
    if _PLAIN:
        y = x.to(tl.bfloat16)
    else:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return y


@triton.jit
def _cut(x):
    """Return the upper halves of x float32 as bfloat16, two in an instruction: pieces() cut one by one."""
    if _PLAIN:
        y = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return y


@triton.jit
def _three_pieces(x):
    """Return x float32 as a sum of three bfloat16 values, largest first: those of pieces()."""
    first = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = x - first
    second = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return _cut(x), _cut(rest), _cut(rest - second)


@triton.jit
def spread_chunk_kernel(
    out_ptr, part_ptr, streams_ptr, token_stride, stream_stride, y_ptr, carry_ptr, fn_ptr, sequence_ptr, tokens,
    H: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPREAD: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (channels SPAN a on, tokens M b on) of N streams [T, N, H], bfloat16.

    SPREAD: out = post * y + C^T streams, of a carry that holds C; else the streams themselves.   ROWS: of fn, 0: no
    mix.   part: [T, COLUMNS / 4, H / SPAN, 4], row r of the product at column r, squares in the last eight columns.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    S: tl.constexpr = 2 if N == 2 else 4
    split = tl.program_id(0)
    token = tl.program_id(1) * M + tl.arange(0, M)
    there = token < tokens
    live = there
    if sequence_ptr is not None:
        live = tl.load(sequence_ptr + token, mask=there, other=-1) >= 0
    row = token.to(tl.int64)
    factors = ()  # of stream k: post[k], then C[j, k]. Each a load of its own: lanes share tokens, not streams
    if SPREAD:
        own = carry_ptr + row * (4 * (1 + N))
        for k in tl.static_range(N):
            for j in tl.static_range(1 + N):
                factors = factors + (tl.load(own + (4 * j + k), mask=live, other=0.0),)
    row = row[:, None]
    is_there, is_live = there[:, None], live[:, None]
    r = tl.arange(0, COLUMNS)[:, None, None]
    i = tl.arange(0, S)[None, :, None]
    sums = tl.zeros((M, COLUMNS), tl.float32)
    squares = tl.zeros((M,), tl.float32)
    for begin in tl.range(split * SPAN, min(split * SPAN + SPAN, H), C, num_stages=STAGES):
        channel = begin + tl.arange(0, C)[None, :]
        at = streams_ptr + row * token_stride + channel
        x = ()
        for j in tl.static_range(N):
            x = x + (tl.load(at + j * stream_stride, mask=is_live, other=0.0, eviction_policy="evict_first"),)
        if SPREAD:
            y = tl.load(y_ptr + row * H + channel, mask=is_live, other=0.0, eviction_policy="evict_first")
            y = y.to(tl.float32)
            now = ()
            for k in tl.static_range(N):
                s = tl.broadcast_to(factors[k * (1 + N)][:, None], y.shape) * y
                for j in tl.static_range(N):
                    factor = tl.broadcast_to(factors[k * (1 + N) + 1 + j][:, None], y.shape)
                    s = tl.fma(factor, x[j].to(tl.float32), s)
                one = rounded(s)
                tl.store(out_ptr + row * (N * H) + k * H + channel, one, mask=is_there)
                now = now + (one,)
            x = now
        if ROWS > 0:
            at = fn_ptr + ((r * N + i) * H + (begin + tl.arange(0, C)[None, None, :]))
            weights = tl.load(at, mask=(r < ROWS) & (i < N), other=0.0)
            three = _three_pieces(tl.reshape(weights, (COLUMNS, S * C)))
            own_squares = tl.zeros((M, C), tl.float32)
            for k in tl.static_range(N):
                s = x[k].to(tl.float32)
                own_squares = tl.fma(s, s, own_squares)
            squares += tl.sum(own_squares, 1)
            left = _beside(x, N)
            own_sums = tl.zeros((M, COLUMNS), tl.float32)
            for p in tl.static_range(3):
                own_sums = tl.dot(left, tl.trans(three[2 - p]), own_sums)
            sums += own_sums
    if ROWS > 0:
        column = tl.arange(0, COLUMNS)[None, :]
        sums = tl.where(column >= COLUMNS - 8, squares[:, None], sums)
        SPLITS: tl.constexpr = (H + SPAN - 1) // SPAN
        four = row * (COLUMNS // 4) + column // 4
        tl.store(part_ptr + ((four * SPLITS + split) * 4 + column % 4), sums, mask=is_there)


@triton.jit
def _beside(x, N: tl.constexpr):
    """Return N streams [M, C] beside one another, [M, S C]: S is N, but 4 for 3."""
    M: tl.constexpr = x[0].shape[0]
    C: tl.constexpr = x[0].shape[1]
    if N == 2:
        found = tl.reshape(tl.permute(tl.join(x[0], x[1]), (0, 2, 1)), (M, 2 * C))
    else:
        last = tl.zeros((M, C), x[0].dtype)
        if N == 4:
            last = x[3]
        four = tl.join(tl.join(x[0], x[2]), tl.join(x[1], last))  # [M, C, i, l]: stream 2 i + l
        found = tl.reshape(tl.permute(four, (0, 2, 3, 1)), (M, 4 * C))
    return found


@triton.jit
def _collapse(
    token, x_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr, scale_ptr, norm_ptr, sequence_ptr,
    eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x = norm(sum_j pre[j] streams[j]) of one token."""
    channel = tl.arange(0, triton.next_power_of_2(H))
    inside = channel < H
    row = token.to(tl.int64)
    x = ()
    for j in tl.static_range(N):
        at = streams_ptr + (row * token_stride + j * stream_stride)
        x = x + (tl.load(at + channel, mask=inside, other=0.0),)
    live = True
    if sequence_ptr is not None:
        live = tl.load(sequence_ptr + token) >= 0
    PLACES: tl.constexpr = triton.next_power_of_2(SUMS)
    place = tl.arange(0, PLACES)
    at = part_ptr + row * (COLUMNS * SUMS) + place * 4
    mixed = tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=(place < SUMS)[:, None], other=0.0)
    squares = tl.load(at + (COLUMNS - 8) * SUMS, mask=place < SUMS, other=0.0)
    even, odd = tl.split(tl.reshape(mixed, (PLACES, 2, 2)))
    m0, m2 = tl.split(even)
    m1, m3 = tl.split(odd)
    sums = tl.reduce((m0, m1, m2, m3, squares), 0, add_five)
    rms = tl.rsqrt(sums[4] / (N * H) + norm_eps)
    scale = tl.load(scale_ptr)
    total = tl.zeros((triton.next_power_of_2(H),), tl.float32)
    for j in tl.static_range(N):
        pre = tl.sigmoid(tl.fma(sums[j] * rms, scale, tl.load(base_ptr + j))) + eps
        one = tl.where(live, x[j].to(tl.float32), 0.0)
        total = tl.fma(tl.broadcast_to(pre, total.shape), one, total)
    total = round_to(total, streams_ptr.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(product(total, total)) / H + norm_eps)
    gain = tl.load(norm_ptr + channel, mask=inside, other=0.0)
    tl.store(x_ptr + (row * H + channel), (total * factor * gain).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _carry(
    first, tokens, carry_ptr, part_ptr, base_ptr, scale_ptr, eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, ITERS: tl.constexpr, SUMS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Store post[k] and C of 32 W tokens, each a lane's own."""
    S: tl.constexpr = 2 if N == 2 else 4
    t = tl.arange(0, 4)[:, None, None]
    g = tl.arange(0, 8)[None, :, None]
    token = first + (tl.arange(0, W)[None, None, :] * 32 + t * 8 + g)
    there = token < tokens
    own = part_ptr + token.to(tl.int64) * (COLUMNS * SUMS)
    is_there = there[:, :, :, None, None]
    j = tl.arange(0, S)[None, None, None, :, None]
    k = tl.arange(0, S)[None, None, None, None, :]
    is_post, is_logit = is_there & (k < N), is_there & (j < N) & (k < N)
    post_column, column = N + k, tl.where(k < N, 2 * N + j * N + k, 0)
    post_at = own[:, :, :, None, None] + (post_column // 4 * (4 * SUMS) + post_column % 4)
    at = own[:, :, :, None, None] + (column // 4 * (4 * SUMS) + column % 4)
    squares = tl.zeros((4, 8, W), tl.float32)
    post = tl.zeros((4, 8, W, 1, S), tl.float32)
    logits = tl.zeros((4, 8, W, S, S), tl.float32)
    for place in range(SUMS):
        squares += tl.load(own + ((COLUMNS - 8) * SUMS + place * 4), mask=there, other=0.0)
        post += tl.load(post_at + place * 4, mask=is_post, other=0.0)
        logits += tl.load(at + place * 4, mask=is_logit, other=0.0)
    rms = tl.rsqrt(squares / (N * H) + norm_eps)[:, :, :, None, None]
    post_base = tl.load(base_ptr + post_column, mask=k < N, other=0.0)
    base = tl.load(base_ptr + column, mask=(j < N) & (k < N), other=0.0)
    post = tl.fma(post * rms, tl.load(scale_ptr + 1), tl.broadcast_to(post_base, post.shape))
    logits = tl.fma(logits * rms, tl.load(scale_ptr + 2), tl.broadcast_to(base, logits.shape))
    to = carry_ptr + (token.to(tl.int64) * (4 * (1 + N)))[:, :, :, None, None] + k
    tl.store(to, 2.0 * tl.sigmoid(post), mask=is_post)
    tl.store(to + (1 + j) * 4, mixing_matrices(logits, eps, N, S, ITERS, W), mask=is_logit)


@triton.jit
def finish_chunk_kernel(
    x_ptr, carry_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr, scale_ptr, norm_ptr, sequence_ptr,
    tokens, eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, ITERS: tl.constexpr, SUMS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Programs store the carries of 32 W tokens each, unless this is the head; then each the x of one token.

    Last tokens come first: their streams are the last ones that the first launch wrote, and may still be in L2.
    """
    carries = 0
    if carry_ptr is not None:
        carries = (tokens + (32 * W - 1)) // (32 * W)
    program = tl.program_id(0)
    if program >= carries:
        _collapse(
            tokens - 1 - (program - carries), x_ptr, part_ptr, streams_ptr, token_stride, stream_stride, base_ptr,
            scale_ptr, norm_ptr, sequence_ptr, eps, norm_eps, H, N, SUMS, COLUMNS,
        )  # fmt: skip
    else:
        if carry_ptr is not None:
            _carry(
                program * (32 * W), tokens, carry_ptr, part_ptr, base_ptr, scale_ptr, eps, norm_eps,
                H, N, ITERS, SUMS, COLUMNS, W,
            )  # fmt: skip
