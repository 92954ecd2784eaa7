"""What the offline gate compiles of cache_write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cache_write_decode import ONE_TOKEN, SEVERAL_TOKENS
from kernels.cache_write_triton import UNALIGNED, UNSPECIALIZED, cache_write_kernel, constants_of
from kernels.rows import Rows
from kernels.tiles import Tile, Variant, tiles_of

_SIGNATURE = {
    "tokens": "i32", "positions": "*i32", "sequence": "*i32", "starts": "*i32", "query_start": "*i32", "slots": "*i32",
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
    """Return what is shipped of cache_write: packed rows of the model's head size."""
    several = [name for name in _KINDS if name != _RARE]
    return [*_variants(arch, list(_KINDS), ONE_TOKEN), *_variants(arch, several, SEVERAL_TOKENS)]


def rare_variants(arch: str) -> list[Variant]:
    """Return those of several tokens a sequence with FP4 index keys."""
    return _variants(arch, [_RARE], SEVERAL_TOKENS)


def _variants(arch: str, names: Sequence[str], op: str) -> list[Variant]:
    return [_variant(name, *_KINDS[name], tile, op == ONE_TOKEN) for name in names for tile in tiles_of(op, arch)]


def _variant(name: str, ratio: int, index: str | None, tile: Tile, single: bool) -> Variant:
    keys = None if index is None else Rows(index, 128, torch.empty(0))
    values = constants_of(
        "packed", 512, 64, ratio, tile, rows=128, pool_rows=256 // ratio if ratio else 0, index=keys,
        hadamard=index == "fp4_index", staged=not single, index_heads=64 if index else 0, queries=True, single=single,
        pdl=True,
    )  # fmt: skip
    left_out = [
        *(("tokens",) if single else ()),
        *(() if ratio else (*_MAIN, "entry_rotation")),
        *(() if index else (*_INDEX, *_READY)),
    ]
    signature = _SIGNATURE | {"ready": "*fp16" if index == "fp4_index" else "*i16"}
    return Variant(
        op=f"cache_write {name}{'' if single else ', several tokens'}",
        kernel=cache_write_kernel,
        signature={arg: kind for arg, kind in signature.items() if arg not in left_out},
        constants={**values, **dict.fromkeys(left_out)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        tensor_ops=(),
        maxnreg=tile.constants["REGISTERS"] or None,
        unaligned=tuple(arg for arg in (*UNALIGNED, *UNSPECIALIZED) if arg not in left_out),
    )
