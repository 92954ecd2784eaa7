"""The Triton kernels of gemm_decode.py: y = x W^T with many tokens, and what makes its x.

Weights [rows, channels] are read as a checkpoint stores them. They are the left operand, tokens the narrow right one.

many_kernel: tiles in shared memory, copied in the background. Of e4m3 activations it copies the scales along. A norm in
front costs no pass: its weight goes onto the weights, which are in registers on their way to the tensor cores, as bf16
activations are not; its factor goes onto the sums, from squares of the same tiles, which hold all channels of a token.
(gemm_few_triton.py has the kernel for few tokens, gemm_held_triton.py one for e4m3 activations without a loop.)

The scale of a 128 x 128 block of e4m3 goes onto the sum over 128 channels, in float32. A block may be cut: rows and
channels of the weight then begin inside one.

Where programs share the channels (SPLIT > 1), each writes its sums, and the last one adds all of them in order.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm_finish_triton import finish, group_and_share, weight_row
from kernels.gemm_fragment_triton import FP8, product, widen
from kernels.launch_order_triton import await_inputs, begin, end


@triton.jit(do_not_specialize=["tokens", "row_shift", "splits"])
def many_kernel(
    out_ptr, x_ptr, x_scale_ptr, w_ptr, scale_ptr, gamma_ptr, part_ptr, counter_ptr, tokens, x_stride, scale_stride,
    out_stride, eps, rows, channels, row_shift, splits,
    SHIFT: tl.constexpr, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr, ORDER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As few_kernel, from tiles of BLOCK_R rows and BLOCK_T tokens. Grid (tiles, groups x splits, token tiles).

    x_scale_ptr: scales of x, e4m3, for each 128 channels one of every token, scale_stride apart, and as many as there
    are in whole tiles; None: x is no e4m3.   gamma_ptr: None, or weight of an RMS norm of x in bf16, two as an int32;
    then EVEN, one split.   EVEN: all steps are whole.   STAGES: None, or how many steps ahead scales are copied too,
    which a loop does only if it is told its stages.
    """
    begin(ORDER, PDL)
    group, split = group_and_share(splits, SHARES)
    many_share(
        out_ptr, x_ptr, x_scale_ptr, w_ptr, scale_ptr, gamma_ptr, part_ptr, counter_ptr, tokens, x_stride, scale_stride,
        out_stride, eps, rows, channels, row_shift, group, tl.program_id(0), tl.num_programs(0), split, splits,
        SHIFT, KIND, BLOCK_R, BLOCK_T, BLOCK_K, SHARES, EVEN, STAGES, LIMIT, ORDER, PDL,
    )  # fmt: skip
    end(ORDER, PDL)


@triton.jit
def many_share(
    out_ptr, x_ptr, x_scale_ptr, w_ptr, scale_ptr, gamma_ptr, part_ptr, counter_ptr, tokens, x_stride, scale_stride,
    out_stride, eps, rows, channels, row_shift, group, block, blocks, split, splits,
    SHIFT: tl.constexpr, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr, ORDER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What a program of many_kernel does: a block of rows, of `blocks`, and a share of the channels."""
    steps = (channels + SHIFT + BLOCK_K - 1) // BLOCK_K
    columns = (channels + SHIFT + 127) // 128
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = weight_row(tl.minimum(row, rows - 1), rows, LIMIT is not None)
    first, last = 0, steps
    if SHARES > 1:
        share = (steps + splits - 1) // splits
        first, last = split * share, tl.minimum(split * share + share, steps)
    w_row = w_ptr + (group * rows + inside).to(tl.int64) * channels
    await_inputs(ORDER, PDL)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = tl.minimum(token, tokens - 1)
    x_row = x_ptr + known.to(tl.int64) * x_stride + group * channels
    channel = tl.arange(0, BLOCK_K)
    line = (group * rows + row_shift + inside) // 128
    total = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K // 8), tl.float32)
    scale = 1.0
    if KIND == FP8:
        scale_line = scale_ptr + line * columns
        if x_scale_ptr is None:
            scale = tl.load(scale_line + first * BLOCK_K // 128)
        else:
            x_line = x_scale_ptr + token + group * columns * scale_stride
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * BLOCK_K + channel - SHIFT
        if EVEN:
            w = tl.load(w_row[:, None] + at[None, :])
            x = tl.load(x_row[:, None] + at[None, :])
        else:
            live = (at >= 0) & (at < channels)
            w = tl.load(w_row[:, None] + at[None, :], mask=live[None, :], other=0.0)
            x = tl.load(x_row[:, None] + at[None, :], mask=live[None, :], other=0.0)
        if x_scale_ptr is None:
            if KIND == FP8:
                w = widen(w)
            if gamma_ptr is not None:
                gamma = tl.load(gamma_ptr + step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2))
                w, squares = _weigh(w, x, gamma, squares)
        if KIND != FP8:
            total = product(w, tl.trans(x), total)
        elif x_scale_ptr is None:
            # The next step's, asked for before the product so that it is there behind it.
            following = tl.load(scale_line + tl.minimum(step + 1, steps - 1) * BLOCK_K // 128)
            total += product(w, tl.trans(x), tl.zeros((BLOCK_R, BLOCK_T), tl.float32)) * scale[:, None]
            scale = following
        else:
            column = step * BLOCK_K // 128
            w_scale, x_scale = tl.load(scale_line + column), tl.load(x_line + column * scale_stride)
            sums = tl.dot(w, tl.trans(x), tl.zeros((BLOCK_R, BLOCK_T), tl.float32))
            total += sums * w_scale[:, None] * x_scale[None, :]
    if gamma_ptr is not None:
        total *= tl.rsqrt(tl.sum(squares, 1) / channels + eps)[None, :]
    finish(
        out_ptr, out_stride, part_ptr, counter_ptr, total, row, token, tokens, group, rows, block, blocks,
        split, splits, BLOCK_R, BLOCK_T, SHARES, LIMIT,
    )  # fmt: skip


@triton.jit
def _weigh(w, x, gamma, squares):
    """Return w times the norm's weight, rounded to w's type, and squares plus those of x, eight channels in one.

    gamma: pairs of bf16, which are copied in the background, as single ones can't be.
    """
    wide = tl.reshape(x.to(tl.float32), (squares.shape[0], squares.shape[1], x.shape[1] // squares.shape[1]))
    squares += tl.sum(wide * wide, 2)
    low, high = gamma.to(tl.int16), (gamma >> 16).to(tl.int16)
    gamma = tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))
    gamma = tl.reshape(gamma, (1, x.shape[1])).to(tl.float32)
    return (w.to(tl.float32) * gamma).to(w.dtype), squares


@triton.jit
def quantize_kernel(
    codes_ptr, scale_ptr, x_ptr, gamma_ptr, x_stride, scale_stride, channels, eps,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """quant.quantize_e4m3 of rows of x in groups of 128 channels, the last one possibly cut. Grid (tokens,).

    A group's scales lie together, those of the next one scale_stride behind them.   gamma_ptr: weight of an RMS norm
    before it, whose result is rounded to x's dtype, or None.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = (channels + 127) // 128
    token, group = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if gamma_ptr is not None:
        gamma = tl.load(gamma_ptr + at, mask=at < channels, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_stride + at, mask=at < channels, other=0.0).to(tl.float32)
    if gamma_ptr is not None:
        y = x * tl.rsqrt(tl.sum(x * x) / channels + eps) * gamma
        x = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    # On the bits, which order magnitudes as the values do, with inf and NaN at the top. 0x38D1B717: 1e-4. A mantissa
    # above that of 448 = 1.75 * 2^8 takes the next power of two.
    largest = tl.maximum(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0x38D1B717)
    broken = largest >= 0x7F800000
    power = ((largest + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    inverse = tl.where(broken, 0, (254 << 23) - power).to(tl.float32, bitcast=True)  # exact; 0 * inf is NaN
    scale = tl.where(broken, largest, power).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + group * scale_stride + token, scale, mask=group < columns)
    tl.store(codes_ptr + token * channels + at, (x * inverse[:, None]).to(tl.float8e4nv), mask=at < channels)


@triton.jit
def norm_kernel(
    out_ptr, x_ptr, gamma_ptr, x_stride, channels, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out = rms(x, gamma), rows of up to BLOCK channels, in x's dtype. Grid (tokens,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    gamma = tl.load(gamma_ptr + at, mask=at < channels, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_stride + at, mask=at < channels, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / channels + eps) * gamma
    tl.store(out_ptr + token * channels + at, y.to(out_ptr.dtype.element_ty), mask=at < channels)
