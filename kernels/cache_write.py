"""Writing new rows into the cache: the window ring of a slot, and completed entries into blocks.

Ring: position p of a sequence is row p mod rows of its slot. Of a step's tokens only the last `rows` of each sequence
are written, so that no row is written twice. Entries: see kernels/ragged.py. Rounding to the row format happens here.
"""

from __future__ import annotations

from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.rows import Rows


def write_window_reference(kv: Tensor, batch: RaggedBatch, window: Rows) -> None:
    """See write_window."""
    ring = batch.ring_rows(window.rows)
    window.write(ring.unit, ring.position % window.rows, kv[ring.token])


def write_window(kv: Tensor, batch: RaggedBatch, window: Rows) -> None:
    """Store kv [T, D] in the rings. Call it after attention: older keys of the same ring rows are overwritten."""
    if kv.shape != (batch.num_tokens, window.width):
        raise ValueError(f"rows {tuple(kv.shape)} for {batch.num_tokens} tokens of {window.width} channels")
    write_window_reference(kv, batch, window)


def write_entries_reference(rows: Tensor, batch: RaggedBatch, ratio: int, pool: Rows) -> None:
    """See write_entries."""
    entries = batch.entries(ratio)
    units, places = batch.places(entries.sequence, entries.block, pool.rows)
    pool.write(units, places, rows)


def write_entries(rows: Tensor, batch: RaggedBatch, ratio: int, pool: Rows) -> None:
    """Store rows [E, D], one per entry of `batch.entries(ratio)`, in the blocks of their sequences.

    Raises IndexError if a sequence has no block for one of its entries.
    """
    if rows.shape != (batch.entries(ratio).block.shape[0], pool.width):
        raise ValueError(f"rows {tuple(rows.shape)} for {batch.entries(ratio).block.shape[0]} entries of {pool.width}")
    if rows.shape[0]:
        write_entries_reference(rows, batch, ratio, pool)
