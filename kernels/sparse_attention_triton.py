"""The Triton kernels of sparse_attention_decode.py: formulas, layouts and edges are described there.

Scores are powers of two: log2(e) is part of the scale, and the sink is multiplied by it. Sizes ("lse") of splits too.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_load import (
    BF16,
    FP32,
    PACKED,
    keep,
    locate,
    look_up,
    pick,
    read_rows,
    to_f16,
    unpack_body,
    unpack_tail,
)
from kernels.rows import ROPE_CHANNELS

# Never turned into constants or hints, so that one binary serves every batch and pool.
INTEGERS = [
    *("stride_ring_u", "stride_ring_r", "stride_ring_su", "stride_new_u", "stride_new_su"),
    *("stride_pool_u", "stride_pool_r", "stride_pool_su"),
    *("width", "table_width", "num_blocks", "num_slots", "tiles"),
]

_TAIL = tl.constexpr(ROPE_CHANNELS)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# Weights are kept times 2^10: those of f16 end at 2^-24, too close below a maximum of 1.
RAISE = tl.constexpr(10.0)


@triton.jit
def turn_back(x, cos, sin, N: tl.constexpr, C: tl.constexpr):
    """Return x [N, C] with its pairs turned back by (cos, sin), [C/2] each or alike."""
    even, odd = tl.split(tl.reshape(x, (N, C // 2, 2)))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (N, C))


@triton.jit
def _combine(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, sink_ptr, rotation_ptr, token, h, splits,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write out and lse of heads h [N] of a token from its splits, summed in order. SPLITS: at least `splits`.

    CHUNK: splits whose loads are in flight together.
    """
    is_head = h < H
    c = tl.arange(0, D)
    s = tl.arange(0, SPLITS)
    base = token.to(tl.int64) * splits * H + h
    exists = (s < splits)[:, None] & is_head[None, :]
    sizes = tl.load(
        part_lse_ptr + base[None, :] + s[:, None] * H, mask=exists, other=-float("inf"), cache_modifier=".cg"
    )
    top = tl.max(sizes, 0)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h, mask=is_head, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((N,), tl.float32)
    if sink_ptr is not None:
        total = tl.exp2(sink - shift)
    x = tl.zeros((N, D), tl.float32)
    for first in range(0, splits, CHUNK):
        for ahead in tl.static_range(CHUNK):
            split = first + ahead
            used = tl.where(split < splits, h, H) < H
            at = base + split * H
            size = tl.load(part_lse_ptr + at, mask=used, other=-float("inf"), cache_modifier=".cg")
            is_full = size != -float("inf")  # true for NaN, which must come through
            part = tl.load(
                part_ptr + at[:, None] * D + c[None, :], mask=is_full[:, None], other=0.0, cache_modifier=".cg"
            )
            weight = tl.where(is_full, tl.exp2(size - shift), 0.0)
            x += part.to(tl.float32) * weight[:, None]
            total += weight
    x = tl.where((total == 0.0)[:, None], 0.0, x / total[:, None])
    if rotation_ptr is not None:
        pair = tl.arange(0, D // 2)
        turned = pair - (D - _TAIL) // 2
        at = rotation_ptr + token * _TAIL + 2 * turned
        cos = tl.load(at, mask=turned >= 0, other=1.0)
        sin = tl.load(at + 1, mask=turned >= 0, other=0.0)
        x = turn_back(x, cos[None, :], sin[None, :], N, D)
    row = token.to(tl.int64) * H + h
    tl.store(out_ptr + row[:, None] * D + c[None, :], x.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (shift + tl.log2(total)) * LN2, mask=is_head)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, sink_ptr, rotation_ptr, splits,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of a token."""
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _combine(
        out_ptr, lse_ptr, part_ptr, part_lse_ptr, sink_ptr, rotation_ptr, tl.program_id(0), h, splits,
        H, D, BLOCK_H, SPLITS, min(SPLITS, 8),
    )  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def attention_kernel(
    q_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, counter_ptr, sink_ptr, rotation_ptr,
    positions_ptr, sequence_ptr, starts_ptr, query_start_ptr, slots_ptr, table_ptr, selected_ptr,
    ring_ptr, ring_scale_ptr, new_ptr, new_scale_ptr, pool_ptr, pool_scale_ptr,
    stride_ring_u, stride_ring_r, stride_ring_su, stride_new_u, stride_new_su, stride_pool_u, stride_pool_r,
    stride_pool_su, scale_log2e, width, table_width, num_blocks, num_slots, tiles,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr,
    FORMAT: tl.constexpr, GROUPS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, SINGLE: tl.constexpr, SWAP: tl.constexpr, SPREAD: tl.constexpr, FUSED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a split of the keys of a token, for BLOCK_H heads. Grid (splits, tokens, head blocks).

    tiles: BLOCK_N keys each that a split takes; 0: what the token sees, evenly.   SINGLE: one tile a split, no loop.
    SPLITS: 1: the result is final; FUSED: a power of two of at least the number of splits.
    SWAP: S^T = K Q^T, O^T = K^T P^T.   SPREAD: scores by groups of 64 channels, a warp each, then summed: short chains
    of products instead of one long one.
    """
    split, token = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(0)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = h < H
    # Written before the step began, so not waited for.
    sequence = tl.load(sequence_ptr + token)
    position = tl.load(positions_ptr + token)
    known = tl.maximum(sequence, 0)
    start, first = tl.load(starts_ptr + known), tl.load(query_start_ptr + known)
    place = (position, start, first, tl.load(slots_ptr + known))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    BODY: tl.constexpr = D - _TAIL
    PADDED: tl.constexpr = GROUPS * 64
    c, tail_c = tl.arange(0, PADDED), tl.arange(0, _TAIL)
    keys = WINDOW + width
    if selected_ptr is None:
        keys = WINDOW + tl.where(sequence >= 0, (position + 1) // RATIO, 0) if RATIO > 0 else WINDOW
    share = tiles
    if tiles == 0:
        share = tl.cdiv(tl.cdiv(keys, BLOCK_N), splits)
    low = split * share * BLOCK_N
    end = tl.where(sequence >= 0, tl.minimum(low + share * BLOCK_N, keys), 0)

    ring = (ring_ptr, ring_scale_ptr, stride_ring_u, stride_ring_r, stride_ring_su)
    new = (new_ptr, new_scale_ptr, stride_new_u, 0, stride_new_su)
    pool = (pool_ptr, pool_scale_ptr, stride_pool_u, stride_pool_r, stride_pool_su)
    NEW: tl.constexpr = new_ptr is not None
    POOL: tl.constexpr = pool_ptr is not None
    SELECTED: tl.constexpr = selected_ptr is not None
    PIECE: tl.constexpr = 8 if FORMAT == BF16 else 4
    n = low + tl.arange(0, BLOCK_N)
    entry = pick(n, end, token, selected_ptr, width, WINDOW, POOL, SELECTED)
    if not SINGLE:
        next_entry = pick(n + BLOCK_N, end, token, selected_ptr, width, WINDOW, POOL, SELECTED)
        third_entry = pick(n + 2 * BLOCK_N, end, token, selected_ptr, width, WINDOW, POOL, SELECTED)
    block = look_up(entry, known, position, table_ptr, table_width, RATIO, ROWS, POOL)
    if not SINGLE:
        next_block = look_up(next_entry, known, position, table_ptr, table_width, RATIO, ROWS, POOL)
    at, scale_at, is_key, wrong = locate(
        n, end, entry, block, place, ring, new, pool, num_blocks, num_slots, WINDOW, ROWS, NEW, POOL, PIECE
    )  # fmt: skip
    body, tail, scales, verdict = read_rows(at, scale_at, is_key, wrong, D, GROUPS, FORMAT)

    q_at = q_ptr + (token.to(tl.int64) * H + h)[:, None] * D
    is_query = (tl.where(sequence >= 0, h, H) < H)[:, None]  # padding's are not read: a NaN there would get through
    q_body = tl.load(q_at + c[None, :], mask=is_query & (c < BODY)[None, :], other=1.0).to(tl.float32)
    q_tail = tl.load(q_at + BODY + tail_c[None, :], mask=is_query, other=0.0).to(tl.float32)
    if FORMAT == PACKED:
        q_body, q_tail = keep(to_f16(q_body)), keep(to_f16(q_tail))
    elif FORMAT == BF16:
        q_body, q_tail = q_body.to(tl.bfloat16), q_tail.to(tl.bfloat16)
    PRECISION: tl.constexpr = "tf32x3" if FORMAT == FP32 else "tf32"

    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if SWAP:
        q_body, q_tail = tl.trans(q_body), tl.trans(q_tail)
        o_body, o_tail = tl.zeros((PADDED, BLOCK_H), tl.float32), tl.zeros((_TAIL, BLOCK_H), tl.float32)
    else:
        o_body, o_tail = tl.zeros((BLOCK_H, PADDED), tl.float32), tl.zeros((BLOCK_H, _TAIL), tl.float32)

    if SPREAD:
        q_groups = tl.permute(tl.reshape(q_body, (BLOCK_H, GROUPS, 64)), (1, 0, 2))
    num_tiles = 1 if SINGLE else tl.cdiv(tl.maximum(end - low, 0), BLOCK_N)
    for _ in range(num_tiles):
        k_body = unpack_body(body, scales, verdict, BLOCK_N, D, GROUPS, FORMAT)
        k_tail = unpack_tail(tail, BLOCK_N, FORMAT)
        now = verdict
        if not SINGLE:
            # Entries three tiles ahead, blocks two, rows one: no load waits for another.
            n += BLOCK_N
            at, scale_at, is_key, wrong = locate(
                n, end, next_entry, next_block, place, ring, new, pool, num_blocks, num_slots,
                WINDOW, ROWS, NEW, POOL, PIECE,
            )  # fmt: skip
            body, tail, scales, verdict = read_rows(at, scale_at, is_key, wrong, D, GROUPS, FORMAT)
            next_block = look_up(third_entry, known, position, table_ptr, table_width, RATIO, ROWS, POOL)
            next_entry = third_entry
            third_entry = pick(n + 2 * BLOCK_N, end, token, selected_ptr, width, WINDOW, POOL, SELECTED)
        KEYS: tl.constexpr = 0 if SWAP else 1
        HEADS: tl.constexpr = 1 - KEYS
        if SWAP:
            s = tl.dot(k_tail, q_tail, input_precision=PRECISION)
            s += tl.dot(k_body, q_body, input_precision=PRECISION)
        else:
            s = tl.dot(q_tail, tl.trans(k_tail), input_precision=PRECISION)
            if SPREAD:
                k_groups = tl.permute(tl.reshape(k_body, (BLOCK_N, GROUPS, 64)), (1, 2, 0))
                s += tl.sum(tl.dot(q_groups, k_groups, input_precision=PRECISION), 0)
            else:
                s += tl.dot(q_body, tl.trans(k_body), input_precision=PRECISION)
        if FORMAT != PACKED:
            s += tl.expand_dims(now, HEADS)
        s *= scale_log2e
        higher = tl.maximum(top, tl.max(s, KEYS))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # nothing yet: exp2(-inf - shift) must be 0, not NaN
        fade = tl.exp2(top - shift)
        p = tl.exp2(s - tl.expand_dims(shift - RAISE, KEYS))
        top = higher
        before = total * fade
        fade = tl.expand_dims(fade, KEYS)
        weight = p.to(k_body.dtype)
        if SWAP:
            o_body = tl.dot(tl.trans(k_body), weight, o_body * fade, input_precision=PRECISION)
            o_tail = tl.dot(tl.trans(k_tail), weight, o_tail * fade, input_precision=PRECISION)
        else:
            o_body = tl.dot(weight, k_body, o_body * fade, input_precision=PRECISION)
            o_tail = tl.dot(weight, k_tail, o_tail * fade, input_precision=PRECISION)
        total = before + tl.sum(p, KEYS)  # after the products: it takes barriers
    if SWAP:
        o_body, o_tail = tl.trans(o_body), tl.trans(o_tail)

    is_body = is_head[:, None] & (c < BODY)[None, :]
    if SPLITS == 1:
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
        factor = tl.where(total == 0.0, 0.0, fade / total)[:, None]
        o_body, o_tail = o_body * factor, o_tail * factor
        if rotation_ptr is not None:
            turn = rotation_ptr + token * _TAIL + 2 * tl.arange(0, _TAIL // 2)
            o_tail = turn_back(o_tail, tl.load(turn)[None, :], tl.load(turn + 1)[None, :], BLOCK_H, _TAIL)
        row = token.to(tl.int64) * H + h
        to = out_ptr + row[:, None] * D
        tl.store(to + c[None, :], o_body.to(out_ptr.dtype.element_ty), mask=is_body)
        tl.store(to + BODY + tail_c[None, :], o_tail.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + row, (shift - RAISE + tl.log2(total)) * LN2, mask=is_head)
    else:
        factor = tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
        row = (token.to(tl.int64) * splits + split) * H + h
        to = part_ptr + row[:, None] * D
        tl.store(to + c[None, :], (o_body * factor).to(part_ptr.dtype.element_ty), mask=is_body)
        tl.store(to + BODY + tail_c[None, :], (o_tail * factor).to(part_ptr.dtype.element_ty), mask=is_head[:, None])
        tl.store(part_lse_ptr + row, top - RAISE + tl.log2(total), mask=is_head)
        if FUSED:
            # All threads have stored before one of them counts; the count releases their stores and acquires others'.
            tl.debug_barrier()
            counter = counter_ptr + token * tl.num_programs(2) + tl.program_id(2)
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(counter, 0)  # for the next launch
                _combine(
                    out_ptr, lse_ptr, part_ptr, part_lse_ptr, sink_ptr, rotation_ptr, token, h, splits,
                    H, D, BLOCK_H, SPLITS, min(SPLITS, 4),
                )  # fmt: skip
