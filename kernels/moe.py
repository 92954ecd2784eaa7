"""Mixture of experts: which experts a token takes, and their weighted sum.

    a = sqrt(softplus(x Wg^T)), float32
    hash layers: experts = table[token id];   others: the k best of a + bias (bias chooses, it does not weigh)
    weight_e = a_e / sum of the chosen a * routed_scaling_factor
    expert: (weight * silu(min(x W1^T, L)) * clamp(x W3^T, -L, L)) W2^T

Equal scores go to the lower expert. Layout: w13 [E, 2I, H] (rows of W1, then of W3), w2 [E, H, I]; ids, weights [T, k].

Packed matrices (expert_weights.py) are dequantised in float32, a few experts at a time, those that have tokens: exact,
and without room for a second copy, but every call pays for it: some 75 bytes moved for each weight of an expert. Where
there are kernels, moe_decode.py reads packed matrices as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.expert_weights import ExpertWeights, dequantize_experts

_DEQUANTISED_AT_ONCE = 8  # experts: few launches for each, and less than a gigabyte in between


def expert_scores_reference(x: Tensor, gate: Tensor) -> Tensor:
    """See expert_scores."""
    return F.softplus(F.linear(x.float(), gate)).sqrt()


def expert_scores(x: Tensor, gate: Tensor) -> Tensor:
    """Return [T, E] float32 scores of x [T, H] for a gate [E, H] float32."""
    if gate.dtype != torch.float32 or x.shape[-1] != gate.shape[-1]:
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} for rows of {x.shape[-1]} channels")
    return expert_scores_reference(x, gate)


def route_reference(
    scores: Tensor, *, bias: Tensor | None, chosen: Tensor | None, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """See route."""
    if chosen is None:
        biased = scores if bias is None else scores + bias
        chosen = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(1, keepdim=True) * scaling


def route(
    scores: Tensor, *, bias: Tensor | None = None, chosen: Tensor | None = None, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return expert ids [T, k] int64 and weights [T, k] float32.

    scores [T, E].   chosen [T, k]: ids from a hash table; None: the top_k of scores + bias [E].
    """
    if chosen is not None and chosen.shape != (scores.shape[0], top_k):
        raise ValueError(f"{tuple(chosen.shape)} chosen experts for {scores.shape[0]} tokens of {top_k}")
    return route_reference(scores, bias=bias, chosen=chosen, top_k=top_k, scaling=scaling)


def gated(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def gated_mlp(x: Tensor, w13: Tensor, w2: Tensor, *, limit: float, weight: Tensor | None = None) -> Tensor:
    """Return [T, H] of one expert for all rows of x [T, H], in x's dtype.

    w13: [2I, H].   w2: [H, I].   weight: [T, 1] float32, of what lies between the products.
    """
    if w13.shape[1] != x.shape[1] or w2.shape != (x.shape[1], w13.shape[0] // 2):
        raise ValueError(f"rows of {x.shape[1]} channels, w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}")
    hidden = gated(*F.linear(x, w13).chunk(2, -1), limit=limit)
    if weight is not None:
        hidden = (hidden * weight).to(x.dtype)
    return F.linear(hidden, w2)


def experts_reference(
    x: Tensor,
    w13: Tensor | ExpertWeights,
    w2: Tensor | ExpertWeights,
    ids: Tensor,
    weights: Tensor,
    limit: float,
    first_expert: int = 0,
) -> Tensor:
    """See experts."""
    top_k, num_experts = ids.shape[1], _sizes(w13)[0]
    flat = ids.flatten() - first_expert
    flat = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts)  # of other ranks: sorted last, not read
    order = flat.argsort(stable=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()
    hit = [expert for expert, count in enumerate(counts) if count]
    first = 0
    for expert, each13, each2 in zip(hit, _matrices(w13, hit, x.dtype), _matrices(w2, hit, x.dtype), strict=True):
        picked = order[first : first + counts[expert]]
        token = picked // top_k
        weight = weights.view(-1)[picked, None]
        out.index_add_(0, token, gated_mlp(x[token], each13, each2, limit=limit, weight=weight).float())
        first += counts[expert]
    return out


def experts(
    x: Tensor,
    w13: Tensor | ExpertWeights,
    w2: Tensor | ExpertWeights,
    ids: Tensor,
    weights: Tensor,
    *,
    limit: float,
    first_expert: int = 0,
) -> Tensor:
    """Return [T, H] float32: the weighted sum of the experts of each row.

    x [T, H] in the weights' dtype.   w13 [E, 2I, H], w2 [E, H, I], each of them packed or not.   ids [T, k] int64;
    weights [T, k] float32.   first_expert: the number of the first matrix; experts that have none here add nothing.
    """
    num_experts, double, hidden = _sizes(w13)
    if _sizes(w2) != (num_experts, hidden, double // 2) or x.shape[1] != hidden:
        raise ValueError(f"rows of {x.shape[1]} channels, w13 {_sizes(w13)}, w2 {_sizes(w2)}")
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids {tuple(ids.shape)}, weights {tuple(weights.shape)} for {x.shape[0]} rows")
    return experts_reference(x, w13, w2, ids, weights, limit, first_expert)


def _sizes(w: Tensor | ExpertWeights) -> tuple[int, ...]:
    """Return (experts, rows, channels)."""
    return tuple(w.shape) if isinstance(w, Tensor) else (w.experts, w.rows, w.channels)


def _matrices(w: Tensor | ExpertWeights, hit: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the matrices of some experts in turn, packed ones in `dtype`."""
    if isinstance(w, Tensor):
        yield from (w[expert] for expert in hit)
        return
    for i in range(0, len(hit), _DEQUANTISED_AT_ONCE):
        some = torch.tensor(hit[i : i + _DEQUANTISED_AT_ONCE], device=w.codes.device)
        yield from dequantize_experts(w.select(some)).to(dtype)
