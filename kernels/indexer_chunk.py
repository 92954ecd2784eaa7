"""The indexer of a chunk: many tokens of a sequence share a reading of its keys. Rules: indexer_decode.py.

Tokens are taken in turns of as many as CHUNK_SCORES scores (256 MiB) have room for, two launches a turn: a row of
scores for each token, as wide as the longest sequence, then the best of each row. Time follows each token's true
length; the host needs the longest one only to cut turns, and takes what the block table can hold if it is not told.

A token's bits depend neither on the chunk that it comes in nor on the other sequences. They may differ from those of a
decode step in the last places of a float32 sum, since heads are added in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kernels.indexer_board_triton import MOST_BINS
from kernels.indexer_chunk_triton import INTEGERS, chunk_scores_kernel
from kernels.indexer_rows_triton import INTEGERS as ROW_INTEGERS
from kernels.indexer_rows_triton import row_top_k_kernel
from kernels.indexer_triton import FORMATS
from kernels.ragged import DecodeBatch
from kernels.row_store import row_args
from kernels.rows import FP4_GROUP, Rows
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import arch_of

if TYPE_CHECKING:
    from kernels.indexer_decode import IndexQuery

SCORES, TOP_K = "indexer_chunk_scores", "indexer_row_top_k"
CHUNK_SCORES = 1 << 26
_MOST_TOGETHER, _MOST_SINGLE = 4, 512  # tokens of a sequence, and in all, that are still a decode step


def is_chunk(batch: DecodeBatch) -> bool:
    """Return whether the kernels of this module take a step: one that is no decode step, however it is launched."""
    several = batch.max_query_len > (1 if batch.longest is not None else _MOST_TOGETHER)
    return several or batch.num_tokens > _MOST_SINGLE


def select_chunk(
    query: IndexQuery,
    batch: DecodeBatch,
    keys: Rows,
    *,
    ratio: int,
    top_k: int,
    tile: Tile | None = None,
    top_tile: Tile | None = None,
    room: int = CHUNK_SCORES,
) -> Tensor:
    """Return index_select's selection [T, top_k] int32, with the kernels. room: scores at a time.

    Raises ValueError for keys or units that are not 16-byte aligned.
    """
    tokens, heads, dim = query.values.shape
    device = query.values.device
    tile = tile or tile_for(SCORES, arch_of(device), fp4=int(query.format == "fp4_index"))
    top_tile = top_tile or tile_for(TOP_K, arch_of(device))
    values, scales, unit_bytes = key_args(keys)
    columns = batch.block_table.shape[1]
    width = columns * keys.rows
    if batch.longest is not None:
        width = min(width, batch.longest // ratio)
    block, queries = tile.constants["BLOCK_N"], tile.constants["QUERIES"]
    stride = cdiv(max(width, 1), max(block, 16)) * max(block, 16)
    at_once = min(max(room // stride // queries, 1) * queries, max(tokens, 1))
    selected = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    is_scored = width > top_k
    scores = torch.empty(at_once * stride if is_scored else 1, dtype=torch.float32, device=device)
    for first in range(0, tokens, at_once):
        end = min(first + at_once, tokens)
        if is_scored:
            tiles = cdiv(width, block)
            chunk_scores_kernel[(cdiv(end - first, queries), cdiv(tiles, tile.constants["SPAN"]))](
                query.values, query.weight, scores, batch.positions, batch.sequence, batch.block_table, values, scales,
                unit_bytes // 16, unit_bytes // scales.element_size(), columns, keys.num_units, first, end, tiles,
                stride // 16, TOP_K=top_k, RATIO=ratio,
                **_scores_constants(query.format, heads, dim, keys.rows, tile), num_warps=tile.num_warps, num_stages=1,
                maxnreg=tile.constants["REGISTERS"] or None,
            )  # fmt: skip
        row_top_k_kernel[(end - first,)](
            scores, selected, batch.positions, batch.sequence, first, width, stride // 16, RATIO=ratio,
            **_top_k_constants(top_k, top_tile), num_warps=top_tile.num_warps, num_stages=1,
        )  # fmt: skip
    return selected


def key_args(keys: Rows) -> tuple[Tensor, Tensor, int]:
    """Return keys as kernels read them: values, scales of a row in a word, bytes from unit to unit.

    Raises ValueError if they are not 16-byte aligned.
    """
    values, scales, unit_bytes = row_args(keys)
    if values.data_ptr() % 16 or unit_bytes % 16:
        raise ValueError(
            f"keys {values.data_ptr() % 16} bytes off, units of {unit_bytes} bytes: wanted multiples of 16"
        )
    is_fp8 = keys.format == "fp8_index"
    word = torch.float32 if is_fp8 else {1: torch.uint8, 2: torch.int16, 4: torch.int32}[keys.width // FP4_GROUP]
    return values.view(torch.float8_e4m3fn if is_fp8 else torch.int32), scales.view(word), unit_bytes


def _scores_constants(fmt: str, heads: int, dim: int, rows: int, tile: Tile) -> dict[str, int]:
    padded = max(8, int(next_power_of_2(heads)))
    constants = {"H": heads, "HEADS": padded, "D": dim, "ROWS": rows, "FORMAT": FORMATS[fmt]}
    return constants | {name: value for name, value in tile.constants.items() if name != "REGISTERS"}


def _top_k_constants(k: int, tile: Tile) -> dict[str, int]:
    threads = 32 * tile.num_warps
    sizes = {"TILE": max(tile.constants["TILE"], 4 * threads), "BINS": min(4 * threads, MOST_BINS)}
    return {"K": k, "KP": int(next_power_of_2(k)), **sizes}


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate: DeepSeek-V4-Flash's indexer."""
    return [_scores_variant(fmt, arch) for fmt in FORMATS] + [_top_k_variant(arch)]


def _scores_variant(fmt: str, arch: str) -> Variant:
    is_fp8 = fmt == "fp8_index"
    tile = tile_for(SCORES, arch, fp4=int(not is_fp8))
    types = dict.fromkeys(chunk_scores_kernel.arg_names, "*i32") | dict.fromkeys(INTEGERS, "i32")
    types |= {"q_ptr": "*fp8e4nv" if is_fp8 else "*fp16"} | dict.fromkeys(("weight_ptr", "score_ptr"), "*fp32")
    if is_fp8:
        types |= {"key_ptr": "*fp8e4nv", "key_scale_ptr": "*fp32"}
    constants: dict[str, Any] = {**_scores_constants(fmt, 64, 128, 64, tile), "RATIO": 4, "TOP_K": 512}
    tensor = ("QMMA",) if is_fp8 else ("HMMA",)
    return _variant(SCORES, chunk_scores_kernel, types, constants, tile, tensor, INTEGERS)


def _top_k_variant(arch: str) -> Variant:
    tile = tile_for(TOP_K, arch)
    types = dict.fromkeys(row_top_k_kernel.arg_names, "*i32") | dict.fromkeys(ROW_INTEGERS, "i32")
    types |= {"score_ptr": "*fp32"}
    constants = {**_top_k_constants(512, tile), "RATIO": 4}
    return _variant(TOP_K, row_top_k_kernel, types, constants, tile, (), ROW_INTEGERS)


def _variant(
    op: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], tile: Tile, tensor: tuple[str, ...],
    unaligned: list[str],
) -> Variant:  # fmt: skip
    signature = {name: kind for name, kind in types.items() if name not in constants}
    registers = tile.constants.get("REGISTERS") or None
    return Variant(op, kernel, signature, constants, tile.num_warps, 1, tensor, None, unaligned, maxnreg=registers)
