"""Rollback: a step that ran out of memory half way has not happened.

Entries in blocks may simply be written again: nothing reads them before the step that completes them has ended. The
state record is different. A step of one token overwrites in its rings (window, csa_state, index_state) only positions
that no later token needs, and running it again writes the same; but the sums of hca_state would count the token twice.
A step of several tokens also overwrites ring rows that its own first tokens read.

So kept are: the sums of sequences that run one token, the whole record of those that run more, nothing of those that
begin at position 0, whose state is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cache import KVCache

SUMS = "hca_state"


class Rollback:
    """What one step may destroy: `keep` before it runs, `undo` if it has failed."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(self, batch: Batch) -> None:
        """Copy what `undo` will need. May run out of memory itself; nothing is lost then."""
        spans = batch.ragged.spans
        single = [i for i, (start, length) in enumerate(spans) if start and length == 1]
        several = [i for i, (start, length) in enumerate(spans) if start and length > 1]
        for group in self._cache.layout.groups:
            if group.unit == "slot":
                pool = self._cache.pools[group.name]
                self._keep(pool.view(torch.int64), batch, several)  # units are multiples of 16 bytes
                for region in group.regions:
                    if region.name == SUMS:
                        self._keep(pool[:, region.offset : region.offset + region.num_bytes], batch, single)

    def undo(self) -> None:
        """Put back what was kept, byte for byte."""
        for pool, slots, before in self._kept:
            pool[slots] = before
        self._kept.clear()

    def _keep(self, pool: Tensor, batch: Batch, chosen: list[int]) -> None:
        if chosen:
            slots = batch.ragged.slots if len(chosen) == len(batch.seqs) else batch.ragged.slots[chosen]
            self._kept.append((pool, slots, pool[slots]))
