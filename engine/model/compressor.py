"""Compressor: from hidden states to entries in the cache. Indexer: which of them each token attends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from engine.model.config import CSA_RATIO, DeepSeekV4Config
from engine.model.group import Alone, Group
from engine.model.index_split import gather_rows, own_tokens, pays
from engine.model.layers import Matrix, RMSNorm, Weights, narrow
from kernels.cache_write import write_entries
from kernels.cache_write_decode import Pooling
from kernels.compress import compress_csa, compress_hca
from kernels.indexer import index_entries
from kernels.indexer_decode import IndexQuery, index_select
from kernels.norm_rope import rope
from kernels.quant import hadamard
from kernels.ragged import DecodeBatch, RaggedBatch
from kernels.rows import Rows, round_trip

QUANTISED_INDEX = ("fp8_index", "fp4_index")


class Compressor:
    """Pools `ratio` tokens into one row: gated softmax, norm, rope at the entry's first position. float32
    throughout.

    Its matrix, of values, then gates, is handed over once: who multiplies it by x [T, H] joins it with others that read
    x, by copying, and a second copy would take gigabytes in all layers.
    """

    def __init__(self, weights: Weights, prefix: str, config: DeepSeekV4Config, ratio: Literal[4, 128] | int) -> None:
        self.ratio = ratio
        self.bias = weights.pop(f"{prefix}.ape")
        both = torch.cat([weights.pop(f"{prefix}.wkv.weight"), weights.pop(f"{prefix}.wgate.weight")])
        self._matrix: Matrix | None = Matrix(narrow(both))
        self.norm = RMSNorm(weights, f"{prefix}.norm", config.rms_norm_eps)

    def take_matrix(self) -> Matrix:
        """Return the matrix, which is the caller's from now on."""
        assert self._matrix is not None, "taken before"
        matrix, self._matrix = self._matrix, None
        return matrix

    def __call__(
        self, projected: Tensor, batch: RaggedBatch, rotation: Tensor, *, state: Rows, pool: Rows, rotate: bool = False
    ) -> None:
        """Move `state` on by values and gates [T, 2W] float32, and store the completed entries in `pool`.

        rotate: Hadamard before rounding.
        """
        kv, gate = projected.chunk(2, -1)
        gate = gate + self.bias[batch.positions % self.ratio]
        compress = compress_csa if self.ratio == CSA_RATIO else compress_hca
        pooled = compress(kv.contiguous(), gate, batch, state)
        if pooled.shape[0]:
            rows = rope(self.norm(pooled), rotation)
            write_entries(hadamard(rows) if rotate else rows, batch, self.ratio, pool)

    def pooling(self, projected: Tensor, *, state: Rows, pool: Rows, rotate: bool = False) -> Pooling:
        """Return what `cache_write` needs to do the same."""
        return Pooling(projected, self.bias, self.norm.weight, state, pool, rotate)


class Indexer:
    """Scores entries by a small attention of its own and picks the best. Its keys have a compressor of their own.

    Its matrices are handed over like a compressor's.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: DeepSeekV4Config,
        *,
        use_hadamard: bool,
        group: Group | None = None,
    ) -> None:
        """group: ranks that share the scores of long prompts, see index_split.py."""
        self.group = group or Alone()
        queries, heads = (Matrix.take(weights, f"{prefix}.{name}") for name in ("wq_b", "weights_proj"))
        self._matrices: tuple[Matrix, ...] = queries, heads._replace(weight=narrow(heads.weight))
        self.compressor = Compressor(weights, f"{prefix}.compressor", config, CSA_RATIO)
        self.heads, self.dim, self.top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.scale = (self.heads * self.dim) ** -0.5
        self.use_hadamard = use_hadamard

    def take_matrices(self) -> tuple[Matrix, Matrix]:
        """Return the matrix of the queries, which read the same latent as attention's, and that of the heads' weights,
        which read x; they are the caller's from now on."""
        (queries, heads), self._matrices = self._matrices, ()
        return queries, heads

    def __call__(
        self,
        query: Callable[[], Tensor],
        weight: Tensor,
        projected: Tensor,
        batch: RaggedBatch,
        rotation: Tensor,
        entries: Tensor,
        *,
        state: Rows,
        keys: Rows,
    ) -> tuple[Tensor, Tensor]:
        """Store new keys, then return selected [T, K] int64 and is_finite [T].

        query: gives the queries [T, heads x D], where they are needed.   weight: [T, heads] float32.   projected:
        values and gates of the keys.   rotation, entries: see Rotations.
        """
        self.compressor(projected, batch, entries, state=state, pool=keys, rotate=self._rotates(keys))
        return self.select(query, weight, batch, rotation, keys=keys)

    def pooling(self, projected: Tensor, *, state: Rows, keys: Rows) -> Pooling:
        """Return what `cache_write` needs to store this step's keys."""
        return self.compressor.pooling(projected, state=state, pool=keys, rotate=self._rotates(keys))

    def select(
        self, query: Callable[[], Tensor], weight: Tensor, batch: RaggedBatch, rotation: Tensor, *, keys: Rows
    ) -> tuple[Tensor, Tensor]:
        """Return selected [T, K] int64 and is_finite [T]; the keys of this step have been stored."""
        if self._is_shared(batch.num_tokens, len(batch.spans), batch.max_visible(CSA_RATIO)):
            own = own_tokens(batch.num_tokens, self.group)
            selected, is_finite = self._select(
                lambda: query()[own], weight[own], batch.part(own), rotation[own], keys=keys
            )
            selected = torch.nn.functional.pad(selected, (0, self.top_k - selected.shape[1]), value=-1)
            rows = gather_rows(torch.cat([selected, is_finite[:, None]], 1), batch.num_tokens, self.group)
            return rows[:, :-1], rows[:, -1].bool()
        return self._select(query, weight, batch, rotation, keys=keys)

    def _select(
        self, query: Callable[[], Tensor], weight: Tensor, batch: RaggedBatch, rotation: Tensor, *, keys: Rows
    ) -> tuple[Tensor, Tensor]:
        if batch.max_visible(CSA_RATIO) <= self.top_k:  # every visible entry is taken: nothing is scored
            unread = weight.new_empty((*weight.shape, self.dim))
            return index_entries(unread, weight, batch, keys, ratio=CSA_RATIO, top_k=self.top_k)
        q = rope(query().view(-1, self.heads, self.dim), rotation)
        if self._rotates(keys):
            q = hadamard(q)
        if keys.format in QUANTISED_INDEX:
            q = round_trip(q, keys.format)
        return index_entries(q, weight * self.scale, batch, keys, ratio=CSA_RATIO, top_k=self.top_k)

    def heads_of(self, query: Tensor) -> Tensor:
        """Return queries [T, heads x D] as `cache_write` makes them ready, [T, heads, D]."""
        return query.view(-1, self.heads, self.dim)

    def select_decode(self, ready: IndexQuery, batch: DecodeBatch, *, keys: Rows) -> Tensor:
        """Return selected [T, top_k] int32 with decode kernels, for keys of a quantised format.

        A token that scored a key never written selects an entry that it can't see, of which attention makes NaN.
        """
        entries = 0 if batch.longest is None else batch.longest // CSA_RATIO
        if self._is_shared(batch.num_tokens, batch.slots.shape[0], entries):
            own = own_tokens(batch.num_tokens, self.group)
            selected = index_select(ready.part(own), batch.part(own), keys, ratio=CSA_RATIO, top_k=self.top_k)
            return gather_rows(selected, batch.num_tokens, self.group).contiguous()
        return index_select(ready, batch, keys, ratio=CSA_RATIO, top_k=self.top_k)

    def _is_shared(self, num_tokens: int, num_sequences: int, entries: int) -> bool:
        """Return whether ranks select for some of the tokens each: of one sequence, which a long prompt's chunk is."""
        return num_sequences == 1 and pays(num_tokens, entries, top_k=self.top_k, ranks=self.group.count)

    def _rotates(self, keys: Rows) -> bool:
        return self.use_hadamard and keys.format in QUANTISED_INDEX
