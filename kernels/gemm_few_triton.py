"""few_kernel of gemm_decode.py: y = x W^T with few tokens.

A warp loads 16 rows, 128 bytes of each at a time, straight into the registers in which the tensor cores want their left
operand (gemm_fragment_triton.py), before it waits for the kernel that writes x. No shared memory, no barrier, until the
sums of warps that share channels are added.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm_finish_triton import finish, group_and_share, weight_row
from kernels.gemm_fragment_triton import BF16, FP8, lane_gamma, lane_tokens, lane_weights, multiply, weigh
from kernels.launch_order_triton import await_inputs, begin, end


@triton.jit(do_not_specialize=["tokens", "pieces", "row_shift", "splits"])
def few_kernel(
    out_ptr, x_ptr, w_ptr, scale_ptr, gamma_ptr, part_ptr, counter_ptr, tokens, x_stride, out_stride, eps,
    rows, pieces, row_shift, splits,
    SHIFT: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr, NB: tl.constexpr,
    DEPTH: tl.constexpr, SHARES: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr, LEAN: tl.constexpr,
    LIMIT: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token, group rows + row] = sum over the channels, pieces of 16 bytes.

    Grid (tiles of 16 R RS rows, groups x splits, 8 NB tokens). Warp ks RS + rs takes tiles rs, rs + RS, ... of 16 rows
    and every KS-th chunk of 128 bytes; DEPTH chunks are on their way at a time.   SHARES: most splits.   ONCE: a warp
    has DEPTH chunks and no more.   EVEN: every tile has its rows, every warp of every split as many chunks.
    LEAN: even, R 1, and every tile has one row of scales, which is then read once.
    """
    begin(ORDER, PDL)
    group, split = group_and_share(splits, SHARES)
    few_share(
        out_ptr, x_ptr, w_ptr, scale_ptr, gamma_ptr, part_ptr, counter_ptr, tokens, x_stride, out_stride, eps,
        rows, pieces, row_shift, group, tl.program_id(0), tl.num_programs(0), split, splits,
        SHIFT, KIND, R, KS, RS, NB, DEPTH, SHARES, ONCE, EVEN, LEAN, LIMIT, ORDER, PDL,
    )  # fmt: skip
    end(ORDER, PDL)


@triton.jit
def few_share(
    out_ptr, x_ptr, w_ptr, scale_ptr, gamma_ptr, part_ptr, counter_ptr, tokens, x_stride, out_stride, eps,
    rows, pieces, row_shift, group, block, blocks, split, splits,
    SHIFT: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr, NB: tl.constexpr,
    DEPTH: tl.constexpr, SHARES: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr, LEAN: tl.constexpr,
    LIMIT: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a program of few_kernel does: a block of rows, of `blocks`, and a share of the channels."""
    W: tl.constexpr = KS * RS
    C: tl.constexpr = 16 if KIND == FP8 else (8 if KIND == BF16 else 4)
    UNIT: tl.constexpr = 4 if KIND == FP8 else 1
    channels = pieces * C
    chunks = (channels + SHIFT + 8 * C - 1) // (8 * C)
    share = DEPTH
    if not ONCE:
        share = chunks
        if SHARES > 1:
            share = (share + splits - 1) // splits
        share = (share + KS - 1) // KS
    first = block * (R * RS)
    w_ptr += group.to(tl.int64) * rows * (channels // UNIT)
    x_ptr += group * channels
    warp = tl.arange(0, W)
    chunk = split * (share * KS) + warp // RS
    tile = first + tl.arange(0, R)[None, :] * RS + (warp % RS)[:, None]
    half = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, 2)[None, None, None, :] * 8
    row = weight_row(tile[None, :, :, None] * 16 + half, rows, LIMIT is not None)
    # The scales' rows, in the order of the sums.
    line = tile * 16
    if not LEAN:
        line = tl.reshape(line[:, :, None] + tl.arange(0, 16)[None, None, :], (W, 16 * R))
        line = weight_row(line, rows, LIMIT is not None)
    line = (group * rows + row_shift + line) // 128
    if not EVEN:
        line = tl.minimum(line, (group * rows + row_shift + rows - 1) // 128)
    weights, scales = (), ()
    for d in tl.static_range(DEPTH):
        weights += (lane_weights(w_ptr, row, chunk, d * KS, True, rows, channels, SHIFT, KIND, EVEN),)
        if KIND == FP8:
            scales += (_scale(scale_ptr, line, chunk + d * KS, True, chunks, EVEN),)
    await_inputs(ORDER, PDL)
    token = tl.program_id(2) * (8 * NB) + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
    total = tl.zeros((W, 16 * R, 8 * NB), tl.float32)
    squares = tl.zeros((4, 8, W, NB), tl.float32)
    for step in range(0, DEPTH if ONCE else share, DEPTH):
        next_weights, next_scales, tokens_here = (), (), ()
        follows = step + DEPTH
        onward = tl.where(follows < share, follows, 0)  # the last step asks again for what the first one had
        for d in tl.static_range(DEPTH):
            here = chunk + (step + d) * KS
            tokens_here += (lane_tokens(x_ptr, x_stride, token, tokens, here, channels, C, SHIFT, EVEN),)
        for d in tl.static_range(DEPTH):
            x = tokens_here[d]
            if gamma_ptr is not None:
                here = chunk + (step + d) * KS
                x, squares = weigh(x, lane_gamma(gamma_ptr, here, channels, C, SHIFT, x.shape[6], EVEN), squares)
            sums = multiply(weights[d], x, W, R, NB, KIND)
            if KIND == FP8:
                sums *= scales[d][:, :, None]
            total += sums
            if not ONCE:
                wanted = follows + d < share
                next_weights += (
                    lane_weights(w_ptr, row, chunk, (onward + d) * KS, wanted, rows, channels, SHIFT, KIND, EVEN),
                )
                if KIND == FP8:
                    next_scales += (_scale(scale_ptr, line, chunk + (onward + d) * KS, wanted, chunks, EVEN),)
        if not ONCE:
            weights, scales = next_weights, next_scales
    whole = tl.sum(tl.reshape(total, (KS, RS, 16 * R, 8 * NB)), 0)
    whole = tl.reshape(whole, (RS * R * 16, 8 * NB))
    if gamma_ptr is not None:
        shared = tl.reshape(tl.sum(squares, 0), (8, KS, RS, NB))
        mean = tl.sum(tl.sum(shared, 2), 1) / (RS * channels)
        factor = tl.reshape(tl.permute(tl.rsqrt(mean + eps), (1, 0)), (8 * NB,))
        whole *= factor[None, :]
    place = first + tl.arange(0, RS)[:, None] + tl.arange(0, R)[None, :] * RS
    place = tl.reshape(place[:, :, None] * 16 + tl.arange(0, 16)[None, None, :], (RS * R * 16,))
    finish(
        out_ptr, out_stride, part_ptr, counter_ptr, whole, place, tl.program_id(2) * (8 * NB) + tl.arange(0, 8 * NB),
        tokens, group, rows, block, blocks, split, splits, 16 * R * RS, 8 * NB, SHARES, LIMIT,
    )  # fmt: skip


@triton.jit
def _scale(scale_ptr, line, chunk, wanted, columns, EVEN: tl.constexpr):
    """Return the scales of lines [W, 16 R], or [W, 1], at chunks [W]; 0 beyond the last."""
    place = scale_ptr + line * columns + chunk[:, None]
    live = (chunk < tl.where(wanted, columns, 0))[:, None]
    return tl.load(place) if EVEN else tl.load(place, mask=live, other=0.0)
