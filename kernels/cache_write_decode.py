"""What a step stores in one layer's cache, its queries, and those of the indexer, in one launch.

    q   = rope(rms(q))                                  each head by itself, no weight; bfloat16, may be in place
    kv  = rope(rms(kv) * w), rounded to the window's format, into the ring at position mod W, or into a staging row
    K|G of the compressors (kernels/compress.py) move their state on; an entry that a token completes is pooled, then
        rope(rms(entry) * w) at the entry's first position, times the Hadamard matrix if asked, rounded, into its block
    the indexer's queries: turned, rounded like its keys, scales folded into weights (indexer_decode.index_query)

A window row may go straight into the ring only with one token a sequence: it overwrites the row that has just left the
window. With more it goes to `staging` (unit = token), which attention reads, and `commit_window` moves it to the ring
afterwards. A step has any number of tokens of any number of sequences, each beginning anywhere; what of it is launched
does not depend on how many tokens a sequence has, once it has several. The kernels are in cache_write_triton.py.

A token of sequence -1 is padding: it writes no cache and its queries are 0. The kernels can't raise as the references
do: a slot that doesn't exist, or an entry whose block the table or the pool lacks, is not stored, and the token's row
of keys is NaN, so that attention gives NaN for it and for those that see it. Nobody else's rows are touched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.cache_write import write_entries_reference, write_window_reference
from kernels.cache_write_triton import cache_write_kernel, constants_of
from kernels.commit_window_triton import commit_window_kernel
from kernels.compress import CSA_RATIO, HCA_RATIO, compress_csa_reference, compress_hca_reference
from kernels.indexer_decode import IndexQuery, check_queries, index_query_reference
from kernels.norm_rope import rms_norm_reference, rope_reference
from kernels.quant import hadamard
from kernels.ragged import DecodeBatch, RaggedBatch
from kernels.row_store import row_args, scale_row_bytes, value_bytes
from kernels.rows import Rows
from kernels.tiles import Tile, tile_for
from kernels.triton_env import HAS_PDL, arch_of, uses_triton

HADAMARD_CHANNELS = 128
ONE_TOKEN, SEVERAL_TOKENS = "cache_write", "cache_write_several"  # a sequence; tables of tiles


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


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What cache_write returns. q: turned queries [T, H, D], None without.   index: ready for index_select, or None."""

    q: Tensor | None
    index: IndexQuery | None


def staging_rows(num_tokens: int, like: Rows) -> Rows:
    """Return a new Rows of `num_tokens` units of one row, in the format and width of `like`, not initialised."""
    fmt, width = like.format, like.width
    values, scales = value_bytes(fmt, width), scale_row_bytes(fmt, width)
    unit = -(-(values + scales) // 16) * 16
    pool = torch.empty((num_tokens, unit), dtype=torch.uint8, device=like.values.device)
    return Rows.view(pool, fmt, width=width, rows=1, offset=0, value_bytes=values, scale_bytes=scales)


def commit_window(batch: DecodeBatch, staging: Rows, window: Rows) -> None:
    """Move the last W of each sequence's rows from `staging` (unit = token) to the rings."""
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
    commit_window_kernel[(min(window.rows, batch.max_query_len), batch.slots.shape[0])](
        batch.starts, batch.query_start, batch.slots, window.num_units, *row_args(staging), *row_args(window),
        window.rows, row_bytes, scale_bytes, triton.next_power_of_2(row_bytes // 4), pdl,
        num_warps=4, num_stages=1, **({"launch_pdl": True} if pdl else {}),
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
    index_q: Tensor | None = None,
    index_weight: Tensor | None = None,
    index_scale: float = 0.0,
    staging: Rows | None = None,
) -> Written:
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
    ready = None
    if index is not None and index_q is not None and index_weight is not None:
        ready = index_query_reference(
            index_q, index_weight, batch, rotation, fmt=index.pool.format, scale=index_scale, hadamard=index.hadamard
        )
    if q is None:
        return Written(None, ready)
    out = torch.empty_like(q, dtype=torch.bfloat16) if q_out is None else q_out
    turned = rope_reference(rms_norm_reference(q[token], None, eps), rotation[token])
    out.zero_()
    out[token] = turned.to(out.dtype)
    return Written(out, ready)


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
    index_q: Tensor | None = None,
    index_weight: Tensor | None = None,
    index_scale: float = 0.0,
    staging: Rows | None = None,
    tile: Tile | None = None,
) -> Written:
    """Store a step's rows; return the turned queries (bfloat16, or `q_out`) and the indexer's ready ones.

    kv: [T, D] float32 or bfloat16, any row stride.   kv_norm: [D] float32.   rotation: complex64 [T, R/2] of the
    tokens.   window: the layer's rings; with several tokens a sequence, `staging` takes the rows instead.
    q: [T, H, D] float32 or bfloat16.   q_out may be q.
    ratio: 0, 4 or 128; then `main`, with `index` at ratio 4 if the layer has an indexer.   entry_rotation: complex64
    [T, R/2], of position - ratio + 1 (rows of tokens that complete no entry are not used).
    index_q: [T, HI, D of the index keys] float32 or bfloat16, index_weight: [T, HI] likewise, any row strides; both or
    neither, and only with `index`, whose keys say format and Hadamard matrix.   index_scale: as scale of index_query.
    tile: instead of the table's.
    With dependent launch the batch, the norms and the rotations are read before the kernel ahead has ended: neither it
    nor one that lets others begin early may have written them in this step. All other tensors are waited for.
    """
    tokens, dim = kv.shape
    _check(batch, kv, kv_norm, rotation, window, q, q_out, ratio, entry_rotation, main, index, staging)
    _check_index_queries(batch, rotation, index, index_q, index_weight)
    if not uses_triton(kv):
        return cache_write_reference(
            batch, kv=kv, kv_norm=kv_norm, rotation=rotation, window=window, eps=eps, q=q, q_out=q_out, ratio=ratio,
            entry_rotation=entry_rotation, main=main, index=index, index_q=index_q, index_weight=index_weight,
            index_scale=index_scale, staging=staging,
        )  # fmt: skip
    heads = 0 if q is None else q.shape[1]
    if q is not None and q_out is None:
        q_out = torch.empty_like(q, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    index_heads = 0 if index_q is None else index_q.shape[1]
    ready = None if index is None or index_q is None else IndexQuery.empty(index_q, index.pool.format)
    single = batch.max_query_len == 1
    op = ONE_TOKEN if single else SEVERAL_TOKENS
    tile = tile or tile_for(op, arch_of(kv.device), heads=heads, tokens=tokens)
    pdl = HAS_PDL(kv.device)
    constants = constants_of(
        window.format, dim, 2 * rotation.shape[1], ratio, tile, rows=window.rows,
        pool_rows=0 if main is None else main.pool.rows, index=None if index is None else index.pool,
        hadamard=index is not None and index.hadamard, staged=staging is not None,
        index_heads=index_heads, queries=q is not None, single=single, pdl=pdl,
    )  # fmt: skip
    blocks = -(-heads // tile.constants["BLOCK_H"])
    poolings = [pooling for pooling in (main, index) if pooling is not None]
    parts = 1 + -(-index_heads // constants["INDEX_BLOCK"]) + blocks
    grid = (len(poolings) + parts, tokens)
    if not single:
        grid = (len(poolings) * -(-tokens // constants["TOKENS"]) + parts * tokens, 1)
    cache_write_kernel[grid](
        None if single else tokens, batch.positions, batch.sequence, batch.starts, batch.query_start, batch.slots,
        batch.block_table, batch.block_table.shape[1], min((p.pool.num_units for p in poolings), default=0),
        min([window.num_units, *(p.state.num_units for p in poolings)]), eps,
        q, 0 if q is None else q.stride(0), q_out, 0 if q_out is None else q_out.stride(0), heads,
        kv, kv.stride(0), kv_norm, torch.view_as_real(rotation), *row_args(window if staging is None else staging),
        *_pooling_args(main), *_pooling_args(index),
        None if entry_rotation is None else torch.view_as_real(entry_rotation),
        index_q, 0 if index_q is None else index_q.stride(0), index_weight,
        0 if index_weight is None else index_weight.stride(0), index_scale,
        None if ready is None else ready.words, None if ready is None else ready.weight,
        **constants, num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.constants["REGISTERS"] or None,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return Written(q_out, ready)


def _pooling_args(pooling: Pooling | None) -> tuple[Any, ...]:
    if pooling is None:
        return (None, 0, None, None, None, 0, None, None, 0)
    state = pooling.state.values
    return (
        pooling.projected, pooling.projected.stride(0), pooling.bias, pooling.norm, state, state.stride(0),
        *row_args(pooling.pool),
    )  # fmt: skip


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


def _check_index_queries(
    batch: DecodeBatch, rotation: Tensor, index: Pooling | None, q: Tensor | None, weight: Tensor | None
) -> None:
    if q is None and weight is None:
        return
    if q is None or weight is None or index is None:
        raise ValueError("the indexer's queries need their weights, and a compressor of its keys")
    if q.dim() != 3 or q.shape[2] != index.pool.width:
        raise ValueError(f"the indexer's queries {tuple(q.shape)} for keys of {index.pool.width} channels")
    check_queries(q, weight, batch, rotation, fmt=index.pool.format, hadamard=index.hadamard)


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
