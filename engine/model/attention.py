"""Attention of the three layer kinds: window only, window + CSA entries (indexer), window + HCA entries (all visible).

The cache is read and written here and nowhere else in the model. Order matters: entries of this step are stored first
(a token sees the entry it completes), the window ring last (attention still needs the rows it overwrites).

There are two ways through: over packed rows steps run kernels where there are any (`decode_batch`), whatever they
consist of, as far as KERNEL_TOKENS allows; elsewhere torch's operations run.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from engine.model.compressor import Compressor, Indexer
from engine.model.config import CSA_RATIO, DeepSeekV4Config
from engine.model.group import Group
from engine.model.layers import GroupedLinear, Linear, Linears, Matrix, RMSNorm, Rotations, Weights, read_once
from kernels.cache_write import write_window
from kernels.cache_write_decode import cache_write, commit_window, staging_rows
from kernels.norm_rope import rms_norm, rope
from kernels.ragged import DecodeBatch, RaggedBatch
from kernels.rows import Rows
from kernels.sparse_attention import sparse_attention
from kernels.sparse_attention_decode import sparse_attention_decode
from kernels.triton_env import uses_triton

KERNEL_TOKENS = 8192
"""Of a sequence in a step, which the kernels for chunks are made for: with more, torch's operations run."""


class CacheViews(Protocol):
    """What the model asks of a cache."""

    def rows(self, region: str, layer: int) -> Rows:
        """Return the view of layer number `layer` inside a region."""


def runs_decode_kernels(cache: CacheViews, device: torch.device) -> bool:
    """Return whether steps run kernels there: decode steps do, and others as far as KERNEL_TOKENS allows."""
    return uses_triton(torch.empty(0, device=device)) and cache.rows("window", 0).format == "packed"


def decode_batch(batch: RaggedBatch, cache: CacheViews) -> DecodeBatch | None:
    """Return the batch as kernels read it, None where a step runs torch's operations."""
    if not runs_decode_kernels(cache, batch.device):
        return None
    return batch.decode if batch.decode.max_query_len <= KERNEL_TOKENS else None


class Attention:
    """One layer's attention sublayer: [T, H] in, [T, H] out."""

    def __init__(
        self,
        weights: Weights,
        layer: int,
        config: DeepSeekV4Config,
        *,
        use_hadamard: bool,
        group: Group,
    ) -> None:
        """config: of the part of the model that this rank computes; group: those with the other heads."""
        prefix = f"layers.{layer}.attn"
        self.group = group
        self.layer, self.ratio, self.eps = layer, config.compress_ratios[layer], config.rms_norm_eps
        self.index = config.layers_of(self.ratio).index(layer)
        self.heads, self.dim = config.num_attention_heads, config.head_dim
        self.scale = self.dim**-0.5
        self.down = Linears(*(Matrix.take(weights, f"{prefix}.{name}") for name in ("wq_a", "wkv")))
        self.q_norm = RMSNorm(weights, f"{prefix}.q_norm", self.eps, is_narrow=True)
        queries = [Matrix.take(weights, f"{prefix}.wq_b")]
        self.kv_norm = RMSNorm(weights, f"{prefix}.kv_norm", self.eps)
        self.sink = weights.pop(f"{prefix}.attn_sink")
        self.groups = config.o_groups
        self.out_down = GroupedLinear(weights, f"{prefix}.wo_a", self.groups)
        self.out_up = Linear(weights, f"{prefix}.wo_b")
        self.compressor = Compressor(weights, f"{prefix}.compressor", config, self.ratio) if self.ratio else None
        self.indexer = None
        pooled = [] if self.compressor is None else [self.compressor.take_matrix()]
        if self.ratio == CSA_RATIO:
            self.indexer = Indexer(weights, f"{prefix}.indexer", config, use_hadamard=use_hadamard, group=group)
            query, heads = self.indexer.take_matrices()
            queries.append(query)
            pooled += [self.indexer.compressor.take_matrix(), heads]
        # Of the latent: the heads' queries, the indexer's.   Of x: what each compressor pools, the indexer's weights.
        self.q_up, self.pooled = Linears(*queries), Linears(*pooled, is_wide=True)

    def __call__(
        self, x: Tensor, batch: RaggedBatch | None, decode: DecodeBatch | None, rotations: Rotations, cache: CacheViews
    ) -> Tensor:
        """Return the sublayer's output [T, H] for normed x [T, H], and store what later steps need.

        decode: what `decode_batch` said, then `batch` is not read; `rotations` were made for it.
        """
        decodes = decode is not None
        if decode is not None:
            out = self._attend_decode(x, decode, rotations, cache).to(x.dtype)
        else:
            assert batch is not None
            out = self._attend(x, batch, rotations, cache).to(x.dtype)
        out = self.out_down(out.view(x.shape[0], self.groups, -1), decodes=decodes)
        return self.group.all_reduce(self.out_up(out.flatten(1), decodes=decodes))

    def _attend(self, x: Tensor, batch: RaggedBatch, rotations: Rotations, cache: CacheViews) -> Tensor:
        """Return the heads' outputs [T, H, D], turned back, with torch's operations."""
        rotation = rotations.tokens(self.ratio)
        latent, kv = self.down(x)
        q = self.q_up.only(0, latent, norm=self.q_norm).view(-1, self.heads, self.dim)
        q = rope(rms_norm(q, eps=self.eps), rotation)
        kv = rope(self.kv_norm(kv), rotation)

        window = cache.rows("window", self.layer)
        pool, selected, is_finite = self._entries(x, latent, batch, rotations, cache)
        out, _ = sparse_attention(
            q,
            window.round_trip(kv),
            batch,
            window,
            sink=self.sink,
            scale=self.scale,
            compressed=pool,
            ratio=self.ratio,
            selected=selected,
        )
        write_window(kv, batch, window)
        return rope(_spoil(out, is_finite), rotation.conj())

    def _attend_decode(self, x: Tensor, decode: DecodeBatch, rotations: Rotations, cache: CacheViews) -> Tensor:
        """The same with kernels: one call writes the cache, one attends."""
        pooled: list[Tensor] = []
        if self.compressor is not None:
            pooled, (latent, kv) = read_once(x, self.pooled, self.down)
        else:
            latent, kv = self.down(x, decodes=True)
        window = cache.rows("window", self.layer)
        rotation = rotations.tokens(self.ratio)
        q, *of_latent = self.q_up(latent, norm=self.q_norm, decodes=True)
        pool, main, index, index_q, index_weight = None, None, None, None, None
        if self.compressor is not None:
            name = "csa" if self.ratio == CSA_RATIO else "hca"
            pool = cache.rows(f"{name}_kv", self.index)
            projected, *of_index = pooled
            main = self.compressor.pooling(projected, state=cache.rows(f"{name}_state", self.index), pool=pool)
        if self.indexer is not None:
            keys = cache.rows("csa_index", self.index)
            index = self.indexer.pooling(of_index[0], state=cache.rows("index_state", self.index), keys=keys)
            index_q, index_weight = self.indexer.heads_of(of_latent[0]), of_index[1]
        # With one token a sequence its row may replace in the ring the one that has left the window just now.
        staging = staging_rows(decode.num_tokens, window) if decode.max_query_len > 1 else None
        written = cache_write(
            decode,
            kv=kv,
            kv_norm=self.kv_norm.weight,
            rotation=rotation,
            window=window,
            eps=self.eps,
            q=q.view(-1, self.heads, self.dim),
            ratio=self.ratio,
            entry_rotation=rotations.entries(self.ratio) if self.ratio else None,
            main=main,
            index=index,
            index_q=index_q,
            index_weight=index_weight,
            index_scale=0.0 if self.indexer is None else self.indexer.scale,
            staging=staging,
        )
        assert written.q is not None
        selected = None
        if self.indexer is not None:
            assert written.index is not None
            selected = self.indexer.select_decode(written.index, decode, keys=keys)
        out = sparse_attention_decode(
            written.q,
            decode,
            window,
            sink=self.sink,
            scale=self.scale,
            compressed=pool,
            ratio=self.ratio,
            selected=selected,
            new=staging,
            rotation=rotation,
        )
        if staging is not None:
            commit_window(decode, staging, window)
        return out

    def _entries(
        self, x: Tensor, latent: Tensor, batch: RaggedBatch, rotations: Rotations, cache: CacheViews
    ) -> tuple[Rows | None, Tensor | None, Tensor | None]:
        """Store this step's entries; return the layer's pool, the selection and its soundness, as far as there are
        any."""
        if self.compressor is None:
            return None, None, None
        name = "csa" if self.ratio == CSA_RATIO else "hca"
        pool = cache.rows(f"{name}_kv", self.index)
        entries = rotations.entries(self.ratio)
        projected, *of_index = self.pooled(x)
        self.compressor(projected, batch, entries, state=cache.rows(f"{name}_state", self.index), pool=pool)
        if self.indexer is None:
            return pool, None, None
        selected, is_finite = self.indexer(
            lambda: self.q_up.only(1, latent, norm=self.q_norm),
            of_index[1],
            of_index[0],
            batch,
            rotations.tokens(self.ratio),
            entries,
            state=cache.rows("index_state", self.index),
            keys=cache.rows("csa_index", self.index),
        )
        return pool, selected, is_finite


def _spoil(out: Tensor, is_finite: Tensor | None) -> Tensor:
    """Return out [T, H, D] with NaN for tokens that scored a key never written: it must not pass for a low score."""
    return out if is_finite is None else out.masked_fill(~is_finite[:, None, None], math.nan)
