"""Experts of many tokens, straight from four-bit weights: h and out of moe_decode.py, where rows are sorted.

Programs have a block of up to BLOCK_ROWS rows of an expert (moe_routing.py) and unpack weights once for all of them.
Experts with more rows have more blocks, so no program has more to do than another; what they read again lies in L2.
Nothing is read back. Sums have a fixed order: equal inputs give equal bits, and a token's bits depend on nothing of the
others but whether there are more than SORTED of them.

Rows of all tokens in float32 are 98 KB a token (6 experts, 4096 channels). `sums` never has all at once: the last
product and the sums take as many channels at a time as PARTS_BYTES hold. Beside that there are h, 6 KB a token of 512
inner channels, and x in f16, 8 KB.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels.expert_weights import FORMATS, ExpertWeights
from kernels.moe_blocks_triton import down_blocks_kernel, sum_blocks_kernel, up_blocks_kernel
from kernels.moe_routing import BLOCK_ROWS, Routing
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import arch_of

UP, DOWN, SUM = "moe_up_blocks", "moe_down_blocks", "moe_sum_blocks"
PARTS_BYTES = 192 << 20
_SUMMED, _SUM_WARPS = 1024, 8  # channels of a program, and its warps


def first_products(routing: Routing, w13: ExpertWeights, *, limit: float, lift: float, tile: Tile | None) -> Tensor:
    """Return h [N, I] f16, lifted, channels in the order of to_products; rows beyond routing's last are not written."""
    inner = w13.rows // 2
    between = torch.empty((routing.rows, inner), dtype=torch.float16, device=routing.x.device)
    tile = tile or tile_for(UP, arch_of(between.device))
    cut = fit(tile, w13, w13.rows)
    items = w13.rows // (16 * cut["R"] * cut["W"])
    up_blocks_kernel[(blocks_of(routing) * items,)](
        between, routing.x, w13.codes, w13.scales, w13.factors, routing.token, routing.weight, routing.active, limit,
        lift, H=w13.channels, INNER=inner, **cut, **_launch(tile, cut),
    )  # fmt: skip
    return between


def last_product(
    routing: Routing, between: Tensor, w2: ExpertWeights, *, unlift: float, tile: Tile | None, first: int = 0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return unlift h W2^T [N, C] float32 of channels first to first + C - 1, multiples of 16; of all without out.

    Rows beyond routing's last are not written.
    """
    if out is None:
        out = routing.new_parts(w2.rows)
    channels = out.shape[1]
    tile = tile or tile_for(DOWN, arch_of(between.device))
    cut = fit(tile, w2, math.gcd(channels, w2.rows))
    items = channels // (16 * cut["R"] * cut["W"])
    down_blocks_kernel[(blocks_of(routing) * items,)](
        out, between, w2.codes, w2.scales, w2.factors, routing.active, unlift, first // 16, channels // 16, H=w2.rows,
        INNER=w2.channels, **cut, **_launch(tile, cut),
    )  # fmt: skip
    return out


def sums(
    routing: Routing, between: Tensor, w2: ExpertWeights, *, unlift: float, add: Tensor | None, out_dtype: torch.dtype,
    tile: Tile | None, parts_bytes: int = PARTS_BYTES,
) -> Tensor:  # fmt: skip
    """Return expert_parts.add_up of last_product [T, H], with the same bits. add: [T, H], contiguous."""
    (tokens, top_k), hidden = routing.ids.shape, w2.rows
    out = torch.empty((tokens, hidden), dtype=out_dtype, device=between.device)
    channels = channels_at_once(routing.rows, hidden, parts_bytes)
    parts = routing.new_parts(channels)
    for first in range(0, hidden, channels):
        last_product(routing, between, w2, unlift=unlift, tile=tile, first=first, out=parts)
        sum_blocks_kernel[(tokens, -(-channels // _SUMMED))](
            out, parts, routing.ids, routing.rank, routing.first, add, first // 16, channels // 16, H=hidden,
            TOP_K=top_k, BLOCK=_SUMMED, num_warps=_SUM_WARPS, num_stages=1,
        )  # fmt: skip
    return out


def channels_at_once(rows: int, hidden: int, parts_bytes: int = PARTS_BYTES) -> int:
    """Return the most channels of so many rows that fit into parts_bytes: hidden, halved while it stays a tile's."""
    channels = hidden
    while rows * channels * 4 > parts_bytes and channels % 256 == 0:
        channels //= 2
    return channels


def blocks_of(routing: Routing) -> int:
    """Return how many blocks there can be."""
    return (routing.active.shape[0] - 4) // 4


def fit(tile: Tile, weights: ExpertWeights, rows: int) -> dict[str, int]:
    """Return the kernel's constants for a matrix of which a launch takes multiples of `rows` rows.

    W: warps, which take different rows.   R: tiles of 16 rows a warp.   NB: rows of a block at once, in eights.   S:
    steps of 64 channels at once.   AHEAD: how often as many are on their way.
    """
    return _fit(tile, rows, weights.channels // 64, weights.packed_steps) | {
        "PACKED": weights.packed_steps,
        "FORMAT": FORMATS[weights.format],
    }


def _fit(tile: Tile, rows: int, steps: int, packed: int) -> dict[str, int]:
    c = {name: value for name, value in tile.constants.items() if name != "REGISTERS"}
    c["W"] = math.gcd(c["W"], rows // 16)
    c["R"] = math.gcd(c["R"], rows // 16 // c["W"])
    c["S"] = math.gcd(c["S"], packed, steps)
    c["AHEAD"] = math.gcd(c["AHEAD"], steps // c["S"])
    c["NB"] = min(c["NB"], BLOCK_ROWS // 8)
    return c


def _launch(tile: Tile, cut: dict[str, int]) -> dict[str, int]:
    most = {"maxnreg": tile.constants["REGISTERS"]} if tile.constants["REGISTERS"] else {}
    return {"num_warps": cut["W"], "num_stages": tile.num_stages, **most}


# What the offline gate compiles: DeepSeek-V4-Flash's experts, by tensor parallelism 4, for both formats.
_HIDDEN, _INNER, _TOP_K = 4096, 512, 6


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`: both products of both formats, a model's sums."""
    found = [_variant(op, fmt, tile_for(op, arch)) for op in (UP, DOWN) for fmt in FORMATS]
    return [*found, _sum_variant("*fp32", "*bf16")]


def rare_variants(arch: str) -> list[Variant]:
    """Return sums of other types, or with nothing added."""
    return [_sum_variant(*types) for types in (("*fp32", None), ("*fp32", "*fp32"), ("*bf16", "*bf16"))]


def _variant(op: str, fmt: str, tile: Tile) -> Variant:
    kernel, rows, channels = (
        (up_blocks_kernel, 2 * _INNER, _HIDDEN) if op == UP else (down_blocks_kernel, _HIDDEN, _INNER)
    )
    cut = _fit(tile, math.gcd(rows, 1024), channels // 64, 4)
    fixed: dict[str, Any] = {"H": _HIDDEN, "INNER": _INNER, "PACKED": 4, "FORMAT": FORMATS[fmt], **cut}
    signature = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(("hidden_ptr", "x_ptr"), "*fp16")
    signature |= {"scales_ptr": "*i16"} | dict.fromkeys(("part_ptr", "weight_ptr", "factors_ptr"), "*fp32")
    signature |= dict.fromkeys(("limit", "lift", "unlift"), "fp32") | dict.fromkeys(("first_tile", "tiles"), "i32")
    return Variant(
        op,
        kernel,
        {name: signature[name] for name in kernel.arg_names if name not in fixed},
        fixed,
        cut["W"],
        tile.num_stages,
        maxnreg=tile.constants["REGISTERS"] or None,
        has_packed_weights=True,
        unaligned=("first_tile", "tiles") if op == DOWN else (),
    )


def _sum_variant(out: str, add: str | None) -> Variant:
    signature = dict.fromkeys(sum_blocks_kernel.arg_names, "*i32") | {"out_ptr": out, "part_ptr": "*fp32"}
    signature |= {"add_ptr": add or ""} | dict.fromkeys(("first_tile", "tiles"), "i32")
    fixed: dict[str, Any] = {"H": _HIDDEN, "TOP_K": _TOP_K, "BLOCK": _SUMMED} | ({} if add else {"add_ptr": None})
    signature = {name: kind for name, kind in signature.items() if name not in fixed}
    return Variant(
        SUM, sum_blocks_kernel, signature, fixed, _SUM_WARPS, 1, tensor_ops=(), unaligned=("first_tile", "tiles")
    )
