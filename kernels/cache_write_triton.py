"""The kernel of cache_write_decode.py: one launch that writes what a step stores.

It has one program for each (part, token): the compressors first, since theirs is the longest chain of loads, then kv,
then groups of the indexer's query heads, then of query heads. With several tokens a sequence a compressor's program has
a few tokens, of which few have work for it (cache_write_entries_triton.py). Loads of what no recent kernel writes come
before the wait for the kernel ahead, and before any reduction, whose barrier they can't overtake.

What has no place (an entry without a block, a slot that doesn't exist) is not stored, wherever a number out of range
would lead, and the token's row of keys becomes NaN instead: nothing may wait for the host, so attention must notice.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.cache_write_entries_triton import block_of, compress_one, compress_several
from kernels.compress import CSA_RATIO, HCA_RATIO
from kernels.indexer_query_triton import store_queries
from kernels.row_store import group_of, load_rotation, norm_rope_pairs, scale_row_bytes, store_row, value_bytes
from kernels.rows import Rows
from kernels.tiles import Tile


@triton.jit
def _turn_queries(
    token, first, is_padding, q, q_stride, out, out_stride, heads, rotation, eps,
    D: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and turn BLOCK_H heads of one token from `first` on; zeros for padding."""
    h = first + tl.arange(0, BLOCK_H)[:, None]
    at = h * D + tl.arange(0, D)[None, :]
    turned = tl.arange(0, D // 2) >= (D - ROPE) // 2
    cos, sin = load_rotation(rotation, D, D, ROPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(q + token.to(tl.int64) * q_stride + at, mask=(h < heads) & (not is_padding), other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    e, o = tl.split(tl.reshape(x, (BLOCK_H, D // 2, 2)))
    e, o = tl.where(turned[None, :], e * cos - o * sin, e), tl.where(turned[None, :], o * cos + e * sin, o)
    y = tl.reshape(tl.join(e, o), (BLOCK_H, D)).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * out_stride + at, y, mask=h < heads)


@triton.jit
def _ready_index_queries(
    token, first, is_padding, q, q_stride, weight, weight_stride, scale, out, out_weight, rotation,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, IS_FP8: tl.constexpr, HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make BLOCK heads of the indexer's queries ready, of one token from `first` on; zeros for padding."""
    h = first + tl.arange(0, BLOCK)
    used = (h < HEADS) & (not is_padding)
    cos, sin = load_rotation(rotation, D, D, ROPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = q + token.to(tl.int64) * q_stride + h[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    factor = tl.load(weight + token.to(tl.int64) * weight_stride + h, mask=used, other=0.0).to(tl.float32)
    store_queries(
        x, factor, used, token, h, cos, sin, scale, out, out_weight, HEADS, D, ROPE, IS_FP8, HADAMARD, BLOCK
    )  # fmt: skip


UNALIGNED = ("window", "window_scales", "pool", "pool_scales", "keys", "key_scales")
UNSPECIALIZED = ("tokens", "table_width", "num_blocks", "num_slots", "heads")


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def cache_write_kernel(
    tokens, positions, sequence, starts, query_start, slots, block_table, table_width, num_blocks, num_slots, eps,
    q, q_stride, q_out, q_out_stride, heads,
    kv, kv_stride, kv_norm, rotation, window, window_scales, window_unit,
    main, main_stride, main_bias, main_norm, main_state, main_state_unit, pool, pool_scales, pool_unit,
    index, index_stride, index_bias, index_norm, index_state, index_state_unit, keys, key_scales, key_unit,
    entry_rotation, index_q, index_q_stride, index_weight, index_weight_stride, index_scale, ready, ready_weight,
    D: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr, STAGED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    RATIO: tl.constexpr, POOL_ROWS: tl.constexpr,
    INDEX_D: tl.constexpr, INDEX_FORMAT: tl.constexpr, INDEX_GROUP: tl.constexpr, INDEX_BYTES: tl.constexpr,
    INDEX_SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr, INDEX_HEADS: tl.constexpr, INDEX_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_H: tl.constexpr, SINGLE: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (part, token); parts: main compressor, index compressor, kv, then blocks of the indexer's heads, then of
    heads, as far as there are any. Not SINGLE: in one row, by part; compressors have TOKENS tokens each."""
    READY: tl.constexpr = (INDEX_HEADS + INDEX_BLOCK - 1) // INDEX_BLOCK
    MAIN: tl.constexpr = 1 if RATIO > 0 else 0
    INDEX: tl.constexpr = 1 if INDEX_D > 0 else 0
    part = tl.program_id(0)
    token = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if not SINGLE:
        groups = tl.cdiv(tokens, TOKENS)
        place = part - groups * (MAIN + INDEX)
        if place < 0:
            token = part % groups  # of the groups
            part = part // groups
        else:
            token = place % tokens
            part = MAIN + INDEX + place // tokens
    seq = tl.load(sequence + token)
    position = tl.load(positions + token)
    if part < MAIN + INDEX:
        if not SINGLE:
            if part < MAIN:
                if RATIO > 0:
                    compress_several(
                        token, tokens, positions, sequence, starts, query_start, slots, num_slots, block_table,
                        table_width, num_blocks,
                        main, main_stride, main_bias, main_norm, main_state, main_state_unit, entry_rotation, eps,
                        pool, pool_scales, pool_unit,
                        RATIO, POOL_ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, False, TOKENS, AT_ONCE, PDL,
                    )  # fmt: skip
            else:
                if INDEX_D > 0:
                    compress_several(
                        token, tokens, positions, sequence, starts, query_start, slots, num_slots, block_table,
                        table_width, num_blocks,
                        index, index_stride, index_bias, index_norm, index_state, index_state_unit, entry_rotation,
                        eps, keys, key_scales, key_unit,
                        RATIO, POOL_ROWS, INDEX_D, ROPE, INDEX_FORMAT, INDEX_GROUP, INDEX_BYTES, INDEX_SCALE_BYTES,
                        HADAMARD, TOKENS, AT_ONCE, PDL,
                    )  # fmt: skip
        elif seq >= 0:
            table_row = block_table + seq.to(tl.int64) * table_width
            if part < MAIN:
                if RATIO > 0:
                    compress_one(
                        token, seq, position, slots, num_slots, table_row, table_width, num_blocks,
                        main, main_stride, main_bias, main_norm, main_state, main_state_unit, entry_rotation, eps,
                        pool, pool_scales, pool_unit,
                        RATIO, POOL_ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, False, PDL,
                    )  # fmt: skip
            else:
                if INDEX_D > 0:
                    compress_one(
                        token, seq, position, slots, num_slots, table_row, table_width, num_blocks,
                        index, index_stride, index_bias, index_norm, index_state, index_state_unit, entry_rotation,
                        eps, keys, key_scales, key_unit,
                        RATIO, POOL_ROWS, INDEX_D, ROPE, INDEX_FORMAT, INDEX_GROUP, INDEX_BYTES, INDEX_SCALE_BYTES,
                        HADAMARD, PDL,
                    )  # fmt: skip
        elif PDL:
            tl.extra.cuda.gdc_wait()  # or a later kernel could overtake an earlier one when all is padding
    elif part == MAIN + INDEX:
        if seq >= 0:
            weight = tl.load(kv_norm + tl.arange(0, D))
            cos, sin = load_rotation(rotation + token * ROPE, D, GROUP, ROPE)
            slot = tl.load(slots + seq)
            has_slot = (slot >= 0) & (slot < num_slots)
            is_lost = has_slot == 0
            if RATIO > 0:
                table_row = block_table + seq.to(tl.int64) * table_width
                completes = (position + 1) % RATIO == 0
                block = block_of(position // RATIO, completes, table_row, table_width, num_blocks, POOL_ROWS)
                is_lost = is_lost | (completes & (block < 0))
            unit = token.to(tl.int64)
            row = 0
            is_stored = seq >= 0
            if not STAGED:
                unit = slot.to(tl.int64)
                row = position % WINDOW
                is_stored = has_slot
            if PDL:
                tl.extra.cuda.gdc_wait()
            x = tl.load(kv + token.to(tl.int64) * kv_stride + tl.arange(0, D)).to(tl.float32)
            e, o = norm_rope_pairs(x, weight, cos, sin, eps, D, GROUP, ROPE)
            e, o = tl.where(is_lost, float("nan"), e), tl.where(is_lost, float("nan"), o)
            base = unit * window_unit
            if is_stored:
                store_row(
                    e, o, window + base + row * ROW_BYTES, window_scales + base + row * SCALE_BYTES, FORMAT, D, GROUP
                )
        elif PDL:
            tl.extra.cuda.gdc_wait()
    elif part < MAIN + INDEX + 1 + READY:
        if INDEX_HEADS > 0:
            _ready_index_queries(
                token, (part - MAIN - INDEX - 1) * INDEX_BLOCK, seq < 0, index_q, index_q_stride, index_weight,
                index_weight_stride, index_scale, ready, ready_weight, rotation + token * ROPE,
                INDEX_HEADS, INDEX_D, ROPE, INDEX_FORMAT == "fp8_index", HADAMARD, INDEX_BLOCK, PDL,
            )  # fmt: skip
    else:
        if QUERIES:
            first = (part - MAIN - INDEX - 1 - READY) * BLOCK_H
            _turn_queries(
                token, first, seq < 0, q, q_stride, q_out, q_out_stride, heads, rotation + token * ROPE, eps,
                D, ROPE, BLOCK_H, PDL,
            )  # fmt: skip


def constants_of(
    fmt: str, dim: int, rope: int, ratio: int, tile: Tile, *, rows: int, pool_rows: int, index: Rows | None,
    hadamard: bool, staged: bool, index_heads: int, queries: bool, single: bool, pdl: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return every constexpr of cache_write_kernel. index_heads: of the indexer's queries, 0 if they are not given."""
    # The transform adds: one cut for all, or a token's bits would follow from the number of tokens.
    index_block = HADAMARD_HEADS if hadamard else tile.constants["INDEX_H"]
    return {
        "D": dim, "ROPE": rope, "WINDOW": rows, "STAGED": staged,
        "FORMAT": fmt, "GROUP": group_of(fmt, dim), "ROW_BYTES": value_bytes(fmt, dim),
        "SCALE_BYTES": scale_row_bytes(fmt, dim),
        "RATIO": ratio, "POOL_ROWS": pool_rows,
        "INDEX_D": 0 if index is None else index.width, "INDEX_FORMAT": None if index is None else index.format,
        "INDEX_GROUP": 0 if index is None else group_of(index.format, index.width),
        "INDEX_BYTES": 0 if index is None else value_bytes(index.format, index.width),
        "INDEX_SCALE_BYTES": 0 if index is None else scale_row_bytes(index.format, index.width),
        "HADAMARD": hadamard, "INDEX_HEADS": index_heads, "INDEX_BLOCK": index_block if index_heads else 1,
        "QUERIES": queries, "BLOCK_H": tile.constants["BLOCK_H"], "SINGLE": single,
        "TOKENS": 0 if single else group_tokens(ratio), "AT_ONCE": 0 if single else tile.constants["AT_ONCE"],
        "PDL": pdl,
    }  # fmt: skip


def group_tokens(ratio: int) -> int:
    """Return how many tokens a compressor's program has, with several tokens a sequence: few complete an entry."""
    return 16 if ratio == HCA_RATIO else CSA_RATIO


HADAMARD_HEADS = 8
