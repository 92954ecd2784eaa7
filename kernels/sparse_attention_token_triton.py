"""The kernel of sparse_attention_decode.py for steps of many tokens.

One program takes all keys of a token for BLOCK_H heads, BLOCK_N at a time. S^T = K Q^T and O^T = K^T P^T have keys, or
channels, for rows: enough for products of warp groups, and K, the left operand of both, is in shared memory once.
Triton leaves a left operand in registers, where it does not fit, unless it was loaded or a loop hands it on: hence a
loop that runs once and hands on zeros. The machine code has no such loop.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.key_tile import anew, load_queries, read_codes, read_tail, settle, split_scales, unpack_keys, verdict_of
from kernels.row_load import look_up, pick
from kernels.rows import ROPE_CHANNELS
from kernels.sparse_attention_triton import LN2, LOG2E, RAISE, turn_back

# Never turned into constants or hints, so that one binary serves every batch and pool.
INTEGERS = [
    *("stride_ring_u", "stride_ring_r", "stride_ring_su", "stride_new_u", "stride_new_su"),
    *("stride_pool_u", "stride_pool_r", "stride_pool_su"),
    *("width", "table_width", "num_blocks", "num_slots"),
]

_TAIL = tl.constexpr(ROPE_CHANNELS)


@triton.jit
def _locate(
    n, end, entry, block, position, start, safe, ring, new, pool, num_blocks,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Return where keys n [N] lie, as row_load.locate does: row pointers, scale pointers, is_key, wrong."""
    values, scales, stride_r = ring
    new_values, new_scales, stride_n, stride_sn = new
    x = position - (WINDOW - 1) + n
    is_key = (n < WINDOW) & (n < end) & (x >= 0)
    is_new = x >= start
    at = tl.where(is_new, new_values + x.to(tl.int64) * stride_n * 4, values + x % WINDOW * stride_r * 4)
    scale_at = tl.where(is_new, new_scales + x.to(tl.int64) * stride_sn, scales + x % WINDOW)
    wrong = is_key & (x < safe)
    if POOL:
        values, scales, stride_u, stride_r, stride_su = pool
        is_entry = entry >= 0
        at = tl.where(is_entry, values + (block.to(tl.int64) * stride_u + entry % ROWS * stride_r) * 4, at)
        scale_at = tl.where(is_entry, scales + (block.to(tl.int64) * stride_su + entry % ROWS), scale_at)
        is_key = is_key | is_entry
        wrong = wrong | (is_entry & ((block < 0) | (block >= num_blocks)))
    return at, scale_at, is_key, wrong


@triton.jit(do_not_specialize=INTEGERS)
def token_kernel(
    q_ptr, out_ptr, lse_ptr, sink_ptr, rotation_ptr,
    positions_ptr, sequence_ptr, starts_ptr, slots_ptr, table_ptr, selected_ptr,
    ring_ptr, ring_scale_ptr, new_ptr, new_scale_ptr, pool_ptr, pool_scale_ptr,
    stride_ring_u, stride_ring_r, stride_ring_su, stride_new_u, stride_new_su, stride_pool_u, stride_pool_r,
    stride_pool_su, scale_log2e, width, table_width, num_blocks, num_slots,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of a token. Grid (tokens, 1, blocks of heads). Rows are packed."""
    POOL: tl.constexpr = pool_ptr is not None
    SELECTED: tl.constexpr = selected_ptr is not None
    token = tl.program_id(0)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = h < H
    # Written before the step began, so not waited for.
    sequence = tl.load(sequence_ptr + token)
    position = tl.load(positions_ptr + token)
    known = tl.maximum(sequence, 0)
    start, slot = tl.load(starts_ptr + known), tl.load(slots_ptr + known)
    # Where position 0 of the ring is, and where it were among the new rows.
    ring_ptr += slot.to(tl.int64) * stride_ring_u * 4
    ring_scale_ptr += slot.to(tl.int64) * stride_ring_su
    own = new_ptr + token.to(tl.int64) * stride_new_u * 4
    before = (token - position).to(tl.int64)
    new_ptr += before * stride_new_u * 4
    new_scale_ptr += before * stride_new_su
    # The first position whose row is there.
    safe = tl.where((slot < 0) | (slot >= num_slots), start, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    keys = WINDOW + width
    if not SELECTED:
        keys = WINDOW + (position + 1) // RATIO if POOL else WINDOW
    end = tl.where(sequence >= 0, keys, 0)
    ring = (ring_ptr, ring_scale_ptr, stride_ring_r)
    new = (new_ptr, new_scale_ptr, stride_new_u, stride_new_su)
    pool = (pool_ptr, pool_scale_ptr, stride_pool_u, stride_pool_r, stride_pool_su)
    n = tl.arange(0, BLOCK_N)
    entry = pick(n, end, token, selected_ptr, width, WINDOW, POOL, SELECTED)
    next_entry = pick(n + BLOCK_N, end, token, selected_ptr, width, WINDOW, POOL, SELECTED)
    block = look_up(entry, known, position, table_ptr, table_width, RATIO, ROWS, POOL)
    next_block = look_up(next_entry, known, position, table_ptr, table_width, RATIO, ROWS, POOL)
    at, scale_at, is_key, wrong = _locate(
        n, end, entry, block, position, start, safe, ring, new, pool, num_blocks, WINDOW, ROWS, POOL
    )  # fmt: skip
    at, scales, wrong = settle(at, scale_at, is_key, wrong, own, D)
    codes, tail, scale = read_codes(at, D), read_tail(at, D), split_scales(scales, D)
    verdict = verdict_of(is_key, wrong, BLOCK_N)

    row = token.to(tl.int64) * H + h
    q = tl.trans(load_queries(q_ptr + row * D, is_head & (sequence >= 0), BLOCK_H, D))
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    o = tl.zeros((D, BLOCK_H), tl.float32)
    for i in range(tl.cdiv(end, BLOCK_N)):
        k = unpack_keys(codes, tail, scale, BLOCK_N, D)
        once = tl.full((), 1, tl.int32)
        while once > 0:
            s = (tl.dot(k, q) + verdict[:, None]) * scale_log2e
            # Rows of the next tile, entries of the one behind it, at the end their blocks: no load waits for another.
            n = (i + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
            at, scale_at, is_key, wrong = _locate(
                n, end, next_entry, next_block, position, start, safe, ring, new, pool, num_blocks, WINDOW, ROWS, POOL
            )  # fmt: skip
            at, scales, wrong = settle(at, scale_at, is_key, wrong, own, D)
            codes, tail, scale = read_codes(at, D), read_tail(at, D), split_scales(scales, D)
            verdict = verdict_of(is_key, wrong, BLOCK_N)
            next_entry = pick(n + BLOCK_N, end, token, selected_ptr, width, WINDOW, POOL, SELECTED)
            higher = tl.maximum(top, tl.max(s, 0))
            shift = tl.where(higher == -float("inf"), 0.0, higher)  # nothing yet: exp2(-inf - shift) must be 0, not NaN
            fade = tl.exp2(top - shift)
            p = tl.exp2(s - (shift - RAISE)[None, :])
            top = higher
            total = total * fade + tl.sum(p, 0)
            o = tl.dot(tl.trans(k), p.to(tl.float16), o * fade[None, :])
            next_block = look_up(next_entry, known, position, table_ptr, table_width, RATIO, ROWS, POOL)
            k = tl.zeros((BLOCK_N, D), tl.float16)
            once = tl.full((), 0, tl.int32)

    token, h = anew(token), anew(tl.program_id(2)) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = h < H
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h, mask=is_head, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
    else:
        higher = top
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    fade = tl.exp2(top - shift)
    total *= fade
    if sink_ptr is not None:
        total += tl.exp2(sink - shift + RAISE)
    o = tl.trans(o * tl.where(total == 0.0, 0.0, fade / total)[None, :])
    if rotation_ptr is not None:
        turned = 2 * tl.arange(0, D // 2)[None, :] - (D - _TAIL)
        turn = rotation_ptr + token * _TAIL + turned
        cos = tl.load(turn, mask=turned >= 0, other=1.0)
        o = turn_back(o, cos, tl.load(turn + 1, mask=turned >= 0, other=0.0), BLOCK_H, D)
    row = token.to(tl.int64) * H + h
    to = out_ptr + row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to, o.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (shift - RAISE + tl.log2(total)) * LN2, mask=is_head)
