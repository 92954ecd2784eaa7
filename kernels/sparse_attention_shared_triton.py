"""The kernel of sparse_attention_decode.py for steps of many tokens whose keys are alike: windows, and all entries.

One program takes BLOCK_T tokens of a sequence, BLOCK_H heads each: R = BLOCK_T x BLOCK_H rows of queries, and all keys
that any of them sees, BLOCK_N at a time, unpacked once. It gives one half of the channels: registers hold no more, and
what two programs do twice, scores, two warp groups of one would, too. A key that a row doesn't see has weight 0 there,
which does not silence a NaN: a row that holds one is taken for zeros and gives scores of NaN.

Sequence s, whose first token is f, has the programs from f // BLOCK_T + s on: enough for it whatever its length, known
without a sum over sequences, and some with nothing to do. What follows the last sequence, padding, counts as one more.

Windows are read in tiles that begin at multiples of BLOCK_N, entries in tiles from 0: bits of a token depend neither
on where a chunk begins nor on what else is in the batch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.key_tile import anew, has_nan, is_beyond_f16, load_queries, read_codes, read_tail, settle, unpack_keys
from kernels.row_load import look_up
from kernels.rows import ROPE_CHANNELS
from kernels.sparse_attention_triton import LN2, LOG2E, RAISE, turn_back

# Never turned into constants or hints, so that one binary serves every batch and pool.
INTEGERS = [
    *("stride_ring_u", "stride_ring_r", "stride_ring_su", "stride_new_u", "stride_new_su"),
    *("stride_pool_u", "stride_pool_r", "stride_pool_su"),
    *("tokens", "sequences", "table_width", "num_blocks", "num_slots"),
]

_TAIL = tl.constexpr(ROPE_CHANNELS)


@triton.jit
def _entry(tile, window_tiles, count, N: tl.constexpr):
    """Return the entries [N] of a tile of keys, -1 for none."""
    n = (tile - window_tiles) * N + tl.arange(0, N)
    return tl.where((n >= 0) & (n < count), n, -1)


@triton.jit
def _locate(
    tile, run, entry, block, ring, new, pool, num_blocks,
    N: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Return where the keys of a tile lie, as row_load.locate does: row pointers, scale pointers, is_key, wrong."""
    base, lowest, last, window_tiles, start, safe = run
    values, scales, stride_r = ring
    new_values, new_scales, stride_n, stride_sn = new
    x = base + tile * N + tl.arange(0, N)
    is_key = (x >= lowest) & (x <= tl.where(tile < window_tiles, last, -1))
    is_new = x >= start
    at = tl.where(is_new, new_values + x.to(tl.int64) * stride_n * 4, values + x % WINDOW * stride_r * 4)
    scale_at = tl.where(is_new, new_scales + x.to(tl.int64) * stride_sn, scales + x % WINDOW)
    wrong = is_key & (x < safe)
    if POOL:
        values, scales, stride_u, stride_r, stride_su = pool
        is_entry = entry >= 0
        row = entry % ROWS
        at = tl.where(is_entry, values + (block.to(tl.int64) * stride_u + row * stride_r) * 4, at)
        scale_at = tl.where(is_entry, scales + (block.to(tl.int64) * stride_su + row), scale_at)
        is_key = is_key | is_entry
        wrong = wrong | (is_entry & ((block < 0) | (block >= num_blocks)))
    return at, scale_at, is_key, wrong


@triton.jit(do_not_specialize=INTEGERS)
def shared_kernel(
    q_ptr, out_ptr, lse_ptr, sink_ptr, rotation_ptr,
    positions_ptr, sequence_ptr, starts_ptr, query_start_ptr, slots_ptr, table_ptr,
    ring_ptr, ring_scale_ptr, new_ptr, new_scale_ptr, pool_ptr, pool_scale_ptr,
    stride_ring_u, stride_ring_r, stride_ring_su, stride_new_u, stride_new_su, stride_pool_u, stride_pool_r,
    stride_pool_su, scale_log2e, tokens, sequences, table_width, num_blocks, num_slots,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: half the channels of BLOCK_T tokens, BLOCK_H heads. Grid (2, blocks of tokens, blocks of heads)."""
    R: tl.constexpr = BLOCK_T * BLOCK_H
    POOL: tl.constexpr = pool_ptr is not None
    G: tl.constexpr = D // 128
    first_g, program = tl.program_id(0) * G, tl.program_id(1)
    # Written before the step began, so not waited for.
    sequence, above = 0, sequences + 1
    while sequence + 1 < above:
        middle = (sequence + above) // 2
        is_there = tl.load(query_start_ptr + middle) // BLOCK_T + middle <= program
        sequence, above = tl.where(is_there, middle, sequence), tl.where(is_there, above, middle)
    first = tl.load(query_start_ptr + sequence)
    behind = tl.load(query_start_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
    begin = first + (program - first // BLOCK_T - sequence) * BLOCK_T
    known = tl.minimum(sequence, sequences - 1)
    start, slot = tl.load(starts_ptr + known), tl.load(slots_ptr + known)
    r = tl.arange(0, R)
    t = begin + r // BLOCK_H
    h = tl.program_id(2) * BLOCK_H + r % BLOCK_H
    own_sequence = tl.load(sequence_ptr + t, mask=t < behind, other=-1)
    sees_any = (own_sequence == sequence) & (h < H)
    row_position = tl.load(positions_ptr + t, mask=sees_any, other=-1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    row = t.to(tl.int64) * H + h
    q = load_queries(q_ptr + row * D + first_g * 64, sees_any, R, G * 64)
    q_others = load_queries(q_ptr + row * D + (G - first_g) * 64, sees_any, R, G * 64)
    # Where position 0 of the ring is, and where it were among the new rows.
    before = (first - start).to(tl.int64)
    ring_ptr += slot.to(tl.int64) * stride_ring_u * 4
    ring_scale_ptr += slot.to(tl.int64) * stride_ring_su
    ring = (ring_ptr, ring_scale_ptr, stride_ring_r)
    new = (new_ptr + before * stride_new_u * 4, new_scale_ptr + before * stride_new_su, stride_new_u, stride_new_su)
    # The first position whose row is there.
    safe = tl.where((slot < 0) | (slot >= num_slots), start, 0)
    pool = (pool_ptr, pool_scale_ptr, stride_pool_u, stride_pool_r, stride_pool_su)
    position, last = start + begin - first, tl.max(row_position, 0)
    lowest = tl.maximum(position - (WINDOW - 1), 0)
    base = lowest // BLOCK_N * BLOCK_N
    window_tiles = tl.cdiv(last + 1 - base, BLOCK_N)
    count = (last + 1) // RATIO if POOL else 0
    tiles = tl.where(last < 0, 0, window_tiles + tl.cdiv(count, BLOCK_N))
    run = (base, lowest, last, window_tiles, start, safe)
    own = new_ptr + tl.minimum(begin, tokens - 1).to(tl.int64) * stride_new_u * 4
    entry = _entry(0, window_tiles, count, BLOCK_N)
    block = look_up(entry, known, last, table_ptr, table_width, RATIO, ROWS, POOL)
    at, scale_at, is_key, wrong = _locate(
        0, run, entry, block, ring, new, pool, num_blocks, BLOCK_N, WINDOW, ROWS, POOL
    )  # fmt: skip
    at, scales, wrong = settle(at, scale_at, is_key, wrong, own, D)
    mine, others, tail = read_codes(at, first_g, G, D), read_codes(at, G - first_g, G, D), read_tail(at, D)
    next_entry = _entry(1, window_tiles, count, BLOCK_N)
    next_block = look_up(next_entry, known, last, table_ptr, table_width, RATIO, ROWS, POOL)
    top = tl.full((R,), -float("inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    o = tl.zeros((R, G * 64), tl.float32)
    once = tl.full((), 1, tl.int32)
    while once > 0:  # as in sparse_attention_token_triton.py, for q
        for tile in range(tiles):
            spoilt = wrong | has_nan(mine) | has_nan(others) | is_beyond_f16(tail)
            whole = tl.where(spoilt, 0, -1)[:, None, None]
            mine, others, tail, scales = mine & whole, others & whole, tail & whole, tl.where(spoilt, 0, scales)
            k = unpack_keys(mine, tail, scales, first_g, BLOCK_N, G, D)
            k_others = unpack_keys(others, tail, scales, G - first_g, BLOCK_N, G, D)
            s = tl.dot(q_others, tl.trans(k_others))
            s = tl.dot(q, tl.trans(k), s)
            # The last position of what a key stands for, and how far back a token sees.
            in_window = tile < window_tiles
            x = tl.where(in_window, base + tile * BLOCK_N, (tile - window_tiles) * BLOCK_N) + tl.arange(0, BLOCK_N)
            reach = tl.where(in_window, WINDOW, 1 << 30)
            if POOL:
                x = tl.where(in_window, x, x * RATIO + (RATIO - 1))
            sees = (x[None, :] <= row_position[:, None]) & (x[None, :] > (row_position - reach)[:, None])
            s = tl.where(sees, s * scale_log2e + tl.where(spoilt, float("nan"), 0.0)[None, :], -float("inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            shift = tl.where(higher == -float("inf"), 0.0, higher)  # nothing yet: weights must be 0, not NaN
            fade = tl.exp2(top - shift)
            p = tl.exp2(s - (shift - RAISE)[:, None])
            top = higher
            total = total * fade + tl.sum(p, 1)
            weight = p.to(tl.float16)
            # Blocks two tiles ahead, rows one: no load waits for another.
            at, scale_at, is_key, wrong = _locate(
                tile + 1, run, _entry(tile + 1, window_tiles, count, BLOCK_N), next_block, ring, new, pool,
                num_blocks, BLOCK_N, WINDOW, ROWS, POOL,
            )  # fmt: skip
            at, scales, wrong = settle(at, scale_at, is_key, wrong, own, D)
            mine, others, tail = read_codes(at, first_g, G, D), read_codes(at, G - first_g, G, D), read_tail(at, D)
            next_entry = _entry(tile + 2, window_tiles, count, BLOCK_N)
            next_block = look_up(next_entry, known, last, table_ptr, table_width, RATIO, ROWS, POOL)
            o = tl.dot(weight, k, o * fade[:, None])
        q = tl.zeros((R, G * 64), tl.float16)
        q_others = tl.zeros((R, G * 64), tl.float16)
        once = tl.full((), 0, tl.int32)

    t, h = anew(begin) + r // BLOCK_H, anew(tl.program_id(2)) * BLOCK_H + r % BLOCK_H
    is_row = (t < behind) & (h < H)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h, mask=h < H, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
    else:
        higher = top
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    fade = tl.exp2(top - shift)
    total *= fade
    if sink_ptr is not None:
        total += tl.exp2(sink - shift + RAISE)
    o *= tl.where(total == 0.0, 0.0, fade / total)[:, None]
    row = t.to(tl.int64) * H + h
    to = out_ptr + (row * D + first_g * 64)[:, None]
    for _ in tl.static_range(4):
        if o.shape[1] > _TAIL:
            low, o = tl.split(tl.permute(tl.reshape(o, (R, 2, o.shape[1] // 2)), (0, 2, 1)))
            tl.store(to + tl.arange(0, low.shape[1])[None, :], low.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
            to += low.shape[1]
    if rotation_ptr is not None:
        turn = rotation_ptr + t[:, None] * _TAIL + 2 * tl.arange(0, _TAIL // 2)[None, :]
        is_turned = is_row[:, None] & (first_g == G)
        cos = tl.load(turn, mask=is_turned, other=1.0)
        o = turn_back(o, cos, tl.load(turn + 1, mask=is_turned, other=0.0), R, _TAIL)
    tl.store(to + tl.arange(0, _TAIL)[None, :], o.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (shift - RAISE + tl.log2(total)) * LN2, mask=is_row & (first_g == 0))
