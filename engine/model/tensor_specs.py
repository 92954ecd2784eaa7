"""tensor_specs: every tensor of the main model, by official name: what a checkpoint must hold.

Of the part that a rank holds, its shard says which rows and columns. No torch here: the memory plan counts by it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.model.config import CSA_RATIO, DeepSeekV4Config
from engine.model.shard import Shard, cut_shape


class TensorSpec(msgspec.Struct, frozen=True):
    """What a tensor must be. matrix: any stored form, used in the compute dtype. float32: kept so. ids: int64."""

    shape: tuple[int, ...]
    kind: Literal["matrix", "float32", "ids"]


def tensor_specs(c: DeepSeekV4Config, shard: Shard | None = None) -> dict[str, TensorSpec]:
    """Return every tensor of the main model by official name, scales left out. shard: of a rank's part, None: whole.

    c: of the whole model. Names stay those of the checkpoint, experts' numbers too.
    """
    h, d, hc, inter = c.hidden_size, c.head_dim, c.hc_mult, c.moe_intermediate_size
    heads_per_group = c.num_attention_heads // c.o_groups
    specs: dict[str, TensorSpec] = {}

    def add(name: str, kind: Literal["matrix", "float32", "ids"], *shape: int) -> None:
        specs[name] = TensorSpec(shape, kind)

    def add_hyper_connection(prefix: str, outputs: int, scales: int) -> None:
        add(f"{prefix}_fn", "float32", outputs, hc * h)
        add(f"{prefix}_base", "float32", outputs)
        add(f"{prefix}_scale", "float32", scales)

    def add_compressor(prefix: str, ratio: int, dim: int) -> None:
        width = 2 * dim if ratio == CSA_RATIO else dim
        add(f"{prefix}.ape", "float32", ratio, width)
        add(f"{prefix}.wkv.weight", "float32", width, h)
        add(f"{prefix}.wgate.weight", "float32", width, h)
        add(f"{prefix}.norm.weight", "float32", dim)

    def add_expert(prefix: str) -> None:
        add(f"{prefix}.w1.weight", "matrix", inter, h)
        add(f"{prefix}.w2.weight", "matrix", h, inter)
        add(f"{prefix}.w3.weight", "matrix", inter, h)

    add("embed.weight", "matrix", c.vocab_size, h)
    add("head.weight", "float32", c.vocab_size, h)
    add("norm.weight", "float32", h)
    add_hyper_connection("hc_head", hc, 1)
    for i, ratio in enumerate(c.compress_ratios):
        attn, ffn = f"layers.{i}.attn", f"layers.{i}.ffn"
        add(f"layers.{i}.attn_norm.weight", "float32", h)
        add(f"layers.{i}.ffn_norm.weight", "float32", h)
        add_hyper_connection(f"layers.{i}.hc_attn", (2 + hc) * hc, 3)
        add_hyper_connection(f"layers.{i}.hc_ffn", (2 + hc) * hc, 3)
        add(f"{attn}.attn_sink", "float32", c.num_attention_heads)
        add(f"{attn}.wq_a.weight", "matrix", c.q_lora_rank, h)
        add(f"{attn}.q_norm.weight", "float32", c.q_lora_rank)
        add(f"{attn}.wq_b.weight", "matrix", c.num_attention_heads * d, c.q_lora_rank)
        add(f"{attn}.wkv.weight", "matrix", d, h)
        add(f"{attn}.kv_norm.weight", "float32", d)
        add(f"{attn}.wo_a.weight", "matrix", c.o_groups * c.o_lora_rank, heads_per_group * d)
        add(f"{attn}.wo_b.weight", "matrix", h, c.o_groups * c.o_lora_rank)
        if ratio:
            add_compressor(f"{attn}.compressor", ratio, d)
        if ratio == CSA_RATIO:
            add(f"{attn}.indexer.wq_b.weight", "matrix", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            add(f"{attn}.indexer.weights_proj.weight", "matrix", c.index_n_heads, h)
            add_compressor(f"{attn}.indexer.compressor", ratio, c.index_head_dim)
        add(f"{ffn}.gate.weight", "float32", c.n_routed_experts, h)
        if c.is_hash_layer(i):
            add(f"{ffn}.gate.tid2eid", "ids", c.vocab_size, c.num_experts_per_tok)
        else:
            add(f"{ffn}.gate.bias", "float32", c.n_routed_experts)
        add_expert(f"{ffn}.shared_experts")
        for e in range(c.n_routed_experts) if shard is None else shard.experts(c):
            add_expert(f"{ffn}.experts.{e}")
    if shard is None:
        return specs
    return {
        name: TensorSpec(cut_shape(spec.shape, shard.cut(name, spec.shape)), spec.kind) for name, spec in specs.items()
    }
