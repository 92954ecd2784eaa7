"""The first launch of hyper_connection_decode.py: spread a sublayer's output, begin the mix.

A warp has 16 tokens and 16 L channels of every stream: it spreads, stores the next streams and multiplies them with
its slice of fn. Warps of a program have other tokens and the same fn; they share nothing else. A lane loads what the
tensor cores want in its registers: lane 4 g + t holds tokens g and g + 8 and channels 4 t to 4 t + 3 of each 16, and
row g of eight of fn at the same channels; the order of channels inside a product is free as long as both operands
agree.

Products are exact: float32 is the sum of three bf16 values, bf16 streams are one. So a sum is as good as one of float32
products, whatever the tensor cores round is of the order of float32's own last place. Bits do not depend on W and L:
spans are added in one order.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"
# ruff: noqa: RUF005 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.expert_parts_triton import rows_of, sum_of
from kernels.hyper_arithmetic_triton import pieces, product, round_to
from kernels.hyper_matrices_triton import both, changed, columns_of, load_carry, spread_weights
from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
TOKENS = 16  # of a warp of spread_kernel
_TOKENS = tl.constexpr(TOKENS)


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
        three = pieces(rights[o], 3)
        for p in tl.static_range(3):
            b = tl.permute(tl.reshape(three[p], (4, 8, W, S, 2, 2)), (2, 3, 4, 0, 5, 1))
            found = found + (tl.reshape(b, (W, 16 * S, 8)),)
    return found


@triton.jit
def spread_kernel(
    out_ptr, part_ptr, streams_ptr, token_stride, stream_stride, y_ptr, ids_ptr, rank_ptr, first_ptr, add_ptr,
    carry_ptr, fn_ptr, sequence_ptr, tokens, eps,
    H: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, ITERS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr,
    L: tl.constexpr, SPREAD: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tokens 16 W a on, channels 16 L b on) of N streams [T, N, H].

    SPREAD: out = post * y + C^T streams, else the streams themselves.   ROWS: of fn, 0: no mix.   TOP_K: y holds rows
    of experts, as many of each token, to be added up (expert_parts.py); 0: y [T, H].
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

    token = first + w[:, :, :, None, None, None] * 16 + tl.arange(0, 2)[None, None, None, :, None, None] * 8
    token += g[:, :, :, None, None, None]
    there = token < tokens
    live = there
    if sequence_ptr is not None:
        live = tl.load(sequence_ptr + token, mask=there, other=-1) >= 0
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
        post, logits = load_carry(carry_ptr, own, has, N, S)
        post_0, c_0 = tl.zeros((4, 8, W, 1, S), tl.float32), tl.zeros((4, 8, W, S, S), tl.float32)
        post_1, c_1 = post_0, c_0
    if TOP_K > 0:
        has_rows, rows = rows_of(ids_ptr, rank_ptr, first_ptr, token, live, TOP_K)
    if first < tokens:  # always; but the compiler would work these out where they are used, behind the wait
        if SPREAD:
            post_0, c_0, post_1, c_1 = spread_weights(post, logits, eps, N, S, ITERS, W)
        parts = _right_parts(rights, GROUPS, S, W)

    own_channel = channel
    channel = channel[:, :, :, None, None, None] + i[None, None, None, None, None, :]
    k = tl.arange(0, S)[None, None, None, None, :, None]
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
            if TOP_K == 0:
                y = y + (tl.load(y_ptr + y_at + span * 16, mask=live, other=0.0),)
            elif span == 0:  # registers hold no more rows of experts
                y = y + (sum_of(y_ptr, add_ptr, rows, has_rows, token, live, channel, H, TOP_K),)
        else:
            x = x + (tl.load(streams_ptr + at + (k * stream_stride + span * 16), mask=live & (k < N), other=0.0),)
    if SPREAD:
        post_now, logits_now = load_carry(carry_ptr, own, has, N, S)
        if changed(post, logits, post_now, logits_now):
            post_0, c_0, post_1, c_1 = spread_weights(post_now, logits_now, eps, N, S, ITERS, W)
        post = both(tl.sum(post_0, 3), tl.sum(post_1, 3))
        firsts, seconds = columns_of(_flat(c_0, W, S), S), columns_of(_flat(c_1, W, S), S)
    LEFT: tl.constexpr = 1 if dtype == tl.bfloat16 else 3
    totals = ()
    squares = tl.zeros((8, W, 2), tl.float32)
    for span in tl.static_range(L):
        if ROWS > 0 and span > 0:
            rights = _load_rights(fn_ptr, own_channel + span * 16, H, N, ROWS, S)
        if SPREAD:
            if TOP_K > 0 and span > 0:
                y = y + (sum_of(y_ptr, add_ptr, rows, has_rows, token, live, channel + span * 16, H, TOP_K),)
            # No sum of a product that may be rounded or not: bits would depend on what else is compiled with it.
            s = post * y[span].to(tl.float32)
            for j in tl.static_range(N):
                c = both(tl.reshape(firsts[j], (4, 8, W, S)), tl.reshape(seconds[j], (4, 8, W, S)))
                s = tl.fma(tl.broadcast_to(c, s.shape), tl.broadcast_to(x[span * N + j].to(tl.float32), s.shape), s)
            all_x = round_to(s, dtype)
            tl.store(out_ptr + to + span * 16, all_x, mask=there & (k < N))
        else:
            all_x = x[span]
        if ROWS > 0:
            s = all_x.to(tl.float32)
            lefts = pieces(s, LEFT)
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
            own_squares = tl.sum(tl.sum(tl.sum(product(s, s), 5), 4), 0)
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
