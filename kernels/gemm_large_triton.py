"""The Triton kernels of gemm_large.py, beside a library's product: weights to bf16 before it, gates after it."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "row_shift"])
def dequantize_kernel(
    out_ptr, w_ptr, scale_ptr, rows, channels, row_shift,
    SHIFT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = w times its scales: bf16 and e4m3, [rows, channels]. Grid (tiles of rows, spans of channels).

    BLOCKS: of 128 channels in a span.   row_shift, SHIFT: rows and channels of the first block before the weight.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = (channels + SHIFT + 127) // 128
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = (column[:, None] * 128 + tl.arange(0, 128)[None, :] - SHIFT)[None, :, :]
    live = (row < rows)[:, None, None] & (at < channels)
    if SHIFT > 0:
        live &= at >= 0
    line = (row + row_shift) // 128 * columns
    known = (row < rows)[:, None] & (column < columns)[None, :]
    scale = tl.load(scale_ptr + line[:, None] + column[None, :], mask=known, other=0.0)
    begin = (row.to(tl.int64) * channels)[:, None, None]
    value = tl.load(w_ptr + begin + at, mask=live, other=0.0).to(tl.float32) * scale[:, :, None]
    if PDL:  # weights are nobody's to write, but the memory for `out` was another's before
        tl.extra.cuda.gdc_wait()
    tl.store(out_ptr + begin + at, value.to(tl.bfloat16), mask=live)


@triton.jit
def swiglu_kernel(out_ptr, sums_ptr, inner, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [T, inner] = moe.gated of gates and values, the halves of sums [T, 2 inner]. Grid (T, blocks of channels)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < inner
    gate = tl.load(sums_ptr + token * 2 * inner + at, mask=live, other=0.0)
    up = tl.load(sums_ptr + token * 2 * inner + inner + at, mask=live, other=0.0)
    gate = tl.where(gate > limit, limit, gate)  # comparisons, which let NaN through
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * inner + at, value.to(out_ptr.dtype.element_ty), mask=live)
