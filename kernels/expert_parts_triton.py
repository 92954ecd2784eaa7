"""Adding up the rows of a token's experts: in a launch of its own, or where another kernel reads them.

    total = 0 + part[row of t's first choice] + part[of its second] + ..., in that order, and then add[t]

Both ways have the same bits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(ids_ptr, rank_ptr, first_ptr, token, live, TOP_K: tl.constexpr):
    """Return which tokens have rows, and TOP_K tensors of those rows; 0 where there is none.

    token: integers of any shape, read where `live`. A negative expert is that of a padding token.
    """
    has_rows = tl.load(ids_ptr + token * TOP_K, mask=live, other=-1) >= 0
    rows = ()
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + k, mask=has_rows, other=0)
        rank = tl.load(rank_ptr + token * TOP_K + k, mask=has_rows, other=0)
        rows = rows + (tl.load(first_ptr + expert, mask=has_rows, other=0) + rank,)
    return has_rows, rows


@triton.jit
def sum_of(part_ptr, add_ptr, rows, has_rows, token, live, channel, H: tl.constexpr, TOP_K: tl.constexpr):
    """Return a token's sum at `channel`, float32: 0 for what is not live.

    rows, has_rows: of rows_of, of shapes that channel's broadcasts to.   live: where add is read.
    """
    has_rows = has_rows & live
    total = 0.0  # so that no sum of rows is -0
    for k in tl.static_range(TOP_K):
        part = tl.load(part_ptr + (rows[k] * H + channel), mask=has_rows, other=0.0)
        total += part
    if add_ptr is not None:
        total += tl.load(add_ptr + (token.to(tl.int64) * H + channel), mask=live, other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_kernel(
    out_ptr, part_ptr, ids_ptr, rank_ptr, first_ptr, add_ptr,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of token t. Grid (tokens, blocks of channels)."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < H
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Of routing, which has long ended.
    has_rows, rows = rows_of(ids_ptr, rank_ptr, first_ptr, token, True, TOP_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = sum_of(part_ptr, add_ptr, rows, has_rows, token, inside, channel, H, TOP_K)
    tl.store(out_ptr + token.to(tl.int64) * H + channel, total.to(out_ptr.dtype.element_ty), mask=inside)
