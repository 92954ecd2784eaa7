"""What the offline gate compiles of a hyper-connection's two launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kernels.hyper_chunk_triton import finish_chunk_kernel, spread_chunk_kernel
from kernels.hyper_connection_chunk import FINISH_CHUNK, SPREAD_CHUNK, columns
from kernels.hyper_connection_decode import ADDED, FINISH, SPREAD, SUMMED, warps_of
from kernels.hyper_finish_triton import finish_kernel
from kernels.hyper_spread_triton import spread_kernel
from kernels.tiles import Tile, Variant, tiles_of

# DeepSeek-V4-Flash. (rows of fn, dtype of y) of the first launch; None: no spread;
# _EXPERTS: rows of six experts, to which bfloat16 is added.
_STREAMS, _HIDDEN, _ITERS, _TOP_K, _EXPERTS = 4, 4096, 20, 6, "experts"
_STEP = (*((24, y) for y in ("*bf16", _EXPERTS, None)), (4, _EXPERTS))
_OTHERS = ((24, "*fp32"), (4, "*fp32"), (4, None), (0, "*fp32"), (0, _EXPERTS))


def variants(arch: str) -> list[Variant]:
    """Return what decode steps and chunks launch, for the offline gate: bfloat16 streams, 4 of 4096."""
    spreads = tiles_of(SPREAD, arch)
    found = [_spread_variant(tile, rows, y) for tile in spreads for rows, y in _STEP]
    left = sorted({ADDED // tile.constants["L"] for tile in spreads})
    found += [_finish_variant(tile, rows, one) for tile in tiles_of(FINISH, arch) for rows in (24, 4) for one in left]
    return [*found, *_chunk_variants(arch, ((24, "*bf16"), (24, "*fp32"), (24, None)), finishes=(24,))]


def rare_variants(arch: str) -> list[Variant]:
    """Return what other steps launch besides: of many tokens, and where the head has tokens of its own."""
    found = [_spread_variant(tile, rows, y) for tile in tiles_of(SPREAD, arch) for rows, y in _OTHERS]
    return [*found, *_chunk_variants(arch, ((4, "*fp32"), (4, None), (0, "*fp32")), finishes=(4,))]


def _spread_variant(tile: Tile, rows: int, y: str | None) -> Variant:
    is_experts = y == _EXPERTS
    padded = rows != 0 or is_experts
    signature = {"out_ptr": "*bf16", "part_ptr": "*fp32", "streams_ptr": "*bf16", "token_stride": "i32"}
    signature |= {"stream_stride": "i32", "y_ptr": "*fp32" if is_experts else y or ""}
    signature |= dict.fromkeys(("ids_ptr", "rank_ptr", "first_ptr"), "*i32")
    signature |= {"add_ptr": "*bf16", "carry_ptr": "*fp32", "fn_ptr": "*fp32"}
    signature |= {"sequence_ptr": "*i32", "tokens": "i32", "eps": "fp32"}
    fixed: dict[str, Any] = {"H": _HIDDEN, "N": _STREAMS, "ROWS": rows, "ITERS": _ITERS if y else 0}
    fixed |= {"COLUMNS": columns(rows), **tile.constants, "SPREAD": y is not None}
    fixed |= {"TOP_K": _TOP_K if is_experts else 0, "PDL": True}
    absent = (() if y else ("out_ptr", "y_ptr", "carry_ptr")) + (() if rows else ("part_ptr", "fn_ptr"))
    absent += () if is_experts else ("ids_ptr", "rank_ptr", "first_ptr", "add_ptr")
    fixed |= dict.fromkeys(absent + (() if padded else ("sequence_ptr",)))
    return Variant(
        SPREAD,
        spread_kernel,
        {name: kind for name, kind in signature.items() if name not in fixed},
        fixed,
        tile.num_warps,
        1,
        tensor_ops=("HMMA",) if rows else (),
        unaligned=("tokens",),
    )


def _finish_variant(tile: Tile, rows: int, added: int) -> Variant:
    warps = warps_of(tile, hidden=_HIDDEN)
    signature = dict.fromkeys(finish_kernel.arg_names, "*fp32")
    signature |= {"x_ptr": "*bf16", "streams_ptr": "*bf16", "sequence_ptr": "*i32", "eps": "fp32", "norm_eps": "fp32"}
    signature |= {"token_stride": "i32", "stream_stride": "i32"}
    fixed: dict[str, Any] = {"H": _HIDDEN, "N": _STREAMS, "SUMS": _HIDDEN // SUMMED, "ADDED": added}
    fixed |= {"COLUMNS": columns(rows), "BLOCK": 32 * warps, "PDL": True}
    if rows == _STREAMS:
        fixed["carry_ptr"], signature["x_ptr"] = None, "*fp32"
    return Variant(
        FINISH,
        finish_kernel,
        {name: signature[name] for name in finish_kernel.arg_names if name not in fixed},
        fixed,
        warps,
        1,
        tensor_ops=(),
    )


def _chunk_variants(arch: str, spreads: Sequence[tuple[int, str | None]], *, finishes: Sequence[int]) -> list[Variant]:
    """spreads: rows of fn and dtype of y, as above.   finishes: rows of fn."""
    found = []
    for tile, (rows, y) in itertools.product(tiles_of(SPREAD_CHUNK, arch), spreads):
        signature = dict.fromkeys(spread_chunk_kernel.arg_names, "*bf16") | dict.fromkeys(("token_stride",), "i32")
        signature |= {"stream_stride": "i32", "tokens": "i32", "part_ptr": "*fp32", "carry_ptr": "*fp32"}
        signature |= {"fn_ptr": "*fp32", "sequence_ptr": "*i32", "y_ptr": y or ""}
        fixed: dict[str, Any] = {"H": _HIDDEN, "N": _STREAMS, "ROWS": rows, "COLUMNS": columns(rows)}
        fixed |= {"SPREAD": y is not None, **tile.constants, "PDL": True}
        absent = (() if y else ("out_ptr", "y_ptr", "carry_ptr")) + (() if rows else ("part_ptr", "fn_ptr"))
        fixed |= dict.fromkeys(absent)
        types = {name: signature[name] for name in spread_chunk_kernel.arg_names if name not in fixed}
        tensor_ops = ("HMMA",) if rows else ()
        found.append(
            Variant(
                SPREAD_CHUNK, spread_chunk_kernel, types, fixed, tile.num_warps, 1, tensor_ops, unaligned=("tokens",)
            )
        )
    sums = {-(-_HIDDEN // tile.constants["SPAN"]) for tile in tiles_of(SPREAD_CHUNK, arch)}
    for tile, rows, one in itertools.product(tiles_of(FINISH_CHUNK, arch), finishes, sorted(sums)):
        signature = dict.fromkeys(finish_chunk_kernel.arg_names, "*fp32") | {"x_ptr": "*bf16", "streams_ptr": "*bf16"}
        signature |= {"sequence_ptr": "*i32", "eps": "fp32", "norm_eps": "fp32"}
        signature |= dict.fromkeys(("token_stride", "stream_stride", "tokens"), "i32")
        fixed = {"H": _HIDDEN, "N": _STREAMS, "ITERS": _ITERS, "SUMS": one, "COLUMNS": columns(rows)}
        fixed |= tile.constants
        if rows == _STREAMS:
            fixed |= {"carry_ptr": None, "ITERS": 0}
            signature["x_ptr"] = "*fp32"
        types = {name: signature[name] for name in finish_chunk_kernel.arg_names if name not in fixed}
        found.append(
            Variant(FINISH_CHUNK, finish_chunk_kernel, types, fixed, tile.num_warps, 1, (), unaligned=("tokens",))
        )
    return found
