"""The second launch of hyper_connection_decode.py: finish the mix, norm, carry."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"
# ruff: noqa: RUF005 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.hyper_arithmetic_triton import product, round_to


@triton.jit
def add_five(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
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
    sums = tl.reduce((m0, m1, m2, m3, squares), 0, add_five)
    rms = tl.rsqrt(sums[4] / (N * H) + norm_eps)
    total = tl.zeros_like(gain)
    for j in tl.static_range(N):
        pre = tl.sigmoid(tl.fma(sums[j] * rms, scale, base[j])) + eps
        total = tl.fma(tl.broadcast_to(pre, total.shape), x[j].to(tl.float32), total)
    total = round_to(total, streams_ptr.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(product(total, total)) / H + norm_eps)
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
