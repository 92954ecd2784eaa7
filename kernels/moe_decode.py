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

import math
from typing import Any

import torch
from torch import Tensor

from kernels.expert_weights import ExpertWeights, dequantize_experts
from kernels.moe_routing import Routing
from kernels.moe_triton import down_kernel, sum_kernel, up_kernel
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, arch_of, sm_count, uses_triton

UP, DOWN, SUM = "moe_up", "moe_down", "moe_sum"
FORMATS = {"nvfp4": 0, "mxfp4": 1}
_SUM_BLOCK = 512


def experts_decode_reference(
    routing: Routing, w13: ExpertWeights, w2: ExpertWeights, *, limit: float, add: Tensor | None = None
) -> Tensor:
    """Return [T, H] float32. See experts_decode."""
    tokens = routing.ids.shape[0]
    x = routing.x.float()
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
    tiles: tuple[Tile, Tile] | None = None,
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
    first, last = tiles or (tile_for(UP, arch, tokens=tokens), tile_for(DOWN, arch, tokens=tokens))
    between = first_products(routing, w13, limit=limit, tile=first)
    parts = last_product(routing, between, w2, tile=last)
    pdl, launch = _pdl(routing.x.device)
    sum_kernel[(tokens, -(-hidden // _SUM_BLOCK))](
        out, parts, routing.place, add, H=hidden, TOP_K=top_k, BLOCK=_SUM_BLOCK, PDL=pdl, num_warps=4, num_stages=1,
        **launch,
    )  # fmt: skip
    return out


def first_products(routing: Routing, w13: ExpertWeights, *, limit: float, tile: Tile) -> Tensor:
    """Return h [N, I] f16, rows in routing's order; those beyond its last row are not written."""
    rows, inner, device = routing.token.shape[0], w13.rows // 2, routing.x.device
    between = torch.empty((rows, inner), dtype=torch.float16, device=device)
    cut = fit(tile, rows=w13.rows, channels=w13.channels, packed=w13.packed_steps)
    count = programs(
        tile, cut, rows=w13.rows, active=min(w13.experts, rows), multiprocessors=sm_count(device)
    )  # fmt: skip
    pdl, launch = _pdl(device)
    up_kernel[(count,)](
        between, routing.x, w13.codes, w13.scales, w13.factors, routing.token, routing.weight, routing.active, limit,
        H=w13.channels, INNER=inner, PACKED=w13.packed_steps, FORMAT=FORMATS[w13.format], PDL=pdl, **cut,
        num_warps=cut["KS"] * cut["RS"], num_stages=1, **_limit(tile), **launch,
    )  # fmt: skip
    return between


def last_product(routing: Routing, between: Tensor, w2: ExpertWeights, *, tile: Tile) -> Tensor:
    """Return h W2^T [N, H] float32, rows in routing's order; those beyond its last row are not written."""
    rows, device = routing.token.shape[0], routing.x.device
    parts = torch.empty((rows, w2.rows), dtype=torch.float32, device=device)
    cut = fit(tile, rows=w2.rows, channels=w2.channels, packed=w2.packed_steps)
    count = programs(
        tile, cut, rows=w2.rows, active=min(w2.experts, rows), multiprocessors=sm_count(device)
    )  # fmt: skip
    pdl, launch = _pdl(device)
    down_kernel[(count,)](
        parts, between, w2.codes, w2.scales, w2.factors, routing.active,
        H=w2.rows, INNER=w2.channels, PACKED=w2.packed_steps, FORMAT=FORMATS[w2.format], PDL=pdl, **cut,
        num_warps=cut["KS"] * cut["RS"], num_stages=1, **_limit(tile), **launch,
    )  # fmt: skip
    return parts


def _pdl(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def _limit(tile: Tile) -> dict[str, int]:
    return {"maxnreg": tile.constants["REGISTERS"]} if tile.constants["REGISTERS"] else {}


def fit(tile: Tile, *, rows: int, channels: int, packed: int) -> dict[str, int]:
    """Return the kernel's constants for a matrix, smaller than the tile's where it does not divide the matrix.

    R: tiles of 16 rows a warp.   KS: warps that share the channels.   RS: warps that take different rows.   S: steps of
    64 channels at once, WIDE_S where more than 8 tokens are.   WIDE: tokens at once, in eights.
    """
    c = {name: value for name, value in tile.constants.items() if name not in ("RESIDENT", "REGISTERS")}
    steps, tiles = channels // 64, rows // 16
    c["KS"] = math.gcd(c["KS"], steps)
    for name in ("S", "WIDE_S"):
        c[name] = math.gcd(math.gcd(c[name], packed), steps // c["KS"])
    c["RS"] = math.gcd(c["RS"], tiles)
    c["R"] = math.gcd(c["R"], tiles // c["RS"])
    return c


def programs(tile: Tile, cut: dict[str, int], *, rows: int, active: int, multiprocessors: int) -> int:
    """Return how many programs are launched: RESIDENT a multiprocessor (0: any number), at most one for each item."""
    items = active * (rows // (16 * cut["R"] * cut["RS"]))
    resident = tile.constants["RESIDENT"]
    return min(items, resident * multiprocessors) if resident else items


# What the offline gate compiles: DeepSeek-V4-Flash's experts, by tensor parallelism 4, for both formats.
_TOKENS = (1, 8, 16, 64, 256)
_HIDDEN, _INNER = 4096, 512


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate."""
    found: dict[str, Variant] = {}
    for tokens in _TOKENS:
        for fmt in FORMATS:
            for variant in _variants_of(arch, fmt, tokens):
                found.setdefault(repr((variant.kernel.__name__, variant.constants, variant.num_warps)), variant)
    for out in ("*fp32", "*bf16"):
        for add in (None, "*fp32", "*bf16"):
            signature = {"out_ptr": out, "part_ptr": "*fp32", "place_ptr": "*i32"}
            fixed: dict[str, Any] = {"H": _HIDDEN, "TOP_K": 6, "BLOCK": _SUM_BLOCK, "PDL": True}
            if add is None:
                fixed["add_ptr"] = None
            else:
                signature["add_ptr"] = add
            found[f"sum {out} {add}"] = Variant(SUM, sum_kernel, signature, fixed, 4, 1, tensor_ops=())
    return list(found.values())


def _variants_of(arch: str, fmt: str, tokens: int) -> list[Variant]:
    result = []
    for op, kernel, rows, channels in (
        (UP, up_kernel, 2 * _INNER, _HIDDEN),
        (DOWN, down_kernel, _HIDDEN, _INNER),
    ):
        tile = tile_for(op, arch, tokens=tokens)
        packed = 4
        cut = fit(tile, rows=rows, channels=channels, packed=packed)
        signature = dict.fromkeys(kernel.arg_names, "*i32")
        signature |= {"hidden_ptr": "*fp16", "x_ptr": "*fp16", "part_ptr": "*fp32", "weight_ptr": "*fp32"}
        signature |= {"scales_ptr": "*i16", "factors_ptr": "*fp32", "limit": "fp32"}
        fixed: dict[str, Any] = {
            "H": _HIDDEN,
            "INNER": _INNER,
            "PACKED": packed,
            "FORMAT": FORMATS[fmt],
            "PDL": True,
            **cut,
        }
        names = [name for name in kernel.arg_names if name not in fixed]
        result.append(
            Variant(
                op,
                kernel,
                {name: signature[name] for name in names},
                fixed,
                cut["KS"] * cut["RS"],
                1,
                maxnreg=tile.constants["REGISTERS"] or None,
                weights_per_product=16 * 16,
            )
        )
    return result
