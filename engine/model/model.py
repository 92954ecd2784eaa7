"""DeepSeekV4: the forward pass, in the order of the report.

    S = embedding of each token, copied to n streams
    per layer:  x, post, C = hc_pre(S);  y = attention(rms(x));  S = hc_post(y, S, post, C);  the same with the experts
    logits = rms(hc_head(S)) head^T, float32

A step is any mixture of sequences with any number of tokens each. What depends on earlier tokens lies in the cache.
"""

from __future__ import annotations

from torch import Tensor

from engine.model.attention import Attention, CacheViews, decode_batch
from engine.model.config import DeepSeekV4Config
from engine.model.layers import HyperConnection, RMSNorm, Rotary, Rotations, Weights
from engine.model.moe import MixtureOfExperts
from kernels.gemm import linear
from kernels.hyper_connection import hc_head
from kernels.ragged import DecodeBatch, RaggedBatch


class Layer:
    """Attention and experts, each between the two halves of a hyper-connection."""

    def __init__(self, weights: Weights, layer: int, config: DeepSeekV4Config, *, use_hadamard: bool) -> None:
        prefix, eps = f"layers.{layer}", config.rms_norm_eps
        self.attention_mix = HyperConnection(weights, f"{prefix}.hc_attn", config)
        self.attention_norm = RMSNorm(weights, f"{prefix}.attn_norm", eps)
        self.attention = Attention(weights, layer, config, use_hadamard=use_hadamard)
        self.experts_mix = HyperConnection(weights, f"{prefix}.hc_ffn", config)
        self.experts_norm = RMSNorm(weights, f"{prefix}.ffn_norm", eps)
        self.experts = MixtureOfExperts(weights, layer, config)

    def __call__(
        self,
        streams: Tensor,
        token_ids: Tensor,
        batch: RaggedBatch,
        decode: DecodeBatch | None,
        rotations: Rotations,
        cache: CacheViews,
    ) -> Tensor:
        """Return the next streams [T, n, H]."""
        dtype = streams.dtype
        x, post, comb = self.attention_mix.pre(streams)
        y = self.attention(self.attention_norm(x.to(dtype)).to(dtype), batch, decode, rotations, cache)
        streams = self.attention_mix.post(y, streams, post, comb)
        x, post, comb = self.experts_mix.pre(streams)
        y = self.experts(self.experts_norm(x.to(dtype)).to(dtype), token_ids, decode)
        return self.experts_mix.post(y, streams, post, comb)


class DeepSeekV4:
    """The main model without draft blocks, in one compute dtype (that of the embedding).

    weights: as load_weights returns them; emptied. index_hadamard: rotate index queries and keys before rounding, where
    they are rounded at all.
    """

    def __init__(self, config: DeepSeekV4Config, weights: Weights, *, index_hadamard: bool) -> None:
        self.config = config
        self.embedding = weights.pop("embed.weight")
        self.layers = [Layer(weights, i, config, use_hadamard=index_hadamard) for i in range(config.num_hidden_layers)]
        self.head_fn = weights.pop("hc_head_fn")
        self.head_base = weights.pop("hc_head_base")
        self.head_scale = weights.pop("hc_head_scale")
        self.norm = RMSNorm(weights, "norm", config.rms_norm_eps)
        self.head = weights.pop("head.weight")
        self.rotary = Rotary(config, self.embedding.device)
        assert not weights, f"nobody took {sorted(weights)[:5]}"

    def forward(self, token_ids: Tensor, batch: RaggedBatch, cache: CacheViews) -> Tensor:
        """Return the streams [T, n, H] after the last layer for token_ids [T] int64, and update the cache."""
        decode = decode_batch(batch, cache)
        rotations = self.rotary.at(batch, decode=decode is not None)
        streams = self.embedding[token_ids][:, None].expand(-1, self.config.hc_mult, -1)
        for layer in self.layers:
            streams = layer(streams, token_ids, batch, decode, rotations, cache)
        return streams

    def logits(self, streams: Tensor) -> Tensor:
        """Return [N, vocab_size] float32 for the streams [N, n, H] of the tokens that need them."""
        config = self.config
        x = hc_head(
            streams, self.head_fn, self.head_base, self.head_scale, eps=config.hc_eps, norm_eps=config.rms_norm_eps
        )
        return linear(self.norm(x.to(streams.dtype)), self.head)
