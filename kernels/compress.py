"""Gated pooling of consecutive tokens into one entry, across any chunk boundary.

Inputs are K and G (the gate, position bias included), float32. Softmax runs over tokens, per channel.

    CSA, ratio 4, K and G [T, 2D]: entry b pools 8 rows: positions 4b-4..4b-1 with the first halves [0:D], positions
        4b..4b+3 with the second halves [D:2D]. Entry 0 has no previous block, so 4 rows.
        State: a ring of 8 positions, row 2*(p mod 8) is K, the next one G: all that an entry may need of earlier steps.
    HCA, ratio 128, K and G [T, D]: entry b pools its own 128 positions.
        State: row 0 max of G so far, row 1 sum of exp(G - max), row 2 sum of exp(G - max) * K of the unfinished entry;
        void when the sequence's length is a multiple of 128.

State rows that a sequence never wrote are never read, whatever bytes they hold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.rows import Rows

CSA_RATIO = 4
CSA_POSITIONS = 2 * CSA_RATIO
HCA_RATIO = 128


def compress_csa_reference(kv: Tensor, gate: Tensor, batch: RaggedBatch, state: Rows) -> Tensor:
    """See compress_csa."""
    dim = kv.shape[1] // 2
    source = batch.entry_sources(CSA_RATIO, CSA_POSITIONS)
    pooled = kv.new_empty((0, dim))
    if source.index.shape[0]:
        old = source.position % CSA_POSITIONS * 2
        k = torch.cat([state.read(source.unit, old), kv, kv.new_zeros((1, 2 * dim))])[source.index]
        g = torch.cat([state.read(source.unit, old + 1), gate, gate.new_zeros((1, 2 * dim))])[source.index]
        g = g.masked_fill(~source.valid[..., None], -math.inf)
        k = torch.cat([k[:, :CSA_RATIO, :dim], k[:, CSA_RATIO:, dim:]], 1)
        g = torch.cat([g[:, :CSA_RATIO, :dim], g[:, CSA_RATIO:, dim:]], 1)
        pooled = (k * torch.softmax(g, 1)).sum(1)
    ring = batch.ring_rows(CSA_POSITIONS)
    row = ring.position % CSA_POSITIONS * 2
    state.write(ring.unit, row, kv[ring.token])
    state.write(ring.unit, row + 1, gate[ring.token])
    return pooled


def compress_csa(kv: Tensor, gate: Tensor, batch: RaggedBatch, state: Rows) -> Tensor:
    """Return [E, D] float32, one row per entry of `batch.entries(4)`, and move the ring on.

    kv, gate: [T, 2D] float32, packed.   state: 16 fp32 rows of 2D per slot.
    """
    _check(kv, gate, batch, state, rows=2 * CSA_POSITIONS)
    return compress_csa_reference(kv, gate, batch, state)


def compress_hca_reference(kv: Tensor, gate: Tensor, batch: RaggedBatch, state: Rows) -> Tensor:
    """See compress_hca."""
    parts = batch.parts(HCA_RATIO)
    part, dim = parts.part, kv.shape[1]
    shape = (parts.sequence.shape[0], dim)
    top = kv.new_full(shape, -math.inf).scatter_reduce_(0, part[:, None].expand(-1, dim), gate, "amax")
    weight = torch.exp(gate - top[part])
    total = kv.new_zeros(shape).index_add_(0, part, weight)
    summed = kv.new_zeros(shape).index_add_(0, part, weight * kv)

    if parts.resumed.shape[0]:
        resumed, units = parts.resumed, batch.slots[parts.sequence[parts.resumed]]
        old_top, old_total, old_summed = (state.read(units, torch.full_like(units, row)) for row in range(3))
        both = torch.maximum(old_top, top[resumed])
        old_factor, new_factor = torch.exp(old_top - both), torch.exp(top[resumed] - both)
        total[resumed] = old_total * old_factor + total[resumed] * new_factor
        summed[resumed] = old_summed * old_factor + summed[resumed] * new_factor
        top[resumed] = both
    if parts.open.shape[0]:
        units = batch.slots[parts.sequence[parts.open]]
        for row, values in enumerate((top, total, summed)):
            state.write(units, torch.full_like(units, row), values[parts.open])
    return summed[parts.complete] / total[parts.complete]


def compress_hca(kv: Tensor, gate: Tensor, batch: RaggedBatch, state: Rows) -> Tensor:
    """Return [E, D] float32, one row per entry of `batch.entries(128)`, and keep the unfinished entry's sums.

    kv, gate: [T, D] float32, packed.   state: 3 fp32 rows of D per slot.
    """
    _check(kv, gate, batch, state, rows=3)
    return compress_hca_reference(kv, gate, batch, state)


def _check(kv: Tensor, gate: Tensor, batch: RaggedBatch, state: Rows, *, rows: int) -> None:
    if kv.shape != gate.shape or kv.shape != (batch.num_tokens, state.width) or kv.dtype != torch.float32:
        raise ValueError(
            f"K {tuple(kv.shape)} {kv.dtype}, G {tuple(gate.shape)}: wanted ({batch.num_tokens}, {state.width}) float32"
        )
    if state.rows != rows or state.format != "fp32":
        raise ValueError(f"compressor state of {state.rows} {state.format} rows: wanted {rows} fp32 rows")
