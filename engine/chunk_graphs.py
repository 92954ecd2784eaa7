"""ChunkGraphs: short chunks of prompts, captured once for each of some numbers of tokens and replayed.

The host launches some 3,000 kernels for a chunk of whatever length, and with fewer than about 4,000 tokens a GPU waits
for it most of the time. A chunk of T tokens runs in the smallest graph of at least T; what is left over are padding
tokens (sequence -1), which read and write nobody's cache. Its sequences are any number up to a fixed one.

Everything that changes from chunk to chunk lies in device memory: token ids, positions, whose they are, where each
sequence begins, its slot and block table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cache import KVCache
from engine.graph_set import GraphSet
from engine.graph_sizes import graph_size
from engine.model.model import DeepSeekV4
from kernels.ragged import DecodeBatch


class ChunkGraphs:
    """One rank's short chunks, over packed rows.

    sizes: tokens of each graph, ascending.   sequences: of a chunk, at most.   longest: a sequence's last position of a
    chunk lies below it, so that the indexer has a fixed number of entries to look at.
    """

    def __init__(
        self, model: DeepSeekV4, cache: KVCache, *, sizes: Sequence[int], sequences: int, longest: int
    ) -> None:
        device, most, config = cache.device, sizes[-1], model.config
        self.sizes, self.longest = tuple(sizes), longest
        self._model, self._cache = model, cache
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        columns = min(cache.layout.num_blocks_for(longest), cache.num_blocks)

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self._all = DecodeBatch(
            positions=ints(most), sequence=ints(most, value=-1), starts=ints(sequences),
            query_start=ints(sequences + 1), slots=ints(sequences), block_table=ints(sequences, columns, value=-1),
            num_tokens=most, max_query_len=most, longest=longest,
        )  # fmt: skip
        self._streams = torch.empty(
            (most, config.hc_mult, config.hidden_size), dtype=model.embedding.dtype, device=device
        )
        self._graphs = GraphSet(self._run, device)

    @property
    def nodes(self) -> dict[int, int]:
        """Return the nodes of each captured graph, by its tokens."""
        return dict(self._graphs.nodes)

    @property
    def state_bytes(self) -> int:
        """Bytes of what lives as long as the graphs: inputs, and the streams that they leave."""
        batch = self._all
        own = (batch.positions, batch.sequence, batch.starts, batch.query_start, batch.slots, batch.block_table)
        return sum(t.numel() * t.element_size() for t in (self._token_ids, self._streams, *own))

    def capture(self, progress: Callable[[str], None] | None = None) -> None:
        """Capture every size and replay each once; every token is padding meanwhile."""
        self._graphs.capture(self.sizes, unit="tokens", progress=progress)

    def takes(self, batch: Batch) -> bool:
        """Return whether a graph has room for a batch."""
        ragged = batch.ragged
        return (
            ragged.num_tokens <= self.sizes[-1]
            and len(ragged.spans) <= self._all.slots.shape[0]
            and sum(max(ragged.spans, key=sum)) <= self.longest
        )

    def run(self, batch: Batch) -> Tensor:
        """Return the streams [T, n, H] after the last layer, as DeepSeekV4.forward does; the next call overwrites them.

        batch: one that `takes` has said yes to.
        """
        size = graph_size(self.sizes, batch.ragged.num_tokens)
        self._tell(batch, size)
        self._graphs(size)
        return self._streams[: batch.ragged.num_tokens]

    def _tell(self, batch: Batch, size: int) -> None:
        """Copy a batch to where graphs read it: behind the last replay, whose streams somebody has read."""
        given, kept = batch.ragged.decode, self._all
        tokens, sequences = given.num_tokens, given.slots.shape[0]
        self._token_ids[:tokens].copy_(batch.token_ids)
        kept.positions[:tokens].copy_(given.positions)
        kept.sequence[:tokens].copy_(given.sequence)
        kept.sequence[tokens:size].fill_(-1)
        # Sequences that are not there have no tokens: they begin where the last one ends.
        kept.query_start.fill_(tokens)
        kept.query_start[: sequences + 1].copy_(given.query_start)
        kept.starts[:sequences].copy_(given.starts)
        kept.slots[:sequences].copy_(given.slots)
        columns = min(given.block_table.shape[1], kept.block_table.shape[1])
        kept.block_table.fill_(-1)
        kept.block_table[:sequences, :columns].copy_(given.block_table[:, :columns])

    def _run(self, size: int) -> None:
        """Run the first `size` tokens. All of it is captured: no value is read back."""
        batch = self._all.first_tokens(size)
        rotations = self._model.rotary.of_tokens(batch.positions)
        streams = self._model.chunk(self._token_ids[:size], batch, rotations, self._cache)
        self._streams[:size].copy_(streams)
