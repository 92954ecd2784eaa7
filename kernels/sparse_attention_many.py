"""sparse_attention_decode for more than MANY tokens: which kernel takes them, its launch, and what is compiled.

Keys that tokens share, windows and all entries, are unpacked once for several tokens (sparse_attention_shared_triton);
a selection is a token's own (sparse_attention_token_triton, where there are products of warp groups). Neither splits a
token's keys: there are programs enough. Nothing that depends on the number of tokens, or on how they are cut into
sequences, is compiled in. A token's bits depend on its keys alone, but for which of the kernels takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import sparse_attention_shared_triton as shared
from kernels import sparse_attention_token_triton as own
from kernels.ragged import DecodeBatch
from kernels.row_load import key_rows, pointer_of
from kernels.rows import Rows
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import arch_of

OP = "sparse_attention_many"
MANY = 256  # tokens above which a step is cut here


def many_tile(
    device: torch.device, batch: DecodeBatch, new: Rows | None, *, selected: Tensor | None, batch_invariant: bool
) -> Tile | None:
    """Return the tile of a step of many tokens; None if sparse_attention_decode cuts it as it does few.

    So it does with rows that are not packed, and where every sequence has one token.
    """
    if batch.num_tokens <= MANY or new is None or new.format != "packed" or batch_invariant:
        return None
    return tile_for(OP, arch_of(device), own=int(selected is not None))


def is_many(tile: Tile) -> bool:
    """Return whether a tile is one of the kernels here."""
    return "MAX_SPLITS" not in tile.constants


def block_of(tile: Tile, heads: int) -> dict[str, int]:
    """Return the tile's constants for a number of heads: of R rows of queries, as many tokens as their heads leave."""
    c = tile.constants
    if "R" not in c:
        return {"BLOCK_H": c["BLOCK_H"], "BLOCK_N": c["BLOCK_N"]}
    block = 4
    while block < min(heads, c["R"]):
        block *= 2
    return {"BLOCK_T": c["R"] // block, "BLOCK_H": block, "BLOCK_N": c["BLOCK_N"]}


def attend_many(
    q: Tensor,
    out: Tensor,
    batch: DecodeBatch,
    window: Rows,
    tile: Tile,
    *,
    sink: Tensor | None,
    scale_log2e: float,
    turn: Tensor | None,
    compressed: Rows | None,
    ratio: int,
    selected: Tensor | None,
    new: Rows | None,
    lse: Tensor | None,
    pdl: bool,
) -> None:
    """Launch the tile's kernel; arguments as checked by sparse_attention_decode. turn: rotations as floats."""
    tokens, heads, dim = q.shape
    constants = block_of(tile, heads)
    is_shared = "R" in tile.constants
    if new is None or (is_shared and selected is not None):
        what = "keys that tokens share" if is_shared else "many tokens"
        raise ValueError(f"a tile for {what}: wanted this step's rows in `new`, and no selection where keys are shared")
    ring, fresh = key_rows(window), key_rows(new)
    pool = (None, None, 0, 0, 0) if compressed is None else key_rows(compressed)
    kernel, grid = own.token_kernel, (tokens, 1)
    counts = [0 if selected is None else selected.shape[1]]
    if is_shared:
        sequences = batch.slots.shape[0]
        kernel, grid = shared.shared_kernel, (2, tokens // constants["BLOCK_T"] + sequences + 1)
        counts = [tokens, sequences]
    kernel[(*grid, -(-heads // constants["BLOCK_H"]))](
        q, out, lse, sink, turn,
        batch.positions, batch.sequence, batch.starts, *((batch.query_start,) if is_shared else ()), batch.slots,
        batch.block_table, *(() if is_shared else (selected,)),
        ring[0], ring[1], fresh[0], fresh[1], pool[0], pool[1],
        ring[2], ring[3], ring[4], fresh[2], fresh[4], pool[2], pool[3], pool[4],
        scale_log2e, *counts,
        batch.block_table.shape[1], 0 if compressed is None else compressed.num_units, window.num_units,
        H=heads, D=dim, WINDOW=window.rows, RATIO=ratio if compressed is not None else 0,
        ROWS=1 if compressed is None else compressed.rows, PDL=pdl, **constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


# Of a layer: ratio, rows of a block.
_KINDS = {"selected": (4, 64), "visible": (128, 2), "window": (0, 1)}


def variants(arch: str) -> list[Variant]:
    """Return what a TP4 rank of DeepSeek-V4-Flash launches for a prompt."""
    return [_variant(arch, kind, heads=16) for kind in _KINDS]


def rare_variants(arch: str) -> list[Variant]:
    """Return other numbers of heads."""
    return [_variant(arch, kind, heads=heads) for kind in _KINDS for heads in (8, 32, 64)]


def _variant(arch: str, kind: str, *, heads: int, dim: int = 512) -> Variant:
    tile = tile_for(OP, arch, own=int(kind == "selected"))
    is_shared = "R" in tile.constants
    kernel = shared.shared_kernel if is_shared else own.token_kernel
    integers = shared.INTEGERS if is_shared else own.INTEGERS
    ratio, rows = _KINDS[kind]
    values, scales = pointer_of("packed")
    signature = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(integers, "i32")
    signature |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "scale_log2e": "fp32", "sink_ptr": "*fp32"}
    signature |= {"rotation_ptr": "*fp32"}
    for source in ("ring", "new", "pool"):
        signature |= {f"{source}_ptr": values, f"{source}_scale_ptr": scales}
    absent = ["lse_ptr"]
    absent += [] if kind != "window" else ["pool_ptr", "pool_scale_ptr"]
    absent += [] if kind == "selected" or is_shared else ["selected_ptr"]
    constants: dict[str, Any] = dict.fromkeys(absent) | {
        "H": heads, "D": dim, "WINDOW": 128, "RATIO": ratio, "ROWS": rows, "PDL": True, **block_of(tile, heads),
    }  # fmt: skip
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    return Variant(
        OP, kernel, signature, constants, tile.num_warps, tile.num_stages,
        bytes_per_program=tile.constants["BLOCK_N"] * (dim + 72), unaligned=integers,
    )  # fmt: skip
