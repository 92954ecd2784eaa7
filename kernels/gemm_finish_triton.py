"""Which share of a linear layer a program has, and how sums leave it: added up, gated, written."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_and_share(splits, SHARES: tl.constexpr):
    """Return group and share of this program, the second axis of the grid."""
    group, split = tl.program_id(1), 0
    if SHARES > 1:
        group, split = group // splits, group % splits
    return group, split


@triton.jit
def weight_row(row, rows, IS_GATED: tl.constexpr):
    """Return which row of weights a product has as its `row`: if gated eight of the first half, eight of the other."""
    if IS_GATED:
        row = row // 16 * 8 + row % 8 + row // 8 % 2 * (rows // 2)
    return row


@triton.jit
def _halves(x, A: tl.constexpr, N: tl.constexpr):
    """Return the gates' and the values' rows [A / 2, N] of x [A, N]."""
    gate, up = tl.split(tl.permute(tl.reshape(x, (A // 16, 2, 8, N)), (0, 2, 3, 1)))
    return tl.reshape(gate, (A // 2, N)), tl.reshape(up, (A // 2, N))


@triton.jit
def _write(
    out_ptr, out_stride, total, row, token, tokens, column, rows, A: tl.constexpr, N: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Write total [A, N], or what its gates leave of its values: see moe.gated."""
    if LIMIT is None:
        _store(out_ptr, out_stride, total, row, token, tokens, column, rows)
    else:
        gate, up = _halves(total, A, N)
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # comparisons, which let NaN through
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        first, _second = _halves(row[:, None], A, 1)
        row = tl.reshape(first, (A // 2,))
        row = row // 16 * 8 + row % 8
        _store(out_ptr, out_stride, gate / (1.0 + tl.exp(-gate)) * up, row, token, tokens, column, rows // 2)


@triton.jit
def _store(out_ptr, out_stride, total, row, token, tokens, column, rows):
    """Write total [A, N] of rows [A] and tokens [N] behind column `column`."""
    to = out_ptr + token.to(tl.int64)[None, :] * out_stride + (column + row)[:, None]
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@triton.jit
def finish(
    out_ptr, out_stride, part_ptr, counter_ptr, total, row, token, tokens, group, rows, block, blocks, split, splits,
    A: tl.constexpr, N: tl.constexpr, SHARES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write total [A, N], or, where programs have parts of it, have the last of them write their sum.

    block: of rows, of `blocks`; the third axis of the grid has those of tokens.
    LIMIT: None, or of gates and values, which alternate by eights (one group): their product is written.
    """
    if SHARES == 1:
        _write(out_ptr, out_stride, total, row, token, tokens, group * rows, rows, A, N, LIMIT)
    else:
        slot = (group * tl.num_programs(2) + tl.program_id(2)) * blocks + block
        part_ptr += slot.to(tl.int64) * splits * (A * N)
        place = part_ptr + tl.arange(0, A)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(place + split * (A * N), total)
        # All threads have stored before one of them counts; the count releases their stores and acquires others'.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + slot, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter_ptr + slot, 0)  # for the next launch
            whole = tl.load(place, cache_modifier=".cg")
            for other in tl.static_range(1, SHARES):
                there = tl.zeros((A, N), tl.int32) + other < splits
                whole += tl.load(place + other * (A * N), mask=there, other=0.0, cache_modifier=".cg")
            _write(out_ptr, out_stride, whole, row, token, tokens, group * rows, rows, A, N, LIMIT)
