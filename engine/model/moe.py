"""The feed-forward sublayer: gate, routed experts, shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.config import DeepSeekV4Config
from engine.model.layers import Weights
from kernels.moe import expert_scores, experts, gated_mlp, route


class MixtureOfExperts:
    """[T, H] in, [T, H] float32 out. The first layers choose experts by token id, the others by score plus bias."""

    def __init__(self, weights: Weights, layer: int, config: DeepSeekV4Config) -> None:
        prefix = f"layers.{layer}.ffn"
        self.gate = weights.pop(f"{prefix}.gate.weight")
        self.table = weights.pop(f"{prefix}.gate.tid2eid") if config.is_hash_layer(layer) else None
        self.bias = None if config.is_hash_layer(layer) else weights.pop(f"{prefix}.gate.bias")
        self.w13 = weights.pop(f"{prefix}.experts.w13")
        self.w2 = weights.pop(f"{prefix}.experts.w2")
        shared = f"{prefix}.shared_experts"
        self.shared_w13 = torch.cat([weights.pop(f"{shared}.w1.weight"), weights.pop(f"{shared}.w3.weight")])
        self.shared_w2 = weights.pop(f"{shared}.w2.weight")
        self.top_k, self.scaling, self.limit = (
            config.num_experts_per_tok,
            config.routed_scaling_factor,
            config.swiglu_limit,
        )

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """x [T, H]: normed hidden states.   token_ids [T] int64."""
        chosen = None if self.table is None else self.table[token_ids]
        ids, weights = route(
            expert_scores(x, self.gate), bias=self.bias, chosen=chosen, top_k=self.top_k, scaling=self.scaling
        )
        routed = experts(x, self.w13, self.w2, ids, weights, limit=self.limit)
        return routed + gated_mlp(x, self.shared_w13, self.shared_w2, limit=self.limit)
