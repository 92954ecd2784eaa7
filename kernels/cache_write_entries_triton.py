"""Compressed entries from inside cache_write's kernel: pooled, normed, turned, stored; and the state they leave.

With one token a sequence each token has a program. With several, a program goes through a few tokens of the step and
acts on two kinds of them. The first of a sequence pools what reaches back to earlier steps, then overwrites the state.
One that completes an entry of this step's tokens alone pools that, and needs no state. So no program reads what another
one writes, wherever a step begins and ends.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.compress_decode import csa_keep, csa_pool, csa_pool_several, hca_add, hca_keep, hca_resume, hca_sums
from kernels.row_store import hadamard_pairs, load_rotation, norm_rope_pairs, store_row


@triton.jit
def store_entry(
    pooled, entry, unit, weight, cos, sin, eps, values, scales, unit_bytes,
    ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Norm, turn and store an entry [D] as row entry % ROWS of its block, unless that is negative."""
    e, o = norm_rope_pairs(pooled, weight, cos, sin, eps, D, GROUP, ROPE)
    if HADAMARD:
        e, o = hadamard_pairs(e, o, GROUP)
    if unit >= 0:
        base = unit * unit_bytes
        row = entry % ROWS
        store_row(e, o, values + base + row * ROW_BYTES, scales + base + row * SCALE_BYTES, FORMAT, D, GROUP)


@triton.jit
def block_of(entry, is_wanted, table_row, table_width, num_blocks, ROWS: tl.constexpr):
    """Return the block of an entry (int64), negative if the table or the pool lacks it, or if it is not wanted."""
    column = entry // ROWS
    block = tl.load(table_row + column, mask=is_wanted & (column < table_width), other=-1)
    return tl.where(block < num_blocks, block, -1).to(tl.int64)


@triton.jit
def compress_one(
    token, sequence, position, slots, num_slots, table_row, table_width, num_blocks,
    new, stride, bias, norm, state, state_unit, rotation, eps, values, scales, unit_bytes,
    RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Move one compressor of a sequence on by its only token of the step."""
    row = new + token.to(tl.int64) * stride
    entry = position // RATIO
    completes = (position + 1) % RATIO == 0
    slot = tl.load(slots + sequence)
    state += slot.to(tl.int64) * state_unit
    unit = block_of(entry, completes, table_row, table_width, num_blocks, ROWS)
    weight = tl.load(norm + tl.arange(0, D))
    cos, sin = load_rotation(rotation + token * ROPE, D, GROUP, ROPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (slot >= 0) & (slot < num_slots):
        if RATIO == 4:
            csa_keep(row, bias, state, position, D)
            if completes:
                pooled = csa_pool(row, bias, state, position, D)
                store_entry(
                    pooled, entry, unit, weight, cos, sin, eps, values, scales, unit_bytes,
                    ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
        else:
            top, total, weighted = hca_resume(state, position, D)
            top, total, weighted = hca_add(row, bias, top, total, weighted, position, D)
            if completes:
                store_entry(
                    weighted / total, entry, unit, weight, cos, sin, eps, values, scales, unit_bytes,
                    ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
            else:
                hca_keep(state, top, total, weighted, D)


@triton.jit
def compress_several(
    group, tokens, positions, sequences, starts, query_start, slots, num_slots, block_table, table_width, num_blocks,
    new, stride, bias, norm, state, state_unit, rotation, eps, values, scales, unit_bytes,
    RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr,
    TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do one compressor's part of tokens TOKENS group .. TOKENS group + TOKENS - 1.   AT_ONCE: tokens, at ratio 128."""
    REACH: tl.constexpr = 8 if RATIO == 4 else 128  # positions that an entry pools
    weight = tl.load(norm + tl.arange(0, D))
    if PDL:
        tl.extra.cuda.gdc_wait()
    for token in range(group * TOKENS, tl.minimum(group * TOKENS + TOKENS, tokens)):
        sequence = tl.load(sequences + token)
        at = tl.load(positions + token)
        # Of padding nothing is wanted, and a sequence of a padding token may be any.
        start = tl.load(starts + tl.maximum(sequence, 0))
        slot = tl.load(slots + tl.maximum(sequence, 0))
        has_slot = (sequence >= 0) & (slot >= 0) & (slot < num_slots)
        is_first = has_slot & (at == start)
        completes = has_slot & ((at + 1) % RATIO == 0) & (at - start >= REACH - 1)
        if is_first | completes:
            first = tl.load(query_start + sequence)
            end = start + tl.load(query_start + sequence + 1) - first
            own_state = state + slot.to(tl.int64) * state_unit
            rows = new + first.to(tl.int64) * stride
            stop = at + 1
            if is_first:
                at += RATIO - 1 - at % RATIO
                stop = tl.minimum(start + REACH - 1, end)
            while at < stop:
                entry = at // RATIO
                there = first + at - start
                table_row = block_table + sequence.to(tl.int64) * table_width
                unit = block_of(entry, True, table_row, table_width, num_blocks, ROWS)
                cos, sin = load_rotation(rotation + there * ROPE, D, GROUP, ROPE)
                if RATIO == 4:
                    pooled = csa_pool_several(
                        rows + (at - start).to(tl.int64) * stride, stride, bias, own_state, at, start, D
                    )
                else:
                    _, total, weighted = hca_sums(rows, stride, bias, own_state, start, entry * 128, at + 1, D, AT_ONCE)
                    pooled = weighted / total
                store_entry(
                    pooled, entry, unit, weight, cos, sin, eps, values, scales, unit_bytes,
                    ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
                at += RATIO
            if is_first:
                if RATIO == 4:
                    tl.debug_barrier()  # every thread has read the ring before any overwrites a row of it
                    for kept in range(tl.maximum(start, end - 8), end):
                        csa_keep(rows + (kept - start).to(tl.int64) * stride, bias, own_state, kept, D)
                elif end % 128 != 0:
                    top, total, weighted = hca_sums(
                        rows, stride, bias, own_state, start, end // 128 * 128, end, D, AT_ONCE
                    )
                    tl.debug_barrier()
                    hca_keep(own_state, top, total, weighted, D)
