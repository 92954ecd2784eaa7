"""Which pair takes a request: a pure choice from snapshots. No clock, no I/O, no state.

Any number of prefill and decode workers: prefill goes by queued prompt tokens, decode by running sequences and free
blocks. There is no prefix affinity: a prefill worker keeps nothing of a prompt that it has pushed, so none of them
knows a prefix better than the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

# A prefill worker accepts this much ahead of what it computes, so that it never waits for the network.
PREFILL_AHEAD_REQUESTS = 2
PREFILL_AHEAD_BATCHES = 2


class PrefillSnapshot(msgspec.Struct, frozen=True):
    """prompts: tokens of each prompt that this router has under way there, counted whole until its first token.

    max_num_batched_tokens: of one chunk.
    """

    url: str
    prompts: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def tokens(self) -> int:
        return sum(self.prompts)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens keeps it busy, or is soon done, without building a second queue there.

        Long prompts keep it busy: two are enough. The short ones get half of each chunk (engine/shares.py): as many as
        fit into that half need not wait here for the long ones, they are done in the next chunk.
        """
        if len(self.prompts) >= self.max_num_seqs + PREFILL_AHEAD_REQUESTS:
            return False
        if self.tokens < PREFILL_AHEAD_BATCHES * self.max_num_batched_tokens:
            return True
        half = self.max_num_batched_tokens // 2
        if num_tokens > half:
            return sum(prompt > half for prompt in self.prompts) < PREFILL_AHEAD_REQUESTS
        return sum(prompt for prompt in self.prompts if prompt <= half) + num_tokens <= half


class DecodeSnapshot(msgspec.Struct, frozen=True):
    """requests: those of this router that are there or on the way.   free_blocks: as it told last, of num_blocks.

    block_tokens: tokens of a block.
    """

    url: str
    requests: int
    free_blocks: int
    num_blocks: int
    max_num_seqs: int
    block_tokens: int

    def free_after(self, num_tokens: int) -> int:
        """Return the blocks that stay free beside a prompt of so many tokens and its first output; below 0: no room."""
        return self.free_blocks - -(-(num_tokens + 1) // self.block_tokens)

    def load_with(self, num_tokens: int) -> float:
        """Return how full it would be, from 0 to 1 and more: of its seats or its blocks, whichever is scarcer."""
        blocks = 1 - self.free_after(num_tokens) / self.num_blocks
        return max((self.requests + 1) / self.max_num_seqs, blocks)


class PairSnapshot(msgspec.Struct, frozen=True):
    prefill: PrefillSnapshot
    decode: DecodeSnapshot


def choose(
    pairs: Sequence[PairSnapshot], num_tokens: int, *, full: Collection[str] = (), avoid: Collection[str] = ()
) -> PairSnapshot | None:
    """Return the pair for a prompt of so many tokens, or None if nobody has room now.

    Of the decode workers with blocks enough and the prefill workers with room: least prompt tokens at prefill first,
    then the emptiest decode; ties go by address. What a worker told of its blocks may be old, so one that seems full is
    asked when no other is left.
    full: workers that refused just now.   avoid: workers that may have failed this request: as few of them as can be.
    """
    open_pairs = [
        p for p in pairs if p.decode.url not in full and p.prefill.url not in full and p.prefill.has_room(num_tokens)
    ]
    return min(
        open_pairs,
        key=lambda p: (
            (p.prefill.url in avoid) + (p.decode.url in avoid),
            p.decode.free_after(num_tokens) < 0,
            p.prefill.tokens,
            len(p.prefill.prompts),
            p.decode.load_with(num_tokens),
            p.decode.requests,
            p.prefill.url,
            p.decode.url,
        ),
        default=None,
    )


def is_held_back(pairs: Sequence[PairSnapshot], num_tokens: int) -> bool:
    """Whether a prompt of so many tokens waits for prefill workers alone: there are some, and none has room for it.

    A shorter one may then have room, and takes nothing that this one waits for.
    """
    return bool(pairs) and not any(pair.prefill.has_room(num_tokens) for pair in pairs)
