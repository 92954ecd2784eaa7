"""Experts of a decode step, straight from four-bit weights: each expert that has tokens is read once.

    h[r] = weight[r] * silu(min(x[token r] W1^T, L)) * clamp(x[token r] W3^T, -L, L)      rows r of moe_routing.py, f16
    out[t] = sum over the token's k rows, in the order of its choices, of h[r] W2^T, then + add[t]

Three launches: both first products with the activation; the last product, rows apart; the sum. The first two take items
from a list that routing has made, (expert, block of weight rows), so an expert without tokens costs nothing. Nothing is
read back, sizes depend on the number of tokens alone, and sums have a fixed order: equal inputs give equal bits, and a
token's bits do not depend on the others but for how many tokens its experts have (8, or more).

Activations are f16 between the products: x comes from a norm, h from a clamped product of at most L^2 times its weight.
What f16 can't hold becomes NaN for its token alone. Weights are exact (moe_triton.py), sums float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.expert_weights import ExpertWeights, dequantize_experts, from_pieces
from kernels.moe_routing import MANY, Routing
from kernels.moe_triton import down_kernel, sum_kernel, up_kernel
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, arch_of, uses_triton

UP, DOWN, SUM = "moe_up", "moe_down", "moe_sum"
FORMATS = {"nvfp4": 0, "mxfp4": 1}
_SUM_BLOCK = 512


def experts_decode_reference(
    routing: Routing, w13: ExpertWeights, w2: ExpertWeights, *, limit: float, add: Tensor | None = None
) -> Tensor:
    """Return [T, H] float32. See experts_decode."""
    tokens = routing.ids.shape[0]
    x = from_pieces(routing.x).float()
    out = torch.zeros(tokens, w2.rows, device=x.device) if add is None else add.float().clone()
    for expert in sorted(set(routing.ids[routing.ids >= 0].tolist())):
        token, k = (routing.ids == expert).nonzero(as_tuple=True)
        one = torch.tensor([expert], device=x.device)
        first, last = dequantize_experts(w13.select(one))[0], dequantize_experts(w2.select(one))[0]
        gate, up = (x[token] @ first.T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        hidden = (hidden * routing.weights[token, k, None]).to(torch.float16).float()
        out.index_add_(0, token, torch.where(hidden.isinf(), math.nan, hidden) @ last.T)
    return out


def experts_decode(
    routing: Routing,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    limit: float,
    add: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    tiles: tuple[Sequence[Tile], Sequence[Tile]] | None = None,
) -> Tensor:
    """Return [T, H] of `out_dtype`: the weighted sum of each token's experts, 0 for padding, plus add.

    routing: of route_tokens, T tokens.   w13: 2 I rows of H channels, w2: H rows of I channels, of the same experts;
    formats may differ.   limit: of gate and value.   add: [T, H], as from a shared expert.   tiles: of the first and
    the last product, instead of the table's.
    """
    tokens, top_k = routing.ids.shape
    hidden, inner = w13.channels, w2.channels
    if w13.rows != 2 * inner or w2.rows != hidden or w13.experts != w2.experts or (w13.parts, w2.parts) != (2, 1):
        raise ValueError(
            f"w13 {w13.experts} x {w13.rows} x {w13.channels} in {w13.parts} parts, w2 {w2.experts} x {w2.rows} x "
            f"{w2.channels} in {w2.parts}: wanted E x 2I x H in 2 and E x H x I in 1"
        )
    if routing.x.shape[1] != hidden or not 0 < limit < math.inf:
        raise ValueError(f"rows of {routing.x.shape[1]} channels for experts of {hidden}, limit {limit}")
    if add is not None and (add.shape != (tokens, hidden) or not add.is_contiguous()):
        raise ValueError(f"add {tuple(add.shape)}, strides {add.stride()}: wanted contiguous {(tokens, hidden)}")
    if not uses_triton(routing.x):
        return experts_decode_reference(routing, w13, w2, limit=limit, add=add).to(out_dtype)
    out = torch.empty((tokens, hidden), dtype=out_dtype, device=routing.x.device)
    if not tokens:
        return out
    arch = arch_of(routing.x.device)
    first, last = tiles or (tiles_for(UP, arch, tokens), tiles_for(DOWN, arch, tokens))
    between = first_products(routing, w13, limit=limit, tiles=first)
    parts = last_product(routing, between, w2, tiles=last)
    pdl, launch = _pdl(routing.x.device)
    sum_kernel[(tokens, -(-hidden // _SUM_BLOCK))](
        out, parts, routing.ids, routing.rank, routing.first, add, H=hidden, TOP_K=top_k, BLOCK=_SUM_BLOCK, PDL=pdl, num_warps=4, num_stages=1,
        **launch,
    )  # fmt: skip
    return out


def first_products(routing: Routing, w13: ExpertWeights, *, limit: float, tiles: Sequence[Tile]) -> Tensor:
    """Return h [N, I] f16, rows in routing's order; those beyond its last row are not written.

    tiles: of the experts with many rows if there can be any, and then of those with few. A row's channels are in the
    order of to_products if its expert has many, else of to_pieces.
    """
    inner, rows, device = w13.rows // 2, routing.rows, routing.x.device
    between = torch.empty((rows, inner), dtype=torch.float16, device=device)
    sizes = {"H": w13.channels, "INNER": inner}
    for i, tile in enumerate(tiles):
        split = fit(tile, w13)["SPLIT"]
        shares = torch.empty((split, rows, w13.rows), device=device) if split > 1 else None
        counters = _counters(device, rows // (MANY + 1) * (w13.rows // 16)) if split > 1 else None
        x = routing.x_many if tile.constants["NB"] else routing.x
        given = (between, x, w13.codes, w13.scales, w13.factors, routing.token, routing.weight, routing.active)
        given = (*given, shares, counters, rows, rows * w13.rows, limit)
        _launch(up_kernel, given, w13, tile, rows=rows, sizes={**sizes, "SPLIT": split}, SECOND=i > 0)
    return between


def last_product(routing: Routing, between: Tensor, w2: ExpertWeights, *, tiles: Sequence[Tile]) -> Tensor:
    """Return h W2^T [N, H] float32, rows in routing's order; those beyond its last row are not written."""
    parts = torch.empty((routing.rows, w2.rows), dtype=torch.float32, device=routing.x.device)
    given = (parts, between, w2.codes, w2.scales, w2.factors, routing.active)
    sizes = {"H": w2.rows, "INNER": w2.channels}
    for i, tile in enumerate(tiles):
        order = {"FIRST": i < len(tiles) - 1, "SECOND": i > 0}
        _launch(down_kernel, given, w2, tile, rows=routing.rows, sizes=sizes, **order)
    return parts


def _launch(
    kernel: Any, given: tuple[Any, ...], weights: ExpertWeights, tile: Tile, *, rows: int, sizes: dict[str, int],
    **order: bool,
) -> None:  # fmt: skip
    cut = fit(tile, weights)
    split = cut.pop("SPLIT")
    most = rows // (MANY + 1) if cut["NB"] else min(weights.experts, rows)  # experts that can have such rows
    pdl, launch = _pdl(weights.codes.device)
    limit = {"maxnreg": tile.constants["REGISTERS"]} if tile.constants["REGISTERS"] else {}
    kernel[(max(1, most * (weights.rows // (16 * cut["R"] * cut["RS"])) * split),)](
        *given, PACKED=weights.packed_steps, FORMAT=FORMATS[weights.format], PDL=pdl, **sizes, **cut, **order,
        num_warps=cut["KS"] * cut["RS"], num_stages=tile.num_stages, **limit, **launch,
    )  # fmt: skip


def tiles_for(op: str, arch: str, tokens: int) -> tuple[Tile, ...]:
    """Return the table's tiles for experts with many rows, if there can be any, and for those with few."""
    few = tile_for(op, arch, tokens=tokens)
    return (tile_for(f"{op}_many", arch), few) if tokens > MANY else (few,)


def _pdl(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def fit(tile: Tile, weights: ExpertWeights) -> dict[str, int]:
    """Return the kernel's constants for a matrix, smaller than the tile's where it does not divide the matrix.

    R: tiles of 16 rows a warp.   KS: warps that share the channels.   RS: warps that take different rows.   S: steps of
    64 channels at once.   PAIR_S: the same for 9 to 16 rows of an expert, or 0.   NB: rows at once, in eights, for the
    experts with many; 0: for the others.   SPLIT: programs that share the channels, where NB is not 0.
    """
    return _fit(tile, rows=weights.rows, channels=weights.channels, packed=weights.packed_steps)


def _fit(tile: Tile, *, rows: int, channels: int, packed: int) -> dict[str, int]:
    c = {name: value for name, value in tile.constants.items() if name != "REGISTERS"}
    steps, tiles = channels // 64, rows // 16
    c["KS"], c["SPLIT"] = math.gcd(c["KS"], steps), math.gcd(c["SPLIT"], steps)
    share = math.gcd(packed, steps // (c["KS"] * c["SPLIT"]))
    c |= {name: math.gcd(c[name], share) for name in ("S", "PAIR_S") if c[name]}
    c["RS"] = math.gcd(c["RS"], tiles)
    c["R"] = math.gcd(c["R"], tiles // c["RS"])
    return c


@functools.cache
def _counters(device: torch.device, number: int) -> Tensor:
    """Return at least `number` counters that are zero between calls: the last program to count puts them back."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("first call of experts_decode inside a graph capture: call it once before")
    return torch.zeros(number, dtype=torch.int32, device=device)


# What the offline gate compiles: DeepSeek-V4-Flash's experts, by tensor parallelism 4, for both formats.
_TOKENS = (1, 8, 16, 128, 256)
_HIDDEN, _INNER = 4096, 512
_SUMS: list[tuple[str, str | None]] = [("*fp32", None), ("*fp32", "*fp32"), ("*bf16", "*bf16")]


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate."""
    found: dict[str, Variant] = {}
    for op in (UP, DOWN):
        for tiles in (tiles_for(op, arch, tokens) for tokens in _TOKENS):
            for i, tile in enumerate(tiles):
                order = {"SECOND": i > 0} | ({"FIRST": i < len(tiles) - 1} if op == DOWN else {})
                for fmt in FORMATS:
                    variant = _variant(op, fmt, tile, order)
                    found.setdefault(repr((op, variant.constants, variant.maxnreg)), variant)
    for out, add in _SUMS:
        signature = {"out_ptr": out, "part_ptr": "*fp32", "ids_ptr": "*i32", "rank_ptr": "*i32", "first_ptr": "*i32"}
        signature |= {"add_ptr": add} if add else {}
        fixed: dict[str, Any] = {"H": _HIDDEN, "TOP_K": 6, "BLOCK": _SUM_BLOCK, "PDL": True}
        fixed |= {} if add else {"add_ptr": None}
        found[f"sum {out} {add}"] = Variant(SUM, sum_kernel, signature, fixed, 4, 1, tensor_ops=())
    return list(found.values())


def _variant(op: str, fmt: str, tile: Tile, order: dict[str, bool]) -> Variant:
    kernel, rows, channels = (up_kernel, 2 * _INNER, _HIDDEN) if op == UP else (down_kernel, _HIDDEN, _INNER)
    cut = _fit(tile, rows=rows, channels=channels, packed=4)
    split = cut.pop("SPLIT")
    signature = dict.fromkeys(kernel.arg_names, "*i32")
    signature |= {"hidden_ptr": "*fp16", "x_ptr": "*fp16", "part_ptr": "*fp32", "weight_ptr": "*fp32"}
    signature |= {"scales_ptr": "*i16", "factors_ptr": "*fp32", "limit": "fp32", "capacity": "i32"}
    signature |= {"share_ptr": "*fp32", "share_size": "i32"}
    fixed: dict[str, Any] = {"H": _HIDDEN, "INNER": _INNER, "PACKED": 4, "FORMAT": FORMATS[fmt], "PDL": True}
    fixed |= cut | order
    if op == UP:
        fixed |= {"SPLIT": split} | ({} if split > 1 else {"share_ptr": None, "counter_ptr": None})
    return Variant(
        op,
        kernel,
        {name: signature[name] for name in kernel.arg_names if name not in fixed},
        fixed,
        cut["KS"] * cut["RS"],
        tile.num_stages,
        maxnreg=tile.constants["REGISTERS"] or None,
        weight_columns=8 * max(1, cut["NB"]),
        unaligned=("capacity", "share_size") if op == UP else (),
    )
