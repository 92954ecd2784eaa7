"""Which pair takes a request: a pure choice from snapshots. No clock, no I/O, no state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

# A prefill worker accepts this much ahead of what it computes, so that it never waits for the network.
PREFILL_AHEAD_REQUESTS = 2
PREFILL_AHEAD_BATCHES = 2


class PrefillSnapshot(msgspec.Struct, frozen=True):
    """prefills: requests that this router has under way there; tokens: their prompt tokens."""

    url: str
    prefills: int
    tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def has_room(self) -> bool:
        """Whether one more keeps it busy without building a second queue there."""
        if self.prefills < PREFILL_AHEAD_REQUESTS:
            return True
        few = self.prefills < self.max_num_seqs + PREFILL_AHEAD_REQUESTS
        return few and self.tokens < PREFILL_AHEAD_BATCHES * self.max_num_batched_tokens


class DecodeSnapshot(msgspec.Struct, frozen=True):
    """requests: those of this router that are there or on the way."""

    url: str
    requests: int
    free_blocks: int


class PairSnapshot(msgspec.Struct, frozen=True):
    prefill: PrefillSnapshot
    decode: DecodeSnapshot


def choose(
    pairs: Sequence[PairSnapshot], *, full: Collection[str] = (), avoid: Collection[str] = ()
) -> PairSnapshot | None:
    """Return the pair for the next request, or None if nobody has room now.

    Least prompt tokens at prefill first, then least requests and most free blocks at decode; ties go by address.
    full: workers that refused just now.   avoid: workers that may have failed this request: as few of them as can be.
    """
    open_pairs = [p for p in pairs if p.prefill.has_room and p.decode.url not in full and p.prefill.url not in full]
    return min(
        open_pairs,
        key=lambda p: (
            (p.prefill.url in avoid) + (p.decode.url in avoid),
            p.prefill.tokens,
            p.prefill.prefills,
            p.decode.requests,
            -p.decode.free_blocks,
            p.prefill.url,
            p.decode.url,
        ),
        default=None,
    )
