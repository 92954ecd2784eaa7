"""Experts straight from four-bit weights: each expert that has tokens is read once.

    h[r] = weight[r] * silu(min(x[token r] W1^T, L)) * clamp(x[token r] W3^T, -L, L)      rows r of moe_routing.py, f16
    out[t] = sum over the token's k rows, in the order of its choices, of h[r] W2^T, then + add[t]

Two launches: both first products with the activation; the last product, rows apart. Adding these up is a third one, or
work of whoever reads them (expert_parts.py). Both take items from a list that routing has made, (expert, block of
weight rows), so an expert without tokens costs nothing; experts with many rows come first, and programs share the
channels of their first products. Nothing is read back, sizes depend on the number of tokens alone, and sums have a
fixed order: equal inputs give equal bits, and a token's bits depend on nothing of the others but how many there are
(which tile) and how many chose its experts (8, MANY, or more).

Activations are f16 between the products: x comes from a norm, h from a clamped product of at most L^2 times its weight,
lifted by a power of two so that small ones keep their digits. What f16 can't hold becomes NaN for its token alone.
Weights are exact (moe_weights_triton.py), sums float32.

Many tokens, whose rows come sorted, have kernels of their own: moe_blocks.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import moe_blocks
from kernels.expert_parts import ExpertParts, add_up, add_up_reference, check_add
from kernels.expert_weights import FORMATS, ExpertWeights, dequantize_experts, from_pieces, from_products
from kernels.launch_order import ASIDE, CHAIN, IN_CHAIN, Order
from kernels.moe_routing import MANY, MAX_TOKENS, Routing
from kernels.moe_triton import down_kernel, up_kernel
from kernels.scratch import zeros
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, arch_of, sm_count, uses_triton

UP, DOWN = "moe_up", "moe_down"


def expert_parts_reference(
    routing: Routing, w13: ExpertWeights, w2: ExpertWeights, *, limit: float, add: Tensor | None = None
) -> ExpertParts:
    """See expert_parts."""
    x = (from_products if routing.is_sorted else from_pieces)(routing.x).float()
    parts = torch.zeros(routing.rows, w2.rows, device=x.device)
    last_expert = routing.first_expert + w13.experts
    is_here = (routing.ids >= routing.first_expert) & (routing.ids < last_expert)
    for expert in sorted(set(routing.ids[is_here].tolist())):
        token, k = (routing.ids == expert).nonzero(as_tuple=True)
        one = torch.tensor([expert - routing.first_expert], device=x.device)
        first, last = dequantize_experts(w13.select(one))[0], dequantize_experts(w2.select(one))[0]
        gate, up = (x[token] @ first.T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        hidden = (hidden * (routing.weights[token, k, None] * lift_of(limit))).to(torch.float16).float()
        rows = routing.first[expert] + routing.rank[token, k]
        parts[rows] = torch.where(hidden.isinf(), math.nan, hidden / lift_of(limit)) @ last.T
    return ExpertParts(parts, routing.ids, routing.rank, routing.first, add)


def experts_decode_reference(
    routing: Routing, w13: ExpertWeights, w2: ExpertWeights, *, limit: float, add: Tensor | None = None
) -> Tensor:
    """Return [T, H] float32. See experts_decode."""
    return add_up_reference(expert_parts_reference(routing, w13, w2, limit=limit, add=add))


def experts_decode(
    routing: Routing,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    limit: float,
    add: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Return [T, H] of `out_dtype`: the weighted sum of each token's experts, 0 for padding, plus add.

    The arguments are those of expert_parts, which of many tokens fills N x H x 4 bytes more than this.
    """
    _check(routing, w13, w2, limit)
    if uses_triton(routing.x) and routing.is_sorted:
        check_add(add, routing.ids.shape[0], w2.rows)
        up, down = tiles or (None, None)
        between = moe_blocks.first_products(routing, w13, limit=limit, lift=lift_of(limit), tile=up)
        unlift = 1 / lift_of(limit)
        return moe_blocks.sums(routing, between, w2, unlift=unlift, add=add, out_dtype=out_dtype, tile=down)
    return add_up(expert_parts(routing, w13, w2, limit=limit, add=add, tiles=tiles), out_dtype=out_dtype)


def expert_parts(
    routing: Routing,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    limit: float,
    add: Tensor | None = None,
    tiles: tuple[Tile, Tile] | None = None,
    order: Order = IN_CHAIN,
) -> ExpertParts:
    """Return each token's weighted experts, not yet added up, beside what is added to them.

    routing: of route_tokens, T tokens.   w13: 2 I rows of H channels, w2: H rows of I channels, of the same experts;
    formats may differ.   limit: of gate and value.   add: [T, H], as from a shared expert.   tiles: of the first and
    the last product, instead of the table's.   order: of the first product (launch_order.py); aside, what routing says
    must be older than the launch that leads. Calls of one stream share counters (scratch.py). Raises ValueError for
    what does not fit together.
    """
    _check(routing, w13, w2, limit)
    hidden = w13.channels
    if not uses_triton(routing.x):
        return expert_parts_reference(routing, w13, w2, limit=limit, add=add)
    if not routing.rows:
        parts = torch.empty((0, hidden), device=routing.x.device)
        return ExpertParts(parts, routing.ids, routing.rank, routing.first, add)
    if routing.is_sorted:  # takes no order: these launches let none begin early, and begin when all have ended
        up, down = tiles or (None, None)
        between = moe_blocks.first_products(routing, w13, limit=limit, lift=lift_of(limit), tile=up)
        parts = moe_blocks.last_product(routing, between, w2, unlift=1 / lift_of(limit), tile=down)
        return ExpertParts(parts, routing.ids, routing.rank, routing.first, add)
    tokens, arch = routing.ids.shape[0], arch_of(routing.x.device)
    first, last = tiles or (tile_for(UP, arch, tokens=tokens), tile_for(DOWN, arch, tokens=tokens))
    between = first_products(routing, w13, limit=limit, tile=first, order=order)
    parts = last_product(routing, between, w2, unlift=1 / lift_of(limit), tile=last)
    return ExpertParts(parts, routing.ids, routing.rank, routing.first, add)


def _check(routing: Routing, w13: ExpertWeights, w2: ExpertWeights, limit: float) -> None:
    hidden, inner = w13.channels, w2.channels
    if w13.rows != 2 * inner or w2.rows != hidden or w13.experts != w2.experts or (w13.parts, w2.parts) != (2, 1):
        raise ValueError(
            f"w13 {w13.experts} x {w13.rows} x {w13.channels} in {w13.parts} parts, w2 {w2.experts} x {w2.rows} x "
            f"{w2.channels} in {w2.parts}: wanted E x 2I x H in 2 and E x H x I in 1"
        )
    if routing.x.shape[1] != hidden or not 0 < limit < math.inf:
        raise ValueError(f"rows of {routing.x.shape[1]} channels for experts of {hidden}, limit {limit}")
    if routing.first.shape[0] != w13.experts and not routing.is_partial:
        raise ValueError(f"routing among {routing.first.shape[0]} experts, weights of {w13.experts}")


def lift_of(limit: float) -> float:
    """Return the power of two by which h is multiplied while it is f16: 4 L^2 times it are below 2^16."""
    return float(2.0 ** min(max(math.floor(math.log2(65504 / (4 * limit * limit))), 0), 14))


def first_products(
    routing: Routing, w13: ExpertWeights, *, limit: float, tile: Tile, order: Order = IN_CHAIN
) -> Tensor:
    """Return h [N, I] f16, lifted, rows in routing's order; those beyond its last row are not written.

    A row's channels are in the order of to_products if its expert has many rows, else of to_pieces.
    """
    inner, rows, device = w13.rows // 2, routing.rows, routing.x.device
    between = torch.empty((rows, inner), dtype=torch.float16, device=device)
    cut = fit(tile, w13)
    if routing.x_many is None:
        cut["NB"] = 0
    shares = None
    counters = zeros("experts_decode", device, MAX_TOKENS * routing.ids.shape[1] // (MANY + 1) * (w13.rows // 16))
    # Sums of experts with many rows, 16 rows left between any two: see _place_share.
    share_size = (rows + rows // (MANY + 1) * 16) * w13.rows
    if cut["NB"] and cut["SPLIT"] > 1:
        shares = torch.empty((cut["SPLIT"], share_size), device=device)
    given = (
        between, routing.x, routing.x_many, w13.codes, w13.scales, w13.factors, routing.token, routing.weight,
        routing.active, shares, counters if shares is not None else None, rows, share_size, limit, lift_of(limit),
    )  # fmt: skip
    # To the kernel the chain's order is a lead's: it lets the next launch begin when it has waited.
    taken = ASIDE if order.take(reads=routing.tensors, writes=(between, shares, counters)) == ASIDE else CHAIN
    _launch(up_kernel, given, w13, tile, rows=rows, H=w13.channels, INNER=inner, ORDER=taken, **cut)
    return between


def last_product(routing: Routing, between: Tensor, w2: ExpertWeights, *, unlift: float, tile: Tile) -> Tensor:
    """Return unlift h W2^T [N, H] float32, rows in routing's order; those beyond its last row are not written."""
    parts = routing.new_parts(w2.rows)
    given = (parts, between, w2.codes, w2.scales, w2.factors, routing.active, unlift)
    cut = fit(tile, w2)
    if routing.x_many is None:
        cut["NB"] = 0
    del cut["SPLIT"]
    _launch(down_kernel, given, w2, tile, rows=routing.rows, H=w2.rows, INNER=w2.channels, **cut)
    return parts


def _launch(kernel: Any, given: tuple[Any, ...], weights: ExpertWeights, tile: Tile, *, rows: int, **cut: int) -> None:
    warps, tiles = cut["KS"] * cut["RS"], weights.rows // 16
    blocks, many_blocks = tiles // (cut["R"] * cut["RS"]), tiles // (cut["MANY_R"] * warps) * cut.get("SPLIT", 1)
    most = rows // (MANY + 1) if cut["NB"] else 0  # experts with many rows
    programs = max(
        many * many_blocks + min(weights.experts - many, rows - many * (MANY + 1)) * blocks
        for many in range(min(most, weights.experts) + 1)
    )
    if tile.constants["RESIDENT"]:
        programs = min(programs, tile.constants["RESIDENT"] * sm_count(weights.codes.device))
    pdl, launch = _pdl(weights.codes.device)
    limit = {"maxnreg": tile.constants["REGISTERS"]} if tile.constants["REGISTERS"] else {}
    kernel[(programs,)](
        *given, PACKED=weights.packed_steps, LOOPS=tile.constants["RESIDENT"] > 0, FORMAT=FORMATS[weights.format],
        PDL=pdl, **cut, num_warps=warps, num_stages=tile.num_stages, **limit, **launch,
    )  # fmt: skip


def _pdl(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def fit(tile: Tile, weights: ExpertWeights) -> dict[str, int]:
    """Return the kernel's constants for a matrix, smaller than the tile's where it does not divide the matrix.

    R: tiles of 16 rows a warp.   KS: warps that share the channels.   RS: warps that take different rows.   S: steps of
    64 channels at once.   PAIR_S: the same for 9 to 16 rows of an expert, or 0 where none has them.
    Where an expert may have more: NB: rows at once, in eights, else 0.   MANY_R: tiles a warp, all of which take
    different rows.   MANY_S: steps at once.   AHEAD: how often as many are on their way.   SPLIT: programs that share
    the channels.
    """
    return _fit(tile, rows=weights.rows, channels=weights.channels, packed=weights.packed_steps)


def _fit(tile: Tile, *, rows: int, channels: int, packed: int) -> dict[str, int]:
    c = {name: value for name, value in tile.constants.items() if name not in ("REGISTERS", "RESIDENT")}
    steps, tiles = channels // 64, rows // 16
    c["RS"] = math.gcd(c["RS"], tiles)
    c["R"] = math.gcd(c["R"], tiles // c["RS"])
    c["KS"] = math.gcd(c["KS"], steps)
    if c["NB"]:
        c["KS"] = math.gcd(c["KS"], tiles // c["RS"])
        c["MANY_R"] = math.gcd(c["MANY_R"], tiles // (c["KS"] * c["RS"]))
        c["SPLIT"] = math.gcd(c["SPLIT"], steps)
        c["MANY_S"] = math.gcd(c["MANY_S"], packed, steps // c["SPLIT"])
        c["AHEAD"] = math.gcd(c["AHEAD"], steps // c["SPLIT"] // c["MANY_S"])
    return c | {name: math.gcd(c[name], packed, steps // c["KS"]) for name in ("S", "PAIR_S") if c[name]}


# What the offline gate compiles: DeepSeek-V4-Flash's experts, by tensor parallelism 4, for both formats.
_HIDDEN, _INNER = 4096, 512
_TOKENS = (1, 8, 16, 64)  # the last cut is of prompts as well


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate.

    A decode step launches its first products aside; what is left of a prompt, in the chain.
    """
    launched = [*((UP, tokens, ASIDE) for tokens in _TOKENS), (UP, _TOKENS[-1], CHAIN)]
    launched += [(DOWN, tokens, CHAIN) for tokens in _TOKENS[1:]]
    return _variants(arch, launched)


def rare_variants(arch: str) -> list[Variant]:
    """Return first products in the chain of few tokens, which differ from shipped ones only in where they wait."""
    return _variants(arch, [(UP, tokens, CHAIN) for tokens in _TOKENS[:-1]])


def _variants(arch: str, launched: Sequence[tuple[str, int, int]]) -> list[Variant]:
    return [
        _variant(op, fmt, tile_for(op, arch, tokens=tokens), order) for op, tokens, order in launched for fmt in FORMATS
    ]


def _variant(op: str, fmt: str, tile: Tile, order: int = CHAIN) -> Variant:
    kernel, rows, channels = (up_kernel, 2 * _INNER, _HIDDEN) if op == UP else (down_kernel, _HIDDEN, _INNER)
    cut = _fit(tile, rows=rows, channels=channels, packed=4)
    fixed: dict[str, Any] = {"H": _HIDDEN, "INNER": _INNER, "PACKED": 4, "FORMAT": FORMATS[fmt], "PDL": True, **cut}
    fixed["LOOPS"] = tile.constants["RESIDENT"] > 0
    signature = dict.fromkeys(kernel.arg_names, "*i32")
    signature |= {"hidden_ptr": "*fp16", "x_ptr": "*fp16", "x_many_ptr": "*fp16", "scales_ptr": "*i16"}
    signature |= dict.fromkeys(("part_ptr", "weight_ptr", "factors_ptr", "share_ptr"), "*fp32")
    signature |= {"limit": "fp32", "lift": "fp32", "unlift": "fp32", "capacity": "i32", "share_size": "i32"}
    if op == UP:
        fixed["ORDER"] = order
    if op == DOWN:
        del fixed["SPLIT"]
    elif not cut["NB"]:
        fixed["x_many_ptr"] = None
    if op == UP and not (cut["NB"] and cut["SPLIT"] > 1):
        fixed |= {"share_ptr": None, "counter_ptr": None}
    return Variant(
        op,
        kernel,
        {name: signature[name] for name in kernel.arg_names if name not in fixed},
        fixed,
        cut["KS"] * cut["RS"],
        tile.num_stages,
        maxnreg=tile.constants["REGISTERS"] or None,
        has_packed_weights=True,
        unaligned=("capacity", "share_size") if op == UP else (),
    )
