"""The two kernels of step.py: what a step is run on, and what it leaves for the next one.

Sines and cosines are CUDA's own for float32, within 2 ulp at any angle: positions reach 10^6 radians, where the
hardware's approximation would be noise.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_step_kernel(
    rows_ptr, last_token_ptr, window_ptr, compressed_ptr,
    position_ptr, sequence_ptr, start_ptr, slot_ptr, query_start_ptr, token_ptr, next_position_ptr, turn_ptr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, CSA: tl.constexpr, HCA: tl.constexpr,
):  # fmt: skip
    """Program (row, which of four rotations); the first of a row writes all else. turn: [4, rows, PAIRS, 2]."""
    row, which = tl.program_id(0), tl.program_id(1)
    size = tl.num_programs(0)
    pair = tl.arange(0, BLOCK)
    plain = tl.load(window_ptr + pair, mask=pair < PAIRS, other=0.0)
    blended = tl.load(compressed_ptr + pair, mask=pair < PAIRS, other=0.0)
    is_active = tl.load(rows_ptr + 4 * row) != 0
    position = tl.where(is_active, tl.load(rows_ptr + 4 * row + 1), 0)
    if which == 0:
        slot, token = tl.load(rows_ptr + 4 * row + 2), tl.load(rows_ptr + 4 * row + 3)
        last = tl.load(last_token_ptr + row)
        tl.store(position_ptr + row, position)
        tl.store(start_ptr + row, position)
        tl.store(sequence_ptr + row, tl.where(is_active, row, -1))
        tl.store(slot_ptr + row, tl.where(is_active, slot, -1))
        tl.store(query_start_ptr + row, row)
        if row == size - 1:
            tl.store(query_start_ptr + size, size)
        tl.store(token_ptr + row, tl.where(is_active, tl.where(token < 0, last, token.to(tl.int64)), 0))
        tl.store(next_position_ptr + row, position.to(tl.int64) + 1)
    back = tl.where(which == 2, CSA - 1, tl.where(which == 3, HCA - 1, 0))
    angle = (position - back).to(tl.float32) * tl.where(which == 0, plain, blended)
    at = turn_ptr + ((which * size + row) * PAIRS + pair) * 2
    tl.store(at, tl.cos(angle), mask=pair < PAIRS)
    tl.store(at + 1, tl.sin(angle), mask=pair < PAIRS)


@triton.jit
def end_step_kernel(
    rows_ptr, last_token_ptr, token_ptr, x_ptr, out_ptr, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * H + channel, mask=channel < H, other=0.0)
    token = tl.load(token_ptr + row)
    is_active = tl.load(rows_ptr + 4 * row) != 0
    position = tl.load(rows_ptr + 4 * row + 1)
    # Infinity and NaN have the largest bits; the reduction also keeps these loads before the stores below.
    is_finite = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0) < 0x7F800000
    tl.store(out_ptr + 2 * row, tl.where(is_active, token, 0).to(tl.int32))
    tl.store(out_ptr + 2 * row + 1, tl.where(is_active, is_finite.to(tl.int32), 1))
    if is_active:
        tl.store(last_token_ptr + row, token)
        tl.store(rows_ptr + 4 * row + 1, position + 1)
        tl.store(rows_ptr + 4 * row + 3, -1)
