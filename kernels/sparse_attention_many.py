"""sparse_attention_decode for more than MANY tokens: the launch of its kernel, and what is compiled.

A token's keys are not split: there are programs enough. Nor are they shared, not even those that all tokens see: to
unpack windows and entries once for several tokens was slower, since their rows of queries then are the products' short
side. Nothing that depends on the number of tokens, or on how they are cut into sequences, is compiled in. A token's
bits depend on its keys alone, but for which of the kernels takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.ragged import DecodeBatch
from kernels.row_load import key_rows, pointer_of
from kernels.rows import Rows
from kernels.sparse_attention_token_triton import INTEGERS, token_kernel
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import arch_of

OP = "sparse_attention_many"
MANY = 256  # tokens above which a step is cut here


def many_tile(device: torch.device, batch: DecodeBatch, new: Rows | None, *, batch_invariant: bool) -> Tile | None:
    """Return the tile of a step of many tokens; None if sparse_attention_decode cuts it as it does few.

    So it does with rows that are not packed, and where every sequence has one token.
    """
    if batch.num_tokens <= MANY or new is None or new.format != "packed" or batch_invariant:
        return None
    return tile_for(OP, arch_of(device))


def is_many(tile: Tile) -> bool:
    """Return whether a tile is one of the kernel here."""
    return "MAX_SPLITS" not in tile.constants


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
    if new is None:
        raise ValueError("a tile for many tokens: wanted this step's rows in `new`")
    ring, fresh = key_rows(window), key_rows(new)
    pool = (None, None, 0, 0, 0) if compressed is None else key_rows(compressed)
    token_kernel[(tokens, 1, -(-heads // tile.constants["BLOCK_H"]))](
        q, out, lse, sink, turn,
        batch.positions, batch.sequence, batch.starts, batch.slots, batch.block_table, selected,
        ring[0], ring[1], fresh[0], fresh[1], pool[0], pool[1],
        ring[2], ring[3], ring[4], fresh[2], fresh[4], pool[2], pool[3], pool[4],
        scale_log2e, 0 if selected is None else selected.shape[1],
        batch.block_table.shape[1], 0 if compressed is None else compressed.num_units, window.num_units,
        H=heads, D=dim, WINDOW=window.rows, RATIO=ratio if compressed is not None else 0,
        ROWS=1 if compressed is None else compressed.rows, PDL=pdl, **tile.constants,
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
    tile = tile_for(OP, arch)
    ratio, rows = _KINDS[kind]
    values, scales = pointer_of("packed")
    signature = dict.fromkeys(token_kernel.arg_names, "*i32") | dict.fromkeys(INTEGERS, "i32")
    signature |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "scale_log2e": "fp32", "sink_ptr": "*fp32"}
    signature |= {"rotation_ptr": "*fp32"}
    for source in ("ring", "new", "pool"):
        signature |= {f"{source}_ptr": values, f"{source}_scale_ptr": scales}
    absent = ["lse_ptr"]
    absent += [] if kind != "window" else ["pool_ptr", "pool_scale_ptr"]
    absent += [] if kind == "selected" else ["selected_ptr"]
    constants: dict[str, Any] = dict.fromkeys(absent) | {
        "H": heads, "D": dim, "WINDOW": 128, "RATIO": ratio, "ROWS": rows, "PDL": True, **tile.constants,
    }  # fmt: skip
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    return Variant(
        OP, token_kernel, signature, constants, tile.num_warps, tile.num_stages,
        bytes_per_program=tile.constants["BLOCK_N"] * (dim + 72), unaligned=INTEGERS,
    )  # fmt: skip
