"""Attention of shared-KV heads over a sliding window and selected compressed entries, with a sink.

    s_n = q_h . key_n * scale;   out_h = sum exp(s_n) key_n / (sum exp(s_n) + exp(sink_h));   key_n is value as well
    lse_h = log(sum exp(s_n) + exp(sink_h))

Keys of the token at position t: its window t-W+1..t, from this step's rows where they are this step's, else from the
slot's ring (position mod W) as it was before the step; and the entries named in `selected`, or, without `selected`, all
that it sees. Index -1 means nothing, wherever it stands in a row.

A row without keys: out is exactly 0; lse is the sink, or -inf without one. `merge_attention` joins partial results;
only one of them may carry the sink. Rows that no token names are never read.

Layout: q [T, H, D], new rows [T, D] rounded to the window's row format, out [T, H, D], lse [T, H], float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.rows import Rows

_TILE_BYTES = 32 << 20


def attend_reference(
    q: Tensor, keys: list[Tensor], allowed: list[Tensor], sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H] of q [T, H, D] (scaled) over several sets of keys [T, N, D], allowed [T, N].

    Keys that are not allowed must be finite: they get weight 0, which does not silence a NaN.
    """
    scores = torch.cat([torch.bmm(q, k.transpose(1, 2)) for k in keys], -1)
    scores.masked_fill_(~torch.cat(allowed, -1)[:, None], -math.inf)
    top = scores.amax(-1) if scores.shape[-1] else scores.new_full(q.shape[:2], -math.inf)
    if sink is not None:
        top = torch.maximum(top, sink)
    # With nothing to attend and no sink the maximum is -inf; any finite stand-in keeps exp(-inf - top) at 0, not NaN.
    shift = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - shift[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    out = torch.zeros_like(q)
    for part, k in zip(torch.split(weights, [k.shape[1] for k in keys], -1), keys, strict=True):
        out += torch.bmm(part, k)
    out = torch.where(total[..., None] == 0, 0.0, out / total[..., None])
    return out, shift + total.log()


def sparse_attention_reference(
    q: Tensor,
    new_rows: Tensor,
    batch: RaggedBatch,
    window: Rows,
    *,
    sink: Tensor | None,
    scale: float,
    compressed: Rows | None = None,
    ratio: int = 0,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See sparse_attention."""
    tokens, heads, dim = q.shape
    size = window.rows
    table = torch.cat([_used_ring_rows(batch, window), new_rows, new_rows.new_zeros((1, dim))])
    index = batch.window_index(size)
    is_key = index != table.shape[0] - 1
    width = 0 if compressed is None else batch.max_visible(ratio) if selected is None else selected.shape[1]
    out, lse = q.new_empty((tokens, heads, dim), dtype=torch.float32), q.new_empty((tokens, heads), dtype=torch.float32)
    step = max(1, _TILE_BYTES // (4 * dim * (size + width)))
    for low in range(0, tokens, step):
        tile = slice(low, low + step)
        keys, allowed = [table[index[tile]]], [is_key[tile]]
        if compressed is not None and width:
            entries, is_entry = _selected_entries(batch, compressed, ratio, selected, tile)
            keys.append(entries)
            allowed.append(is_entry)
        out[tile], lse[tile] = attend_reference(q[tile].float() * scale, keys, allowed, sink)
    return out, lse


def sparse_attention(
    q: Tensor,
    new_rows: Tensor,
    batch: RaggedBatch,
    window: Rows,
    *,
    sink: Tensor | None,
    scale: float,
    compressed: Rows | None = None,
    ratio: int = 0,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H], float32.

    q: [T, H, D].   new_rows: [T, D] float32, after the round trip through the window's format; the ring must not hold
    them yet.   sink: [H] float32 or None.   compressed: the layer's entries of `ratio`, those of this step included.
    selected: [T, K] int64 entry numbers, -1 for none; None: every visible entry.
    Raises IndexError for an entry that the token does not see yet, or that has no block.
    """
    tokens, heads, dim = q.shape
    if tokens != batch.num_tokens or new_rows.shape != (tokens, dim) or dim != window.width:
        raise ValueError(
            f"q {tuple(q.shape)}, new rows {tuple(new_rows.shape)}: {batch.num_tokens} tokens of {window.width}"
        )
    if sink is not None and sink.shape != (heads,):
        raise ValueError(f"sink of shape {tuple(sink.shape)} for {heads} heads")
    if compressed is not None and (compressed.width != dim or ratio < 1):
        raise ValueError(f"compressed rows of {compressed.width} channels, ratio {ratio}, for queries of {dim}")
    if selected is not None and (compressed is None or selected.shape[0] != tokens):
        raise ValueError(f"selection of shape {tuple(selected.shape)} for {tokens} tokens")
    return sparse_attention_reference(
        q, new_rows, batch, window, sink=sink, scale=scale, compressed=compressed, ratio=ratio, selected=selected
    )


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of two partial results over disjoint keys. Empty parts (lse -inf) are neutral, bit for bit."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    out = out_a * torch.exp(lse_a - shift)[..., None] + out_b * torch.exp(lse_b - shift)[..., None]
    return out, lse


def _used_ring_rows(batch: RaggedBatch, window: Rows) -> Tensor:
    """Return [B*W, D]: the rings of the batch's slots, zero where no token of the step looks."""
    size = window.rows
    sequence, row = batch.old_window_rows(size)
    rings = torch.zeros((len(batch.spans) * size, window.width), device=batch.device)
    rings[sequence * size + row] = window.read(batch.slots[sequence], row)
    return rings


def _selected_entries(
    batch: RaggedBatch, pool: Rows, ratio: int, selected: Tensor | None, tile: slice
) -> tuple[Tensor, Tensor]:
    """Return keys [t, K, D] and allowed [t, K] of a tile; a row that many tokens want is read once."""
    visible = batch.num_visible(ratio)[tile, None]
    if selected is None:
        columns = torch.arange(int(visible.max()), device=batch.device)
        entries = torch.where(columns < visible, columns, -1)
    else:
        entries = selected[tile]
        if bool((entries >= visible).any()):
            token = tile.start + int((entries >= visible).any(1).nonzero()[0])
            raise IndexError(f"token {token} selects entry {int(entries.max())}: not visible at its position")
    is_entry = entries >= 0
    used = is_entry.any(0)
    entries, is_entry = entries[:, used], is_entry[:, used]
    sequence = batch.sequence[tile, None].expand_as(entries)[is_entry]
    units, rows = batch.places(sequence, entries[is_entry], pool.rows)
    distinct, inverse = torch.unique(units * pool.rows + rows, return_inverse=True)
    found = (
        pool.read(distinct // pool.rows, distinct % pool.rows)
        if distinct.numel()
        else distinct.new_zeros((0, pool.width))
    )
    table = torch.cat([found, torch.zeros((1, pool.width), device=batch.device)])
    index = torch.full_like(entries, distinct.shape[0])
    index[is_entry] = inverse
    return table[index], is_entry
