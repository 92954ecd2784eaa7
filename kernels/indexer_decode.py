"""The indexer of a decode step: queries made ready, keys scored where they lie, the best k entries of each token.

    query     rope on the last R channels; times the Hadamard matrix if wanted; rounded like the keys (see quant.py)
    score     score[t, b] = weight[t, h] * scale summed over heads h with relu(query[t, h] . key[b]), b < visible[t]
    selected  the k best of a token, all of them if it sees no more than k: then nothing is scored

Rules of the selection: equal scores go to the lower entry (0.0 and -0.0 are equal); an entry scored NaN or -inf is
never selected; entries come in ascending order, places left over are -1 and come last. A token with a score that is not
finite has read a key that was never written, and nobody may use its output: its row is UNSEEN, an entry that no token
sees, then -1, and attention makes NaN of that. So is the row of one whose block table ends too early, and of one whose
scores had no room.

Kernels: query_kernel, whose part cache_write can take; logits_kernel writes scores as tiles of BLOCK_N, those of one
token together, tokens in order; top_k_kernel finds the k-th best by counting in bins. Grids are fixed by the device
alone, and programs share what there really is to do: time follows the tokens' true lengths, read on the device, never
the longest that is allowed. Scores take 4 bytes a visible entry, at most WORKSPACE_SCORES of them (64 MiB: 64 tokens at
2^20 positions), or what the block table can hold if that is less; parts of long rows 8 bytes x k for every CHUNK
scores, and a CHUNK for every token.

Products: FP8 keys meet FP8 queries in tensor cores, which on sm_90 keep about 14 bits of a sum of 32; FP4 keys and
queries become f16, exactly while scales of a row differ by less than 2^23 (what lies below is lost in a float32 sum
anyway). Everything else is float32. A token's bits don't depend on the other sequences of the batch, only on whether
sequences have one token, two, or more.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kernels.indexer import select_top_k_reference
from kernels.indexer_board_triton import MOST_BINS
from kernels.indexer_chunk import is_chunk, key_args, select_chunk
from kernels.indexer_query_triton import query_kernel
from kernels.indexer_topk_triton import INTEGERS as TOP_K_INTEGERS
from kernels.indexer_topk_triton import UNSEEN, top_k_kernel
from kernels.indexer_triton import FORMATS, INTEGERS, logits_kernel
from kernels.norm_rope import rope_reference
from kernels.quant import hadamard as hadamard_reference
from kernels.quant import quantize_e2m1, quantize_e4m3
from kernels.ragged import DecodeBatch
from kernels.rows import FP4_GROUP, Rows, round_trip
from kernels.scratch import zeros
from kernels.tiles import Tile, Variant, tile_for, tiles_of
from kernels.triton_env import HAS_PDL, arch_of, sm_count, uses_triton

QUERY, LOGITS, TOP_K = "indexer_query", "indexer_logits", "indexer_top_k"
WORKSPACE_SCORES = 1 << 24
MOST_TOKENS = 4096
_REFERENCE_DOTS = 1 << 24  # products at a time


@dataclasses.dataclass(frozen=True)
class IndexQuery:
    """Queries as logits_kernel reads them.

    values: [T, H, D] float8_e4m3fn (fp8_index) or float16 (fp4_index: relative to the largest scale of the row).
    weight: [T, H] float32: the head's weight, the scale of the scores and that of the row's values, in one.
    """

    format: str
    values: Tensor
    weight: Tensor

    @classmethod
    def empty(cls, q: Tensor, fmt: str) -> IndexQuery:
        """Return room for the queries that q [T, H, D] becomes, not initialised."""
        dtype = torch.float8_e4m3fn if fmt == "fp8_index" else torch.float16
        values = torch.empty(q.shape, dtype=dtype, device=q.device)
        return cls(fmt, values, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))

    def part(self, tokens: slice) -> IndexQuery:
        """Return those of some tokens."""
        return IndexQuery(self.format, self.values[tokens], self.weight[tokens])

    @property
    def words(self) -> Tensor:
        """values as kernels write them: pairs of codes as int16, or as they are."""
        return self.values.view(torch.int16) if self.format == "fp8_index" else self.values


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one step: tiles of `block`, those of a token together.

    values: [capacity * block] float32.   queries: tokens of a sequence that are scored together.
    """

    values: Tensor
    block: int
    queries: int

    def rows(self, batch: DecodeBatch, *, ratio: int, top_k: int) -> list[Tensor | None]:
        """Return each token's scores, None if it has none. Reads lengths back: for tests."""
        found: list[Tensor | None] = []
        tile = 0
        first = batch.query_start.tolist()
        positions, sequences = batch.positions.tolist(), batch.sequence.tolist()
        for token, (position, sequence) in enumerate(zip(positions, sequences, strict=True)):
            found.append(None)
            if sequence < 0:
                continue
            place = (token - first[sequence]) % self.queries
            behind = min(self.queries - 1 - place, first[sequence + 1] - 1 - token)
            if (position + 1 + behind) // ratio > top_k:
                begin = tile * self.block
                found[-1] = self.values[begin : begin + (position + 1) // ratio]
                tile += cdiv((position + 1 + behind) // ratio, self.block)
        return found


def index_query_reference(
    q: Tensor, weight: Tensor, batch: DecodeBatch, rotation: Tensor, *, fmt: str, scale: float, hadamard: bool = False
) -> IndexQuery:
    """See index_query."""
    is_real = batch.sequence >= 0
    x = rope_reference(torch.where(is_real[:, None, None], q, 0), rotation)
    x = hadamard_reference(x) if hadamard else x
    if fmt == "fp8_index":
        values, factor = quantize_e4m3(x, x.shape[-1])
        factor = factor[..., 0]
    else:
        factor = quantize_e2m1(x, FP4_GROUP)[1].amax(-1)
        values = torch.where(factor.isfinite()[..., None], round_trip(x, fmt) / factor[..., None], 0).to(torch.float16)
        factor = torch.where(factor.isfinite(), factor, math.nan)
    folded = weight.float() * scale * factor
    return IndexQuery(fmt, values, torch.where(is_real[:, None], folded, 0.0))


def index_query(
    q: Tensor,
    weight: Tensor,
    batch: DecodeBatch,
    rotation: Tensor,
    *,
    fmt: str,
    scale: float,
    hadamard: bool = False,
    tile: Tile | None = None,
) -> IndexQuery:
    """Return queries rounded to row format `fmt` (fp8_index, fp4_index) and their heads' weights.

    q: [T, H, D] float32 or bfloat16, packed heads, any row stride of whole 16 bytes.   weight: [T, H] float32 or
    bfloat16.   rotation: complex64 [T, R/2].   scale: (H D)^-0.5 in DeepSeek-V4.   hadamard: only with D = 128.
    tile: instead of the table's. A padding token's row is 0. With dependent launch the batch and the rotation are read
    before the kernel ahead has ended.
    """
    check_queries(q, weight, batch, rotation, fmt=fmt, hadamard=hadamard)
    if not uses_triton(q):
        return index_query_reference(q, weight, batch, rotation, fmt=fmt, scale=scale, hadamard=hadamard)
    piece = 16 // q.element_size()
    if q.stride(0) % piece or q.data_ptr() % 16:
        raise ValueError(f"queries {q.stride(0)} elements apart, {q.data_ptr() % 16} bytes off: wanted whole 16 bytes")
    tokens, heads, dim = q.shape
    out = IndexQuery.empty(q, fmt)
    if tokens:
        tile = tile or tile_for(QUERY, arch_of(q.device), hadamard=int(hadamard))
        block = tile.constants["BLOCK_H"]
        pdl, launch = _launch(q.device)
        query_kernel[(tokens, cdiv(heads, block))](
            q, weight, out.words, out.weight, torch.view_as_real(rotation), batch.sequence, scale,
            q.stride(0) // piece, weight.stride(0),
            H=heads, D=dim, ROPE=2 * rotation.shape[1], FORMAT=FORMATS[fmt], HADAMARD=hadamard, BLOCK_H=block,
            PDL=pdl, num_warps=tile.num_warps, num_stages=1, **launch,
        )  # fmt: skip
    return out


def check_queries(q: Tensor, weight: Tensor, batch: DecodeBatch, rotation: Tensor, *, fmt: str, hadamard: bool) -> None:
    """Raise ValueError where arguments of index_query don't fit together."""
    tokens, heads, dim = q.shape
    if fmt not in FORMATS or dim not in (32, 64, 128) or (hadamard and dim != 128):
        raise ValueError(
            f"queries of {dim} channels, {fmt}, hadamard {hadamard}: wanted fp8_index or fp4_index of 32, 64 or 128 "
            "channels, hadamard with 128 only"
        )
    if tokens != batch.num_tokens or weight.shape != (tokens, heads) or weight.stride(-1) != 1:
        raise ValueError(f"queries {tuple(q.shape)}, weights {tuple(weight.shape)} for {batch.num_tokens} tokens")
    if q.dtype not in (torch.float32, torch.bfloat16) or q.stride()[1:] != (dim, 1):
        raise ValueError(f"queries {q.dtype} with strides {q.stride()}: wanted float32 or bfloat16, packed heads")
    if rotation.dtype != torch.complex64 or not rotation.is_contiguous() or rotation.shape[0] != tokens:
        raise ValueError(f"rotation {tuple(rotation.shape)} {rotation.dtype}: wanted contiguous complex64 of {tokens}")
    if 2 * rotation.shape[1] > dim:
        raise ValueError(f"rotation of {2 * rotation.shape[1]} channels for queries of {dim}")


def index_scores(
    query: IndexQuery,
    batch: DecodeBatch,
    keys: Rows,
    *,
    ratio: int,
    top_k: int,
    tile: Tile | None = None,
    capacity: int | None = None,
) -> Scores:
    """Return the scores of tokens that see more than top_k entries, with the kernel.

    capacity: scores that there is room for; None: see the module. More are not written, and their tokens unsound.
    Scores beyond a token's last visible entry are whatever was there.
    """
    _check_keys(query, batch, keys, ratio, top_k)
    tokens, heads, dim = query.values.shape
    if tokens > MOST_TOKENS:
        raise ValueError(f"{tokens} tokens: {MOST_TOKENS} at most, more are a chunk")
    device = query.values.device
    together = next_power_of_2(min(max(batch.max_query_len, 1), 4))
    tile = tile or tile_for(LOGITS, arch_of(device), queries=together, fp4=int(query.format == "fp4_index"))
    block = tile.constants["BLOCK_N"]
    if capacity is None:
        capacity = min(tokens * batch.block_table.shape[1] * keys.rows + tokens * block, WORKSPACE_SCORES)
    capacity //= block
    scores = Scores(torch.empty(max(capacity, 1) * block, dtype=torch.float32, device=device), block, together)
    if not tokens:
        return scores
    values, scales, unit_bytes = key_args(keys)
    pdl, launch = _launch(device)
    most = tokens * cdiv(batch.block_table.shape[1] * keys.rows, block)
    logits_kernel[(_programs(device, tile, most),)](
        query.values, query.weight, scores.values, batch.positions, batch.sequence, batch.query_start,
        batch.block_table, values, scales, unit_bytes // 16, unit_bytes // scales.element_size(),
        batch.block_table.shape[1], keys.num_units, tokens, capacity,
        TOP_K=top_k, RATIO=ratio, TOKENS=_padded_tokens(tokens), PDL=pdl,
        **_logits_constants(query.format, heads, dim, keys.rows, together, tile),
        num_warps=tile.num_warps, num_stages=1, **launch,
    )  # fmt: skip
    return scores


def select_scored(scores: Scores, batch: DecodeBatch, *, ratio: int, top_k: int, tile: Tile | None = None) -> Tensor:
    """Return index_select's selection [T, top_k] int32 of what index_scores gave, with the kernel."""
    selected, _ = _top_k(
        scores.values, None, 0, batch.num_tokens, top_k, tile, batch=batch, ratio=ratio, block=scores.block,
        queries=scores.queries, capacity=scores.values.shape[0] // scores.block,
    )  # fmt: skip
    return selected


def index_select_reference(query: IndexQuery, batch: DecodeBatch, keys: Rows, *, ratio: int, top_k: int) -> Tensor:
    """See index_select."""
    visible = torch.where(batch.sequence >= 0, (batch.positions + 1) // ratio, 0)
    is_scored = visible > top_k
    column = torch.arange(top_k, dtype=torch.int32, device=batch.device)
    selected = torch.where((column < visible[:, None]) & ~is_scored[:, None], column, -1)
    for sequence in sorted(set(batch.sequence[is_scored].tolist())):
        tokens = (is_scored & (batch.sequence == sequence)).nonzero()[:, 0]
        most = int(visible[tokens].max())
        key = _keys_of(batch, keys, sequence, most)
        entry = torch.arange(most, device=batch.device)
        for part in tokens.split(max(1, _REFERENCE_DOTS // (query.values.shape[1] * most))):
            is_hidden = entry >= visible[part, None]
            scores = _scores_of(query, part, key)
            is_sound = (scores.isfinite() | is_hidden).all(1)
            best = select_top_k_reference(scores.masked_fill(is_hidden, -math.inf), top_k).sort().values
            unsound = torch.where(column == 0, UNSEEN, -1)
            selected[part] = torch.where(is_sound[:, None], best, unsound).to(torch.int32)
    return selected


def scores_reference(query: IndexQuery, batch: DecodeBatch, keys: Rows, *, token: int, visible: int) -> Tensor:
    """Return the scores [visible] float32 of a token; NaN for entries without a block."""
    key = _keys_of(batch, keys, int(batch.sequence[token]), visible)
    return _scores_of(query, torch.tensor([token], device=batch.device), key)[0]


def _keys_of(batch: DecodeBatch, keys: Rows, sequence: int, count: int) -> Tensor:
    """Return the first keys [count, D] float32 of a sequence; NaN for entries without a block."""
    entry = torch.arange(count, device=batch.device)
    column, row = entry // keys.rows, entry % keys.rows
    is_known = column < batch.block_table.shape[1]
    block = batch.block_table[sequence].long()
    unit = torch.where(is_known, block[column.clamp(max=block.shape[0] - 1)], -1)
    is_known = (unit >= 0) & (unit < keys.num_units)
    key = torch.full((count, keys.width), math.nan, device=batch.device)
    key[is_known] = keys.read(unit[is_known], row[is_known])
    return key


def _scores_of(query: IndexQuery, tokens: Tensor, key: Tensor) -> Tensor:
    """Return the scores [N, B] float32 of tokens [N] for keys [B, D]."""
    dots = query.values[tokens].float() @ key.T
    return torch.bmm(query.weight[tokens][:, None], torch.where(dots < 0, 0.0, dots))[:, 0]


def index_select(query: IndexQuery, batch: DecodeBatch, keys: Rows, *, ratio: int, top_k: int) -> Tensor:
    """Return selected [T, top_k] int32: entry numbers as sparse_attention_decode reads them.

    The keys of this step's entries must have been written. Calls of one stream share counters (scratch.py). A step of
    many tokens takes the kernels of indexer_chunk.py.
    With dependent launch the batch is read before the kernel ahead has ended: neither it nor one that lets others begin
    early may have written it in this step.
    """
    _check_keys(query, batch, keys, ratio, top_k)
    if not uses_triton(query.values):
        return index_select_reference(query, batch, keys, ratio=ratio, top_k=top_k)
    if is_chunk(batch):
        return select_chunk(query, batch, keys, ratio=ratio, top_k=top_k)
    scores = index_scores(query, batch, keys, ratio=ratio, top_k=top_k)
    return select_scored(scores, batch, ratio=ratio, top_k=top_k)


def top_k_of_rows(scores: Tensor, lengths: Tensor, k: int, *, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Return (selected [T, k] int32, sound [T] bool) of scores [T, L] float32, whose first lengths[t] int32 count.

    The selection of index_select as an operation of its own, unsound rows too; sound: all that counts is finite.
    Lengths are read early, as index_select reads the batch.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32 or (scores.numel() and scores.stride(1) != 1):
        raise ValueError(f"scores {tuple(scores.shape)} {scores.dtype}: wanted float32 rows")
    tokens = scores.shape[0]
    if lengths.shape != (tokens,) or lengths.dtype != torch.int32 or not lengths.is_contiguous() or k < 1:
        raise ValueError(f"lengths {tuple(lengths.shape)} {lengths.dtype}, k {k}: wanted int32 ({tokens},), 1 or more")
    if uses_triton(scores):
        selected, sound = _top_k(scores, lengths, scores.stride(0), tokens, k, tile, width=scores.shape[1])
        assert sound is not None
        return selected, sound.view(torch.bool)
    inside = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    best = select_top_k_reference(scores.masked_fill(~inside, -math.inf), k)
    order = torch.where(best < 0, scores.shape[1], best).sort().values
    selected = torch.where(order < scores.shape[1], order, -1).to(torch.int32)
    return selected, (scores.isfinite() | ~inside).all(1)


def _top_k(
    scores: Tensor, lengths: Tensor | None, row_stride: int, tokens: int, k: int, tile: Tile | None, *,
    batch: DecodeBatch | None = None, ratio: int = 1, block: int = 1, queries: int = 1, capacity: int = 0,
    width: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    device = scores.device
    selected = torch.empty((tokens, k), dtype=torch.int32, device=device)
    sound = None if lengths is None else torch.empty(tokens, dtype=torch.int8, device=device)
    if not tokens:
        return selected, sound
    tile = tile or tile_for(TOP_K, arch_of(device))
    chunk = max(tile.constants["CHUNK"], int(next_power_of_2(2 * k)))
    slots = tokens * max(cdiv(width, chunk), 1) if lengths is not None else tokens + scores.shape[0] // chunk
    part_values = torch.empty((slots, k), dtype=torch.float32, device=device)
    part_ids = torch.empty((slots, k), dtype=torch.int32, device=device)
    counters = zeros("index_select", device, MOST_TOKENS)
    places = (None, None, None) if batch is None else (batch.positions, batch.sequence, batch.query_start)
    is_padded = (block if lengths is None else row_stride) % 16 == 0 and scores.data_ptr() % 16 == 0
    row_stride //= 16 if is_padded else 1
    pdl, launch = _launch(device)
    top_k_kernel[(_programs(device, tile, slots),)](
        scores, lengths, selected, sound, part_values, part_ids, counters, *places, row_stride, tokens, capacity,
        **_top_k_constants(k, tile), TOKENS=_padded_tokens(tokens), QUERIES=queries, RATIO=ratio,
        BLOCK_N=block, PADDED=is_padded, PDL=pdl, num_warps=tile.num_warps, num_stages=1, **launch,
    )  # fmt: skip
    return selected, sound


def _logits_constants(fmt: str, heads: int, dim: int, rows: int, queries: int, tile: Tile) -> dict[str, int]:
    padded = max(8, int(next_power_of_2(heads)))
    constants = {"H": heads, "HEADS": padded, "D": dim, "ROWS": rows, "FORMAT": FORMATS[fmt], "QUERIES": queries}
    return constants | {name: tile.constants[name] for name in ("BLOCK_N", "STAGES")}


def _top_k_constants(k: int, tile: Tile) -> dict[str, int]:
    chunk = max(tile.constants["CHUNK"], int(next_power_of_2(2 * k)))
    threads = 32 * tile.num_warps
    sizes = {"TILE": max(tile.constants["TILE"], 4 * threads), "CHUNK": chunk, "BINS": min(4 * threads, MOST_BINS)}
    return {"K": k, "KP": int(next_power_of_2(k)), **sizes}


def _padded_tokens(tokens: int) -> int:
    """Return how many tokens a program looks over: one of few numbers, so that few kernels are compiled."""
    return next(n for n in (64, 512, MOST_TOKENS) if tokens <= n)


def _programs(device: torch.device, tile: Tile, most: int) -> int:
    """Return how many programs share the work, of which there are at most `most` pieces."""
    return max(1, min(sm_count(device) * tile.constants["RESIDENT"], most))


def _launch(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def _check_keys(query: IndexQuery, batch: DecodeBatch, keys: Rows, ratio: int, top_k: int) -> None:
    tokens, heads, dim = query.values.shape
    if tokens != batch.num_tokens or query.weight.shape != (tokens, heads):
        raise ValueError(
            f"queries {tuple(query.values.shape)}, weights {tuple(query.weight.shape)} for {batch.num_tokens} tokens"
        )
    if keys.format != query.format or keys.width != dim:
        raise ValueError(f"{keys.format} keys of {keys.width} channels, queries {query.format} of {dim}")
    if not query.values.is_contiguous() or not query.weight.is_contiguous():
        raise ValueError(f"queries with strides {query.values.stride()}: wanted contiguous ones")
    if keys.rows & (keys.rows - 1) or ratio < 1 or top_k < 1:
        raise ValueError(f"blocks of {keys.rows} rows, ratio {ratio}, top {top_k}: wanted a power of two, 1 or more")


# Row format, heads, channels, rows of a block, tokens of a sequence, tokens looked over.
_SHIPPED = [
    ("fp8_index", 64, 128, 64, 1, 64),
    ("fp4_index", 64, 128, 64, 1, 64),
    ("fp8_index", 64, 128, 64, 2, 64),
]


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate: DeepSeek-V4-Flash's indexer."""
    found = []
    for fmt, hadamard in (("fp8_index", False), ("fp4_index", True)):
        tile = tile_for(QUERY, arch, hadamard=int(hadamard))
        signature = dict.fromkeys(query_kernel.arg_names, "*fp32") | {"q_ptr": "*bf16", "weight_ptr": "*bf16"}
        signature |= {"out_ptr": "*i16" if fmt == "fp8_index" else "*fp16", "sequence_ptr": "*i32"}
        signature |= {"scale": "fp32", "stride_q": "i32", "stride_w": "i32"}
        constants: dict[str, Any] = {"H": 64, "D": 128, "ROPE": 64, "FORMAT": FORMATS[fmt], "HADAMARD": hadamard}
        constants |= {"BLOCK_H": tile.constants["BLOCK_H"], "PDL": True}
        size = tile.constants["BLOCK_H"] * (384 if fmt == "fp8_index" else 512)
        found.append(_variant(QUERY, query_kernel, signature, constants, tile, (), ("stride_q", "stride_w"), size))
    for fmt, heads, dim, rows, queries, tokens in _SHIPPED:
        tile = tile_for(LOGITS, arch, queries=queries, fp4=int(fmt == "fp4_index"))
        signature = dict.fromkeys(logits_kernel.arg_names, "*i32") | dict.fromkeys(INTEGERS, "i32")
        signature |= {"q_ptr": "*fp8e4nv" if fmt == "fp8_index" else "*fp16"}
        signature |= dict.fromkeys(("weight_ptr", "score_ptr"), "*fp32")
        if fmt == "fp8_index":
            signature |= {"key_ptr": "*fp8e4nv", "key_scale_ptr": "*fp32"}
        constants = {**_logits_constants(fmt, heads, dim, rows, queries, tile), "PDL": True, "RATIO": 4}
        constants |= {"TOP_K": 512, "TOKENS": tokens}
        tensor = "QMMA" if fmt == "fp8_index" else "HMMA"
        size = tile.constants["BLOCK_N"] * (136 if fmt == "fp8_index" else 72)
        found.append(_variant(LOGITS, logits_kernel, signature, constants, tile, (tensor,), INTEGERS, size))
    for tile in tiles_of(TOP_K, arch):
        signature = dict.fromkeys(top_k_kernel.arg_names, "*i32") | dict.fromkeys(TOP_K_INTEGERS, "i32")
        signature |= {"score_ptr": "*fp32", "part_value_ptr": "*fp32", "sound_ptr": "*i8"}
        block = tile_for(LOGITS, arch, queries=1, fp4=0).constants["BLOCK_N"]
        constants = {**_top_k_constants(512, tile), "QUERIES": 1, "RATIO": 4, "BLOCK_N": block, "PDL": True}
        constants |= {"TOKENS": 64, "PADDED": True, "lengths_ptr": None, "sound_ptr": None}
        found.append(_variant(TOP_K, top_k_kernel, signature, constants, tile, (), TOP_K_INTEGERS, None))
        places = dict.fromkeys(("positions_ptr", "sequence_ptr", "query_start_ptr"))
        of_rows = constants | places | {"RATIO": 1, "BLOCK_N": 1}  # top_k_of_rows
        del of_rows["lengths_ptr"], of_rows["sound_ptr"]
        for tokens in sorted({_padded_tokens(1), _padded_tokens(64)}):
            found.append(
                _variant(TOP_K, top_k_kernel, signature, of_rows | {"TOKENS": tokens}, tile, (), TOP_K_INTEGERS, None)
            )
    return found


def _variant(
    op: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], tile: Tile,
    tensor: tuple[str, ...], unaligned: Any, size: int | None,
) -> Variant:  # fmt: skip
    types = {name: kind for name, kind in signature.items() if name not in constants}
    return Variant(op, kernel, types, constants, tile.num_warps, 1, tensor, size, unaligned)
