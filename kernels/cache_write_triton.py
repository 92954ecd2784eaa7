"""The kernels of cache_write_decode.py: one launch that writes what a decode step stores, and the move from staging.

`cache_write_kernel` has one program for each (part, token): the compressors first, since theirs is the longest chain of
loads, then kv, then groups of the indexer's query heads, then of query heads. With several tokens a sequence, the
compressor's program of the first one follows the sequence and the others' end at once. Loads of what no recent kernel
writes come before the wait for the kernel ahead, and before any reduction, whose barrier they can't overtake.

What has no place (an entry without a block, a slot that doesn't exist) is not stored, wherever a number out of range
would lead, and the token's row of keys becomes NaN instead: nothing may wait for the host, so attention must notice.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.compress_decode import csa_keep, csa_pool, hca_add, hca_keep, hca_resume
from kernels.indexer_query_triton import store_queries
from kernels.row_store import (
    group_of,
    hadamard_pairs,
    load_rotation,
    norm_rope_pairs,
    scale_row_bytes,
    store_row,
    value_bytes,
)
from kernels.rows import Rows
from kernels.tiles import Tile, Variant, tiles_of


@triton.jit
def _store_entry(
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
def _block_of(entry, is_wanted, table_row, table_width, num_blocks, ROWS: tl.constexpr):
    """Return the block of an entry (int64), negative if the table or the pool lacks it, or if it is not wanted."""
    column = entry // ROWS
    block = tl.load(table_row + column, mask=is_wanted & (column < table_width), other=-1)
    return tl.where(block < num_blocks, block, -1).to(tl.int64)


@triton.jit
def _compress_one(
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
    unit = _block_of(entry, completes, table_row, table_width, num_blocks, ROWS)
    weight = tl.load(norm + tl.arange(0, D))
    cos, sin = load_rotation(rotation + token * ROPE, D, GROUP, ROPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (slot >= 0) & (slot < num_slots):
        if RATIO == 4:
            csa_keep(row, bias, state, position, D)
            if completes:
                pooled = csa_pool(row, stride, bias, state, position, position, D, True)
                _store_entry(
                    pooled, entry, unit, weight, cos, sin, eps, values, scales, unit_bytes,
                    ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
        else:
            top, total, weighted = hca_resume(state, position, D)
            top, total, weighted = hca_add(row, bias, top, total, weighted, position, D)
            if completes:
                _store_entry(
                    weighted / total, entry, unit, weight, cos, sin, eps, values, scales, unit_bytes,
                    ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
            else:
                hca_keep(state, top, total, weighted, D)


@triton.jit
def _compress_several(
    token, sequence, starts, query_start, slots, num_slots, table_row, table_width, num_blocks,
    new, stride, bias, norm, state, state_unit, rotation, eps, values, scales, unit_bytes,
    RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Move one compressor of a sequence on by all its tokens of the step, if `token` is the first of them."""
    start = tl.load(starts + sequence)
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    slot = tl.load(slots + sequence)
    state += slot.to(tl.int64) * state_unit
    weight = tl.load(norm + tl.arange(0, D))
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (token == first) & (slot >= 0) & (slot < num_slots):
        top, total, weighted = weight, weight, weight
        if RATIO == 128:
            top, total, weighted = hca_resume(state, start, D)
        i = tl.zeros((), tl.int32)
        while i < count:
            at = start + i
            row = new + (token + i).to(tl.int64) * stride
            entry = at // RATIO
            completes = (at + 1) % RATIO == 0
            if RATIO == 128:
                if at % 128 == 0:
                    top = tl.full((D,), -float("inf"), tl.float32)
                    total = tl.zeros((D,), tl.float32)
                    weighted = tl.zeros((D,), tl.float32)
                top, total, weighted = hca_add(row, bias, top, total, weighted, at, D)
            if completes:
                unit = _block_of(entry, completes, table_row, table_width, num_blocks, ROWS)
                cos, sin = load_rotation(rotation + (token + i) * ROPE, D, GROUP, ROPE)
                pooled = csa_pool(row, stride, bias, state, at, start, D, False) if RATIO == 4 else weighted / total
                _store_entry(
                    pooled, entry, unit, weight, cos, sin, eps, values, scales, unit_bytes,
                    ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
            if RATIO == 4:
                tl.debug_barrier()  # every thread has read the ring before any overwrites a row of it
                csa_keep(row, bias, state, at, D)
            i += 1
        if RATIO == 128:  # noqa: SIM102 (decided at compile time, the next one is not)
            if (start + count) % 128 != 0:
                hca_keep(state, top, total, weighted, D)


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


_UNALIGNED = ("window", "window_scales", "pool", "pool_scales", "keys", "key_scales")
_UNSPECIALIZED = ("table_width", "num_blocks", "num_slots", "heads")


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def cache_write_kernel(
    positions, sequence, starts, query_start, slots, block_table, table_width, num_blocks, num_slots, eps,
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
    QUERIES: tl.constexpr, BLOCK_H: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (part, token); parts: main compressor, index compressor, kv, then blocks of the indexer's heads, then of
    heads, as far as there are any."""
    READY: tl.constexpr = (INDEX_HEADS + INDEX_BLOCK - 1) // INDEX_BLOCK
    MAIN: tl.constexpr = 1 if RATIO > 0 else 0
    INDEX: tl.constexpr = 1 if INDEX_D > 0 else 0
    part = tl.program_id(0)
    token = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.load(sequence + token)
    position = tl.load(positions + token)
    if part < MAIN + INDEX:
        if seq >= 0:
            table_row = block_table + seq.to(tl.int64) * table_width
            if part < MAIN:
                if RATIO > 0:
                    if SINGLE:
                        _compress_one(
                            token, seq, position, slots, num_slots, table_row, table_width, num_blocks,
                            main, main_stride, main_bias, main_norm, main_state, main_state_unit, entry_rotation, eps,
                            pool, pool_scales, pool_unit,
                            RATIO, POOL_ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, False, PDL,
                        )  # fmt: skip
                    else:
                        _compress_several(
                            token, seq, starts, query_start, slots, num_slots, table_row, table_width,
                            num_blocks,
                            main, main_stride, main_bias, main_norm, main_state, main_state_unit, entry_rotation, eps,
                            pool, pool_scales, pool_unit,
                            RATIO, POOL_ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, False, PDL,
                        )  # fmt: skip
            else:
                if INDEX_D > 0:
                    if SINGLE:
                        _compress_one(
                            token, seq, position, slots, num_slots, table_row, table_width, num_blocks,
                            index, index_stride, index_bias, index_norm, index_state, index_state_unit, entry_rotation,
                            eps, keys, key_scales, key_unit,
                            RATIO, POOL_ROWS, INDEX_D, ROPE, INDEX_FORMAT, INDEX_GROUP, INDEX_BYTES, INDEX_SCALE_BYTES,
                            HADAMARD, PDL,
                        )  # fmt: skip
                    else:
                        _compress_several(
                            token, seq, starts, query_start, slots, num_slots, table_row, table_width,
                            num_blocks,
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
                block = _block_of(position // RATIO, completes, table_row, table_width, num_blocks, POOL_ROWS)
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


@triton.jit(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["source", "source_scales", "window", "window_scales"],
)
def commit_window_kernel(
    positions, sequence, slots, num_slots, source, source_scales, source_unit, window, window_scales, window_unit,
    WINDOW: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token: copy its staging row to the ring."""
    token = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.load(sequence + token)
    slot = tl.load(slots + tl.maximum(seq, 0))
    if (seq >= 0) & (slot >= 0) & (slot < num_slots):
        row = tl.load(positions + token) % WINDOW
        base = slot.to(tl.int64) * window_unit
        at = token.to(tl.int64) * source_unit
        word = tl.arange(0, BLOCK)
        inside = word < ROW_BYTES // 4
        old = (source + at).to(tl.pointer_type(tl.int32), bitcast=True)
        new = (window + base + row * ROW_BYTES).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(new + word, tl.load(old + word, mask=inside), mask=inside)
        if SCALE_BYTES > 0:
            byte = tl.arange(0, SCALE_BYTES)
            scale = tl.load(source_scales + at + byte)
            tl.store(window_scales + base + row * SCALE_BYTES + byte, scale)


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
        "QUERIES": queries, "BLOCK_H": tile.constants["BLOCK_H"], "SINGLE": single, "PDL": pdl,
    }  # fmt: skip


HADAMARD_HEADS = 8

_SIGNATURE = {
    "positions": "*i32", "sequence": "*i32", "starts": "*i32", "query_start": "*i32", "slots": "*i32",
    "block_table": "*i32", "table_width": "i32", "num_blocks": "i32", "num_slots": "i32", "eps": "fp32",
    "q": "*bf16", "q_stride": "i32", "q_out": "*bf16", "q_out_stride": "i32", "heads": "i32",
    "kv": "*bf16", "kv_stride": "i32", "kv_norm": "*fp32", "rotation": "*fp32",
    "window": "*u8", "window_scales": "*u8", "window_unit": "i32",
    "main": "*fp32", "main_stride": "i32", "main_bias": "*fp32", "main_norm": "*fp32", "main_state": "*fp32",
    "main_state_unit": "i32", "pool": "*u8", "pool_scales": "*u8", "pool_unit": "i32",
    "index": "*fp32", "index_stride": "i32", "index_bias": "*fp32", "index_norm": "*fp32", "index_state": "*fp32",
    "index_state_unit": "i32", "keys": "*u8", "key_scales": "*u8", "key_unit": "i32", "entry_rotation": "*fp32",
    "index_q": "*bf16", "index_q_stride": "i32", "index_weight": "*fp32", "index_weight_stride": "i32",
    "index_scale": "fp32", "ready": "*i16", "ready_weight": "*fp32",
}  # fmt: skip
_MAIN = ("main", "main_bias", "main_norm", "main_state", "pool", "pool_scales")
_INDEX = ("index", "index_bias", "index_norm", "index_state", "keys", "key_scales")
_READY = ("index_q", "index_weight", "ready", "ready_weight")


# Kind of layer, its ratio, rows of index keys.
_KINDS: dict[str, tuple[int, str | None]] = {
    "window": (0, None), "csa fp8": (4, "fp8_index"), "csa fp4": (4, "fp4_index"), "hca": (128, None),
}  # fmt: skip
_RARE = "csa fp4"  # with several tokens a sequence


def variants(arch: str) -> list[Variant]:
    """Return what is shipped of cache_write and commit_window: packed rows of the model's head size."""
    several = [name for name in _KINDS if name != _RARE]
    return [*_variants(arch, list(_KINDS), single=True), *_variants(arch, several, single=False), _commit_variant()]


def rare_variants(arch: str) -> list[Variant]:
    """Return those of several tokens a sequence with FP4 index keys."""
    return _variants(arch, [_RARE], single=False)


def _variants(arch: str, names: Sequence[str], *, single: bool) -> list[Variant]:
    return [_variant(name, *_KINDS[name], tile, single) for name in names for tile in tiles_of("cache_write", arch)]


def _variant(name: str, ratio: int, index: str | None, tile: Tile, single: bool) -> Variant:
    keys = None if index is None else Rows(index, 128, torch.empty(0))
    values = constants_of(
        "packed", 512, 64, ratio, tile, rows=128, pool_rows=256 // ratio if ratio else 0, index=keys,
        hadamard=index == "fp4_index", staged=not single, index_heads=64 if index else 0, queries=True, single=single,
        pdl=True,
    )  # fmt: skip
    left_out = [*(() if ratio else (*_MAIN, "entry_rotation")), *(() if index else (*_INDEX, *_READY))]
    signature = _SIGNATURE | {"ready": "*fp16" if index == "fp4_index" else "*i16"}
    return Variant(
        op=f"cache_write {name}{'' if single else ', several tokens'}",
        kernel=cache_write_kernel,
        signature={arg: kind for arg, kind in signature.items() if arg not in left_out},
        constants={**values, **dict.fromkeys(left_out)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        tensor_ops=(),
        unaligned=tuple(arg for arg in (*_UNALIGNED, *_UNSPECIALIZED) if arg not in left_out),
    )


def _commit_variant() -> Variant:
    rows, scales = value_bytes("packed", 512), scale_row_bytes("packed", 512)
    pointers = ("source", "source_scales", "window", "window_scales")
    return Variant(
        op="commit_window",
        kernel=commit_window_kernel,
        signature={
            **dict.fromkeys(("positions", "sequence", "slots"), "*i32"), **dict.fromkeys(pointers, "*u8"),
            "num_slots": "i32", "source_unit": "i32", "window_unit": "i32",
        },
        constants={
            "WINDOW": 128, "ROW_BYTES": rows, "SCALE_BYTES": scales, "BLOCK": triton.next_power_of_2(rows // 4),
            "PDL": True,
        },
        num_warps=4,
        num_stages=1,
        tensor_ops=(),
        bytes_per_program=2 * (rows + scales),
        unaligned=(*pointers, "num_slots"),
    )  # fmt: skip
