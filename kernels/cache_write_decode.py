"""What a decode step stores in one layer's cache, and its queries, in one launch.

    q   = rope(rms(q))                                  each head by itself, no weight; bfloat16, may be in place
    kv  = rope(rms(kv) * w), rounded to the window's format, into the ring at position mod W, or into a staging row
    K|G of the compressors (kernels/compress.py) move their state on; an entry that a token completes is pooled, then
        rope(rms(entry) * w) at the entry's first position, times the Hadamard matrix if asked, rounded, into its block

One program for each (part, token): the compressors first, since theirs is the longest chain of loads, then kv, then
groups of query heads. With several tokens a sequence, the compressor's program of the first one follows the sequence
and the others' end at once. A window row may go straight into the ring only with one token a sequence: it overwrites
the row that has just left the window. With more it goes to `staging` (unit = token), which attention reads, and
`commit_window` moves it to the ring afterwards.

A token of sequence -1 is padding: it writes no cache and its queries are 0. An entry whose block the table lacks (-1)
is dropped: whoever packs the batch has checked the tables.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cache_write import write_entries_reference, write_window_reference
from kernels.compress import CSA_RATIO, HCA_RATIO, compress_csa_reference, compress_hca_reference
from kernels.compress_decode import csa_keep, csa_pool, hca_add, hca_keep, hca_resume
from kernels.norm_rope import rms_norm_reference, rope_reference
from kernels.quant import hadamard
from kernels.ragged import DecodeBatch, RaggedBatch
from kernels.row_store import (
    group_of,
    hadamard_pairs,
    norm_rope_pairs,
    row_args,
    scale_row_bytes,
    store_row,
    value_bytes,
)
from kernels.rows import Rows
from kernels.tiles import Tile, Variant, tile_for, tiles_of
from kernels.triton_env import HAS_PDL, arch_of, uses_triton

HADAMARD_CHANNELS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Pooling:
    """One compressor of a layer: what it adds in this step, and where it lives.

    projected: [T, 2W] float32 or bfloat16, K then G without the bias; W is 2D at ratio 4, D at 128.   bias: [ratio, W].
    norm: [D].   state: fp32 rows of W.   pool: rows of D.   hadamard: rotate entries before rounding (D = 128 only).
    """

    projected: Tensor
    bias: Tensor
    norm: Tensor
    state: Rows
    pool: Rows
    hadamard: bool = False


@triton.jit
def _store_entry(
    pooled, position, sequence, block_table, table_stride, norm, rotation, eps, values, scales, unit_bytes,
    RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Norm, rope and store an entry [D]. norm: [D] values, loaded early."""
    entry = position // RATIO
    unit = tl.load(block_table + sequence * table_stride + entry // ROWS).to(tl.int64)
    e, o = norm_rope_pairs(pooled, norm, rotation, eps, D, GROUP, ROPE)
    if HADAMARD:
        e, o = hadamard_pairs(e, o, GROUP)
    if unit >= 0:
        base = unit * unit_bytes
        row = entry % ROWS
        store_row(e, o, values + base + row * ROW_BYTES, scales + base + row * SCALE_BYTES, FORMAT, D, GROUP)


@triton.jit
def _compress(
    token, sequence, position, starts, query_start, slots, block_table, table_stride,
    new, stride, bias, norm, state, state_unit, rotation, eps, values, scales, unit_bytes,
    RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr,
    SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Move one compressor of one sequence on, if `token` is the sequence's first of the step."""
    weight = tl.load(norm + tl.arange(0, D))
    state += tl.load(slots + sequence).to(tl.int64) * state_unit
    start = position
    count = 1
    is_first = True
    if not SINGLE:
        start = tl.load(starts + sequence)
        first = tl.load(query_start + sequence)
        count = tl.load(query_start + sequence + 1) - first
        is_first = token == first
    if PDL:
        tl.extra.cuda.gdc_wait()
    if SINGLE:
        row = new + token.to(tl.int64) * stride
        angles = rotation + token * ROPE
        if RATIO == 4:
            if position % 4 == 3:
                pooled = csa_pool(row, stride, bias, state, position, start, D, SINGLE)
                _store_entry(
                    pooled, position, sequence, block_table, table_stride, weight, angles, eps, values, scales,
                    unit_bytes, RATIO, ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
            csa_keep(row, bias, state, position, D)
        else:
            top, total, weighted = hca_resume(state, position, D)
            top, total, weighted = hca_add(row, bias, top, total, weighted, position, D)
            if position % 128 == 127:
                _store_entry(
                    weighted / total, position, sequence, block_table, table_stride, weight, angles, eps, values,
                    scales, unit_bytes, RATIO, ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                )  # fmt: skip
            else:
                hca_keep(state, top, total, weighted, D)
    elif is_first:
        if RATIO == 4:
            for i in range(count):
                at = start + i
                row = new + (token + i).to(tl.int64) * stride
                if at % 4 == 3:
                    pooled = csa_pool(row, stride, bias, state, at, start, D, SINGLE)
                    _store_entry(
                        pooled, at, sequence, block_table, table_stride, weight, rotation + (token + i) * ROPE, eps,
                        values, scales, unit_bytes, RATIO, ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES,
                        HADAMARD,
                    )  # fmt: skip
                tl.debug_barrier()  # every thread has read the ring before any overwrites a row of it
                csa_keep(row, bias, state, at, D)
        else:
            top, total, weighted = hca_resume(state, start, D)
            for i in range(count):
                at = start + i
                row = new + (token + i).to(tl.int64) * stride
                if at % 128 == 0:
                    top = tl.full((D,), -float("inf"), tl.float32)
                    total = tl.zeros((D,), tl.float32)
                    weighted = tl.zeros((D,), tl.float32)
                top, total, weighted = hca_add(row, bias, top, total, weighted, at, D)
                if at % 128 == 127:
                    _store_entry(
                        weighted / total, at, sequence, block_table, table_stride, weight,
                        rotation + (token + i) * ROPE, eps, values, scales, unit_bytes, RATIO, ROWS, D, ROPE, FORMAT,
                        GROUP, ROW_BYTES, SCALE_BYTES, HADAMARD,
                    )  # fmt: skip
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
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(q + token.to(tl.int64) * q_stride + at, mask=(h < heads) & (not is_padding), other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    e, o = tl.split(tl.reshape(x, (BLOCK_H, D // 2, 2)))
    pair = tl.arange(0, D // 2) - (D - ROPE) // 2
    turned = pair >= 0
    cos = tl.load(rotation + 2 * pair, mask=turned, other=1.0)[None, :]
    sin = tl.load(rotation + 2 * pair + 1, mask=turned, other=0.0)[None, :]
    e, o = tl.where(turned[None, :], e * cos - o * sin, e), tl.where(turned[None, :], o * cos + e * sin, o)
    y = tl.reshape(tl.join(e, o), (BLOCK_H, D)).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * out_stride + at, y, mask=h < heads)


_UNALIGNED = ("window", "window_scales", "pool", "pool_scales", "keys", "key_scales")
_UNSPECIALIZED = ("table_stride", "heads")


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def cache_write_kernel(
    positions, sequence, starts, query_start, slots, block_table, table_stride, eps,
    q, q_stride, q_out, q_out_stride, heads,
    kv, kv_stride, kv_norm, rotation, window, window_scales, window_unit,
    main, main_stride, main_bias, main_norm, main_state, main_state_unit, pool, pool_scales, pool_unit,
    index, index_stride, index_bias, index_norm, index_state, index_state_unit, keys, key_scales, key_unit,
    entry_rotation,
    D: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr, STAGED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    RATIO: tl.constexpr, POOL_ROWS: tl.constexpr,
    INDEX_D: tl.constexpr, INDEX_FORMAT: tl.constexpr, INDEX_GROUP: tl.constexpr, INDEX_BYTES: tl.constexpr,
    INDEX_SCALE_BYTES: tl.constexpr, HADAMARD: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_H: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (part, token); parts: main compressor, index compressor, kv, then blocks of heads, as far as there are
    any."""
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
            if part < MAIN:
                if RATIO > 0:
                    _compress(
                        token, seq, position, starts, query_start, slots, block_table, table_stride,
                        main, main_stride, main_bias, main_norm, main_state, main_state_unit, entry_rotation, eps,
                        pool, pool_scales, pool_unit,
                        RATIO, POOL_ROWS, D, ROPE, FORMAT, GROUP, ROW_BYTES, SCALE_BYTES, False, SINGLE, PDL,
                    )  # fmt: skip
            else:
                if INDEX_D > 0:
                    _compress(
                        token, seq, position, starts, query_start, slots, block_table, table_stride,
                        index, index_stride, index_bias, index_norm, index_state, index_state_unit, entry_rotation, eps,
                        keys, key_scales, key_unit,
                        RATIO, POOL_ROWS, INDEX_D, ROPE, INDEX_FORMAT, INDEX_GROUP, INDEX_BYTES, INDEX_SCALE_BYTES,
                        HADAMARD, SINGLE, PDL,
                    )  # fmt: skip
        elif PDL:
            tl.extra.cuda.gdc_wait()  # or a later kernel could overtake an earlier one when all is padding
    elif part == MAIN + INDEX:
        if seq >= 0:
            weight = tl.load(kv_norm + tl.arange(0, D))
            unit = token.to(tl.int64)
            row = 0
            if not STAGED:
                unit = tl.load(slots + seq).to(tl.int64)
                row = position % WINDOW
            if PDL:
                tl.extra.cuda.gdc_wait()
            x = tl.load(kv + token.to(tl.int64) * kv_stride + tl.arange(0, D)).to(tl.float32)
            e, o = norm_rope_pairs(x, weight, rotation + token * ROPE, eps, D, GROUP, ROPE)
            base = unit * window_unit
            store_row(e, o, window + base + row * ROW_BYTES, window_scales + base + row * SCALE_BYTES, FORMAT, D, GROUP)
        elif PDL:
            tl.extra.cuda.gdc_wait()
    else:
        if QUERIES:
            first = (part - MAIN - INDEX - 1) * BLOCK_H
            _turn_queries(
                token, first, seq < 0, q, q_stride, q_out, q_out_stride, heads, rotation + token * ROPE, eps,
                D, ROPE, BLOCK_H, PDL,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["source", "source_scales", "window", "window_scales"])
def commit_window_kernel(
    positions, sequence, slots, source, source_scales, source_unit, window, window_scales, window_unit,
    WINDOW: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token: copy its staging row to the ring."""
    token = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.load(sequence + token)
    if seq >= 0:
        row = tl.load(positions + token) % WINDOW
        base = tl.load(slots + seq).to(tl.int64) * window_unit
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


def staging_rows(num_tokens: int, like: Rows) -> Rows:
    """Return a new Rows of `num_tokens` units of one row, in the format and width of `like`, not initialised."""
    fmt, width = like.format, like.width
    values, scales = value_bytes(fmt, width), scale_row_bytes(fmt, width)
    unit = -(-(values + scales) // 16) * 16
    pool = torch.empty((num_tokens, unit), dtype=torch.uint8, device=like.values.device)
    return Rows.view(pool, fmt, width=width, rows=1, offset=0, value_bytes=values, scale_bytes=scales)


def commit_window(batch: DecodeBatch, staging: Rows, window: Rows) -> None:
    """Move the step's rows from `staging` (unit = token) to the rings. At most W tokens a sequence, as always."""
    if staging.num_units < batch.num_tokens or (staging.format, staging.width) != (window.format, window.width):
        raise ValueError(
            f"staging of {staging.num_units} {staging.format} rows of {staging.width} channels: wanted "
            f"{batch.num_tokens} {window.format} rows of {window.width}"
        )
    if not uses_triton(batch.positions):
        ragged, token = _unpadded(batch)
        ring = ragged.ring_rows(window.rows)
        rows = staging.read(token[ring.token], torch.zeros_like(ring.token))
        window.write(ring.unit, ring.position % window.rows, rows)
        return
    pdl = HAS_PDL(batch.positions.device)
    row_bytes, scale_bytes = value_bytes(window.format, window.width), scale_row_bytes(window.format, window.width)
    commit_window_kernel[(batch.num_tokens,)](
        batch.positions, batch.sequence, batch.slots, *row_args(staging), *row_args(window), window.rows, row_bytes,
        scale_bytes, triton.next_power_of_2(row_bytes // 4), pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def cache_write_reference(
    batch: DecodeBatch,
    *,
    kv: Tensor,
    kv_norm: Tensor,
    rotation: Tensor,
    window: Rows,
    eps: float,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    ratio: int = 0,
    entry_rotation: Tensor | None = None,
    main: Pooling | None = None,
    index: Pooling | None = None,
    staging: Rows | None = None,
) -> Tensor | None:
    """See cache_write."""
    ragged, token = _unpadded(batch)
    rows = rope_reference(rms_norm_reference(kv[token], kv_norm, eps), rotation[token])
    if staging is None:
        write_window_reference(rows, ragged, window)
    else:
        staging.write(token, torch.zeros_like(token), rows)
    for pooling in (main, index):
        if pooling is None:
            continue
        assert entry_rotation is not None
        k, g = pooling.projected[token].float().chunk(2, -1)
        g = g + pooling.bias[ragged.positions % ratio]
        pool = compress_csa_reference if ratio == CSA_RATIO else compress_hca_reference
        entry = pool(k.contiguous(), g, ragged, pooling.state)
        if entry.shape[0]:
            completes = token[(ragged.positions + 1) % ratio == 0]
            entry = rope_reference(rms_norm_reference(entry, pooling.norm, eps), entry_rotation[completes])
            write_entries_reference(hadamard(entry) if pooling.hadamard else entry, ragged, ratio, pooling.pool)
    if q is None:
        return None
    out = torch.empty_like(q, dtype=torch.bfloat16) if q_out is None else q_out
    turned = rope_reference(rms_norm_reference(q[token], None, eps), rotation[token])
    out.zero_()
    out[token] = turned.to(out.dtype)
    return out


def cache_write(
    batch: DecodeBatch,
    *,
    kv: Tensor,
    kv_norm: Tensor,
    rotation: Tensor,
    window: Rows,
    eps: float,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    ratio: int = 0,
    entry_rotation: Tensor | None = None,
    main: Pooling | None = None,
    index: Pooling | None = None,
    staging: Rows | None = None,
) -> Tensor | None:
    """Store a step's rows and return the turned queries [T, H, D] (bfloat16, or `q_out`), None without q.

    kv: [T, D] float32 or bfloat16, any row stride.   kv_norm: [D] float32.   rotation: complex64 [T, R/2] of the
    tokens.   window: the layer's rings; with several tokens a sequence, `staging` takes the rows instead.
    q: [T, H, D] float32 or bfloat16.   q_out may be q.
    ratio: 0, 4 or 128; then `main`, with `index` at ratio 4 if the layer has an indexer.   entry_rotation: complex64
    [T, R/2], of position - ratio + 1 (rows of tokens that complete no entry are not used).
    """
    tokens, dim = kv.shape
    _check(batch, kv, kv_norm, rotation, window, q, q_out, ratio, entry_rotation, main, index, staging)
    if not uses_triton(kv):
        return cache_write_reference(
            batch, kv=kv, kv_norm=kv_norm, rotation=rotation, window=window, eps=eps, q=q, q_out=q_out, ratio=ratio,
            entry_rotation=entry_rotation, main=main, index=index, staging=staging,
        )  # fmt: skip
    heads = 0 if q is None else q.shape[1]
    if q is not None and q_out is None:
        q_out = torch.empty_like(q, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    tile = tile_for("cache_write", arch_of(kv.device), heads=heads, tokens=tokens)
    pdl = HAS_PDL(kv.device)
    constants = _constants(
        window.format, dim, 2 * rotation.shape[1], ratio, tile, rows=window.rows,
        pool_rows=0 if main is None else main.pool.rows, index=None if index is None else index.pool,
        hadamard=index is not None and index.hadamard, staged=staging is not None, queries=q is not None,
        single=batch.max_query_len == 1, pdl=pdl,
    )  # fmt: skip
    blocks = -(-heads // tile.constants["BLOCK_H"])
    parts = 1 + (main is not None) + (index is not None) + blocks
    cache_write_kernel[(parts, tokens)](
        batch.positions, batch.sequence, batch.starts, batch.query_start, batch.slots, batch.block_table,
        batch.block_table.stride(0), eps,
        q, 0 if q is None else q.stride(0), q_out, 0 if q_out is None else q_out.stride(0), heads,
        kv, kv.stride(0), kv_norm, torch.view_as_real(rotation), *row_args(window if staging is None else staging),
        *_pooling_args(main), *_pooling_args(index),
        None if entry_rotation is None else torch.view_as_real(entry_rotation),
        **constants, num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return q_out


def _pooling_args(pooling: Pooling | None) -> tuple[Any, ...]:
    if pooling is None:
        return (None, 0, None, None, None, 0, None, None, 0)
    state = pooling.state.values
    return (
        pooling.projected, pooling.projected.stride(0), pooling.bias, pooling.norm, state, state.stride(0),
        *row_args(pooling.pool),
    )  # fmt: skip


def _constants(
    fmt: str, dim: int, rope: int, ratio: int, tile: Tile, *, rows: int, pool_rows: int, index: Rows | None,
    hadamard: bool, staged: bool, queries: bool, single: bool, pdl: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return every constexpr of the kernel."""
    return {
        "D": dim, "ROPE": rope, "WINDOW": rows, "STAGED": staged,
        "FORMAT": fmt, "GROUP": group_of(fmt, dim), "ROW_BYTES": value_bytes(fmt, dim),
        "SCALE_BYTES": scale_row_bytes(fmt, dim),
        "RATIO": ratio, "POOL_ROWS": pool_rows,
        "INDEX_D": 0 if index is None else index.width, "INDEX_FORMAT": None if index is None else index.format,
        "INDEX_GROUP": 0 if index is None else group_of(index.format, index.width),
        "INDEX_BYTES": 0 if index is None else value_bytes(index.format, index.width),
        "INDEX_SCALE_BYTES": 0 if index is None else scale_row_bytes(index.format, index.width),
        "HADAMARD": hadamard,
        "QUERIES": queries, "BLOCK_H": tile.constants["BLOCK_H"], "SINGLE": single, "PDL": pdl,
    }  # fmt: skip


def _unpadded(batch: DecodeBatch) -> tuple[RaggedBatch, Tensor]:
    """Return the batch without padding, for the reference, and which token each of its tokens was, [T'] int64."""
    sequence = batch.sequence.tolist()
    lengths = [sequence.count(s) for s in range(batch.slots.shape[0])]
    kept = [s for s, length in enumerate(lengths) if length]
    starts, slots, tables = batch.starts.tolist(), batch.slots.tolist(), batch.block_table.tolist()
    ragged = RaggedBatch.build(
        [(starts[s], lengths[s]) for s in kept],
        slots=[slots[s] for s in kept],
        block_tables=[tables[s] for s in kept],
        device=batch.device,
    )
    first = batch.query_start.tolist()
    token = [first[s] + i for s in kept for i in range(lengths[s])]
    return ragged, torch.tensor(token, dtype=torch.int64, device=batch.device)


def _check(
    batch: DecodeBatch,
    kv: Tensor,
    kv_norm: Tensor,
    rotation: Tensor,
    window: Rows,
    q: Tensor | None,
    q_out: Tensor | None,
    ratio: int,
    entry_rotation: Tensor | None,
    main: Pooling | None,
    index: Pooling | None,
    staging: Rows | None,
) -> None:
    tokens, dim = kv.shape
    angles = rotation.shape[-1]
    if tokens != batch.num_tokens or dim != window.width or kv_norm.shape != (dim,) or kv.stride(1) != 1:
        raise ValueError(
            f"kv {tuple(kv.shape)}, norm {tuple(kv_norm.shape)}: wanted {batch.num_tokens} tokens of {window.width}"
        )
    for name, turns in (("rotation", rotation), ("entry rotation", entry_rotation)):
        wrong = turns is not None and (turns.shape != (tokens, angles) or not turns.is_contiguous())
        if wrong or 2 * angles > dim:
            raise ValueError(f"{name} of another shape than ({tokens}, R/2), or not contiguous, for rows of {dim}")
    if q is not None and (q.dim() != 3 or q.shape[::2] != (tokens, dim) or q.stride()[1:] != (dim, 1)):
        raise ValueError(f"queries {tuple(q.shape)} of strides {q.stride()}: wanted ({tokens}, heads, {dim}) packed")
    if q_out is not None and (q is None or q_out.shape != q.shape or q_out.stride()[1:] != (dim, 1)):
        raise ValueError(f"output for queries {tuple(q_out.shape)}: wanted the shape of q, packed")
    if ratio not in (0, CSA_RATIO, HCA_RATIO) or (ratio == 0) != (main is None) or (index and ratio != CSA_RATIO):
        raise ValueError(f"ratio {ratio} with {'a' if main else 'no'} compressor, {'an' if index else 'no'} indexer")
    if staging is None and batch.max_query_len > 1:
        raise ValueError(f"{batch.max_query_len} tokens a sequence: their rows need a staging area until attention ran")
    if staging is not None and (staging.num_units < tokens or staging.rows != 1 or staging.format != window.format):
        raise ValueError(f"staging of {staging.num_units} x {staging.rows} {staging.format} rows for {tokens} tokens")
    if main is not None and main.pool.format != window.format:
        raise ValueError(f"entries stored as {main.pool.format} beside a window of {window.format} rows")
    for pooling in (main, index):
        if pooling is not None:
            _check_pooling(pooling, tokens, dim if pooling is main else pooling.pool.width, ratio)
            if entry_rotation is None:
                raise ValueError("a compressor needs the rotation of its entries")
            if pooling.pool.rows != (main or pooling).pool.rows:
                raise ValueError("entries and index keys must lie in blocks of as many rows")


def _check_pooling(pooling: Pooling, tokens: int, dim: int, ratio: int) -> None:
    width = 2 * dim if ratio == CSA_RATIO else dim
    state, pool = pooling.state, pooling.pool
    rows = 16 if ratio == CSA_RATIO else 3
    if pooling.projected.shape != (tokens, 2 * width) or pooling.projected.stride(1) != 1:
        raise ValueError(f"projection {tuple(pooling.projected.shape)}: wanted ({tokens}, {2 * width})")
    if pooling.bias.shape != (ratio, width) or not pooling.bias.is_contiguous() or pooling.norm.shape != (dim,):
        raise ValueError(
            f"bias {tuple(pooling.bias.shape)}, norm {tuple(pooling.norm.shape)}: wanted ({ratio}, {width})"
        )
    if (state.format, state.width, state.rows) != ("fp32", width, rows) or state.values.stride(1) != width:
        raise ValueError(f"state of {state.rows} {state.format} rows of {state.width}: wanted {rows} fp32 of {width}")
    if pool.width != dim:
        raise ValueError(f"pool of rows of {pool.width} channels: wanted {dim}")
    if pooling.hadamard and dim != HADAMARD_CHANNELS:
        raise ValueError(f"Hadamard transform of {dim} channels in a kernel: written for {HADAMARD_CHANNELS}")


_SIGNATURE = {
    "positions": "*i32", "sequence": "*i32", "starts": "*i32", "query_start": "*i32", "slots": "*i32",
    "block_table": "*i32", "table_stride": "i32", "eps": "fp32",
    "q": "*bf16", "q_stride": "i32", "q_out": "*bf16", "q_out_stride": "i32", "heads": "i32",
    "kv": "*bf16", "kv_stride": "i32", "kv_norm": "*fp32", "rotation": "*fp32",
    "window": "*u8", "window_scales": "*u8", "window_unit": "i32",
    "main": "*fp32", "main_stride": "i32", "main_bias": "*fp32", "main_norm": "*fp32", "main_state": "*fp32",
    "main_state_unit": "i32", "pool": "*u8", "pool_scales": "*u8", "pool_unit": "i32",
    "index": "*fp32", "index_stride": "i32", "index_bias": "*fp32", "index_norm": "*fp32", "index_state": "*fp32",
    "index_state_unit": "i32", "keys": "*u8", "key_scales": "*u8", "key_unit": "i32", "entry_rotation": "*fp32",
}  # fmt: skip
_MAIN = ("main", "main_bias", "main_norm", "main_state", "pool", "pool_scales")
_INDEX = ("index", "index_bias", "index_norm", "index_state", "keys", "key_scales")


def variants(arch: str) -> list[Variant]:
    """Return every compilation of cache_write and commit_window: packed rows of the model's head size."""
    kinds: list[tuple[str, int, str | None]] = [
        ("window", 0, None), ("csa fp8", 4, "fp8_index"), ("csa fp4", 4, "fp4_index"), ("hca", 128, None)
    ]  # fmt: skip
    return [
        *(
            _variant(name, ratio, index, tile, single)
            for name, ratio, index in kinds
            for single in (True, False)
            for tile in tiles_of("cache_write", arch)
        ),
        _commit_variant(),
    ]


def _variant(name: str, ratio: int, index: str | None, tile: Tile, single: bool) -> Variant:
    keys = None if index is None else staging_rows(1, Rows(index, 128, torch.empty(0)))
    constants = _constants(
        "packed", 512, 64, ratio, tile, rows=128, pool_rows=256 // ratio if ratio else 0, index=keys,
        hadamard=index == "fp4_index", staged=not single, queries=True, single=single, pdl=True,
    )  # fmt: skip
    left_out = [*(() if ratio else (*_MAIN, "entry_rotation")), *(() if index else _INDEX)]
    return Variant(
        op=f"cache_write {name}{'' if single else ', several tokens'}",
        kernel=cache_write_kernel,
        signature={arg: kind for arg, kind in _SIGNATURE.items() if arg not in left_out},
        constants={**constants, **dict.fromkeys(left_out)},
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
            "source_unit": "i32", "window_unit": "i32",
        },
        constants={
            "WINDOW": 128, "ROW_BYTES": rows, "SCALE_BYTES": scales, "BLOCK": triton.next_power_of_2(rows // 4),
            "PDL": True,
        },
        num_warps=4,
        num_stages=1,
        tensor_ops=(),
        bytes_per_program=2 * (rows + scales),
        unaligned=pointers,
    )  # fmt: skip
