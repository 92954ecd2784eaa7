"""Compressor: from hidden states to entries in the cache. Indexer: which of them each token attends."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.model.config import CSA_RATIO, DeepSeekV4Config
from engine.model.layers import Linear, RMSNorm, Weights
from kernels.cache_write import write_entries
from kernels.cache_write_decode import Pooling
from kernels.compress import compress_csa, compress_hca
from kernels.gemm_decode import linear_decode
from kernels.indexer import index_entries
from kernels.indexer_decode import IndexQuery, index_select
from kernels.norm_rope import rope
from kernels.quant import hadamard
from kernels.ragged import DecodeBatch, RaggedBatch
from kernels.rows import Rows, round_trip

QUANTISED_INDEX = ("fp8_index", "fp4_index")


class Compressor:
    """Pools `ratio` tokens into one row: gated softmax, norm, rope at the entry's first position. float32
    throughout."""

    def __init__(self, weights: Weights, prefix: str, config: DeepSeekV4Config, ratio: Literal[4, 128] | int) -> None:
        self.ratio = ratio
        self.bias = weights.pop(f"{prefix}.ape")
        self.weight = torch.cat([weights.pop(f"{prefix}.wkv.weight"), weights.pop(f"{prefix}.wgate.weight")])
        self.norm = RMSNorm(weights, f"{prefix}.norm", config.rms_norm_eps)

    def __call__(
        self, x: Tensor, batch: RaggedBatch, rotation: Tensor, *, state: Rows, pool: Rows, rotate: bool = False
    ) -> None:
        """Move `state` on by x [T, H] and store the completed entries in `pool`. rotate: Hadamard before rounding."""
        kv, gate = torch.nn.functional.linear(x.float(), self.weight).chunk(2, -1)
        gate = gate + self.bias[batch.positions % self.ratio]
        compress = compress_csa if self.ratio == CSA_RATIO else compress_hca
        pooled = compress(kv.contiguous(), gate, batch, state)
        if pooled.shape[0]:
            rows = rope(self.norm(pooled), rotation)
            write_entries(hadamard(rows) if rotate else rows, batch, self.ratio, pool)

    def pooling(self, x: Tensor, *, state: Rows, pool: Rows, rotate: bool = False) -> Pooling:
        """Return what `cache_write` needs to do the same for x [T, H]."""
        projected = linear_decode(x, self.weight, out_dtype=torch.float32)
        return Pooling(projected, self.bias, self.norm.weight, state, pool, rotate)


class Indexer:
    """Scores entries by a small attention of its own and picks the best. Its keys have a compressor of their own."""

    def __init__(
        self, weights: Weights, prefix: str, config: DeepSeekV4Config, query_norm: RMSNorm, *, use_hadamard: bool
    ) -> None:
        self.query, self.query_norm = Linear(weights, f"{prefix}.wq_b"), query_norm
        self.head_weight = Linear(weights, f"{prefix}.weights_proj")
        self.compressor = Compressor(weights, f"{prefix}.compressor", config, CSA_RATIO)
        self.heads, self.dim, self.top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.scale = (self.heads * self.dim) ** -0.5
        self.use_hadamard = use_hadamard

    def __call__(
        self,
        x: Tensor,
        latent: Tensor,
        batch: RaggedBatch,
        rotation: Tensor,
        entries: Tensor,
        *,
        state: Rows,
        keys: Rows,
    ) -> tuple[Tensor, Tensor]:
        """Store new keys, then return selected [T, K] int64 and is_finite [T].

        x [T, H]: normed hidden states.   latent [T, q_lora]: of the queries.   rotation, entries: see Rotations.
        """
        self.compressor(x, batch, entries, state=state, pool=keys, rotate=self._rotates(keys))
        return self.select(x, latent, batch, rotation, keys=keys)

    def pooling(self, x: Tensor, *, state: Rows, keys: Rows) -> Pooling:
        """Return what `cache_write` needs to store this step's keys."""
        return self.compressor.pooling(x, state=state, pool=keys, rotate=self._rotates(keys))

    def select(
        self, x: Tensor, latent: Tensor, batch: RaggedBatch, rotation: Tensor, *, keys: Rows
    ) -> tuple[Tensor, Tensor]:
        """Return selected [T, K] int64 and is_finite [T]; the keys of this step have been stored."""
        if batch.max_visible(CSA_RATIO) <= self.top_k:
            query = x.new_empty((x.shape[0], self.heads, self.dim))  # every visible entry is taken: nothing is scored
            return index_entries(query, query[..., 0], batch, keys, ratio=CSA_RATIO, top_k=self.top_k)
        query = self.query(latent, norm=self.query_norm)
        query = rope(query.view(-1, self.heads, self.dim), rotation)
        if self._rotates(keys):
            query = hadamard(query)
        if keys.format in QUANTISED_INDEX:
            query = round_trip(query, keys.format)
        weight = self.head_weight(x).float() * self.scale
        return index_entries(query, weight, batch, keys, ratio=CSA_RATIO, top_k=self.top_k)

    def queries(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `cache_write` makes ready: queries [T, heads, D] and the heads' weights [T, heads]."""
        query = self.query(latent, norm=self.query_norm, decodes=True).view(-1, self.heads, self.dim)
        return query, self.head_weight(x, decodes=True)

    def select_decode(self, ready: IndexQuery, batch: DecodeBatch, *, keys: Rows) -> tuple[Tensor, Tensor]:
        """Return selected [T, top_k] int32 and is_finite [T] with decode kernels, for keys of a quantised format."""
        return index_select(ready, batch, keys, ratio=CSA_RATIO, top_k=self.top_k)

    def _rotates(self, keys: Rows) -> bool:
        return self.use_hadamard and keys.format in QUANTISED_INDEX
