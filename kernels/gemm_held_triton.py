"""held_kernel of gemm_decode.py: y = x W^T of e4m3 weights and e4m3 activations, where a program's share fits.

A program has BLOCK_R rows and BLOCK_T tokens and keeps all its operands in shared memory: its weights are there before
it waits for the kernel that writes x. What follows the wait is to fetch x, once, and the products, with no loop
and no load between them.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm_finish_triton import finish, group_and_share, weight_row
from kernels.launch_order_triton import await_inputs, begin, end


@triton.jit(do_not_specialize=["tokens", "row_shift", "splits"])
def held_kernel(
    out_ptr, x_ptr, x_scale_ptr, w_ptr, scale_ptr, part_ptr, counter_ptr, tokens, x_stride, scale_stride, out_stride,
    rows, channels, row_shift, splits,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STEPS: tl.constexpr, SHARES: tl.constexpr,
    EVEN: tl.constexpr, LIMIT: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token, group rows + row] = sum over the channels. Grid (tiles of rows, groups x splits, token tiles).

    STEPS: blocks of 128 channels of a program.   EVEN: every program has as many whole ones.   The rest: many_kernel.
    """
    begin(ORDER, PDL)
    group, split = group_and_share(splits, SHARES)
    columns = (channels + 127) // 128
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = split * STEPS
    channel = first * 128 + tl.arange(0, 128)
    weights, scales, given, x_scales = (), (), (), ()
    inside = group * rows + weight_row(tl.minimum(row, rows - 1), rows, LIMIT is not None)
    w_row = w_ptr + inside.to(tl.int64)[:, None] * channels
    scale_line = scale_ptr + (row_shift + inside) // 128 * columns
    for k in tl.static_range(STEPS):
        at = (channel + k * 128)[None, :]
        if EVEN:
            weights += (tl.load(w_row + at),)
        else:
            weights += (tl.load(w_row + at, mask=at < channels, other=0.0),)
    for k in tl.static_range(STEPS):
        scales += (tl.load(scale_line + tl.minimum(first + k, columns - 1)),)
    await_inputs(ORDER, PDL)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_row = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_stride + group * channels
    x_line = x_scale_ptr + token + group * columns * scale_stride
    for k in tl.static_range(STEPS):
        at = (channel + k * 128)[None, :]
        if EVEN:
            given += (tl.load(x_row + at),)
        else:
            given += (tl.load(x_row + at, mask=at < channels, other=0.0),)
    for k in tl.static_range(STEPS):
        x_scales += (tl.load(x_line + tl.minimum(first + k, columns - 1) * scale_stride),)
    total = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    for k in tl.static_range(STEPS):
        sums = tl.dot(weights[k], tl.trans(given[k]), tl.zeros((BLOCK_R, BLOCK_T), tl.float32))
        total += sums * scales[k][:, None] * x_scales[k][None, :]
    finish(
        out_ptr, out_stride, part_ptr, counter_ptr, total, row, token, tokens, group, rows,
        tl.program_id(0), tl.num_programs(0), split, splits, BLOCK_R, BLOCK_T, SHARES, LIMIT,
    )  # fmt: skip
    end(ORDER, PDL)
