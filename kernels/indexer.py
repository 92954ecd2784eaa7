"""Which compressed entries a token attends: scores of the lightning indexer, and the best k.

    score[t, b] = sum_h weight[t, h] * relu(query[t, h] . key[b])        for the entries b < (t+1) // 4 that t sees
    selected[t] = the k best, all of them when no more than k are visible (then nothing is scored)

Rules of the selection: equal scores go to the lower entry; an entry scored NaN or -inf is never selected; places left
over are -1. A token with a score that is not finite has read a key that was never written, so it is reported, and the
caller must not use its output.

Layout: queries [T, heads, D] rounded like the keys, weights [T, heads], keys as paged `Rows`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.rows import Rows

_TILE_BYTES = 16 << 20


def select_top_k_reference(scores: Tensor, k: int) -> Tensor:
    """See select_top_k."""
    values, order = scores.masked_fill(scores.isnan(), -math.inf).sort(dim=-1, descending=True, stable=True)
    best = order[:, :k].masked_fill(values[:, :k] == -math.inf, -1)
    if best.shape[1] < k:
        best = torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1)
    return best


def select_top_k(scores: Tensor, k: int) -> Tensor:
    """Return [T, k] int64: columns of the k best of scores [T, N] float32, best first, -1 where there are fewer."""
    if scores.dim() != 2 or k < 1:
        raise ValueError(f"scores of shape {tuple(scores.shape)}, k {k}: wanted [T, N] and k of at least 1")
    return select_top_k_reference(scores, k)


def index_entries_reference(
    query: Tensor, weight: Tensor, batch: RaggedBatch, keys: Rows, *, ratio: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """See index_entries."""
    visible = batch.num_visible(ratio)
    columns = torch.arange(min(top_k, batch.max_visible(ratio)), device=batch.device)
    selected = torch.where(columns < visible[:, None], columns, -1)
    is_finite = torch.ones_like(visible, dtype=torch.bool)
    first = 0
    for index, (start, length) in enumerate(batch.spans):
        entries = torch.arange((start + length) // ratio, device=batch.device)
        # The first token that sees more than top_k entries; those before it take all they see.
        scored = first + max(0, (top_k + 1) * ratio - 1 - start)
        end = first + length
        if scored < end:
            of_sequence = torch.full_like(entries, index)
            key = keys.read(*batch.places(of_sequence, entries, keys.rows))
            step = max(1, _TILE_BYTES // (4 * query.shape[1] * entries.shape[0]))
            for low in range(scored, end, step):
                tile = slice(low, min(low + step, end))
                scores = _scores(query[tile], weight[tile], key)
                hidden = entries >= visible[tile, None]
                is_finite[tile] = (scores.isfinite() | hidden).all(1)
                selected[tile] = select_top_k_reference(scores.masked_fill_(hidden, -math.inf), top_k)
        first = end
    return selected, is_finite


def index_entries(
    query: Tensor, weight: Tensor, batch: RaggedBatch, keys: Rows, *, ratio: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return selected [T, K] int64 (entry numbers, -1 for none; K <= top_k) and is_finite [T] bool.

    query [T, heads, D] and weight [T, heads] float32. The keys of this step's entries must have been written.
    """
    tokens, heads, dim = query.shape
    if weight.shape != (tokens, heads) or tokens != batch.num_tokens or dim != keys.width:
        raise ValueError(
            f"queries {tuple(query.shape)}, weights {tuple(weight.shape)}: "
            f"{batch.num_tokens} tokens and keys of {keys.width} channels"
        )
    return index_entries_reference(query, weight, batch, keys, ratio=ratio, top_k=top_k)


def _scores(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    tokens, heads, dim = query.shape
    dots = (query.reshape(-1, dim) @ key.T).view(tokens, heads, -1).relu_()
    return torch.bmm(weight[:, None], dots)[:, 0]
