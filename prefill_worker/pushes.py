"""PushTable: what of a sequence's cache goes into its landing, and when its own blocks may be reused.

The leader decides here; the ranks write. Whole blocks go as soon as every token in them is computed; the last push
takes the rest and the state record, and carries the first token.

    opened -> blocks .. -> last --done from every rank--------------> closed
                       \\-> cancelled --drained from every rank-----> closed

Until closed, the sequence's blocks and slot are a source of writes and stay held.
"""

from __future__ import annotations

import collections
import dataclasses

from engine.plan import CancelPush, PushDone, PushPlan
from engine.sequence import Sequence
from kv_transfer.landing import Landing


@dataclasses.dataclass(slots=True, eq=False)
class Push:
    """The way of one sequence into one landing. request_id: of the answer that goes on there."""

    sequence: Sequence
    landing: Landing
    request_id: str
    ranks_left: set[int]
    has_checksum: bool = False
    num_pushed: int = 0
    has_started: bool = False
    is_last_sent: bool = False
    is_cancelled: bool = False
    is_undelivered: bool = False
    is_open: bool = True
    error: str = ""


@dataclasses.dataclass(slots=True)
class TransferTotals:
    """What the ranks have told of all pushes so far. handovers: caches that were handed over whole, per rank."""

    num_bytes: int = 0
    num_pieces: int = 0
    seconds: float = 0.0
    post_seconds: float = 0.0
    handovers: int = 0
    exposed_seconds: float = 0.0
    causes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def failures(self) -> int:
        return sum(self.causes.values())

    def count(self, message: PushDone) -> None:
        self.num_bytes += message.num_bytes
        self.num_pieces += message.num_pieces
        self.seconds += message.seconds
        self.post_seconds += message.post_seconds
        self.exposed_seconds += message.exposed_seconds
        self.handovers += message.status == "done" and message.is_last
        if message.cause:
            self.causes[message.cause] += 1


class PushTable:
    """Every push that is not closed."""

    def __init__(self, *, num_ranks: int, block_tokens: int) -> None:
        self._num_ranks, self._block_tokens = num_ranks, block_tokens
        self._pushes: dict[tuple[int, int], Push] = {}
        self.totals = TransferTotals()

    def __len__(self) -> int:
        return len(self._pushes)

    def holds(self, sequence: Sequence) -> bool:
        """The sequence's blocks are, or will be, the source of a write."""
        return any(push.sequence is sequence for push in self._pushes.values())

    def of_request(self, request_id: str) -> Push | None:
        return next((p for p in self._pushes.values() if p.request_id == request_id), None)

    def open(self, sequence: Sequence, landing: Landing, request_id: str, *, checksum: bool = False) -> Push:
        """Begin; nothing is written yet."""
        push = Push(sequence, landing, request_id, ranks_left=set(range(self._num_ranks)), has_checksum=checksum)
        self._pushes[landing.generation, landing.key] = push
        return push

    def computed(self, push: Push) -> PushPlan | None:
        """Return what to write after a chunk: the blocks that are full and not pushed. None if there are none."""
        full = push.sequence.num_computed // self._block_tokens
        if full <= push.num_pushed or push.is_cancelled or not push.is_open:
            return None
        return self._plan(push, last=full)

    def finish(self, push: Push, first_token: int) -> PushPlan:
        """Return the last write: the remaining blocks, the state record, and the first token."""
        push.is_last_sent = True
        return self._plan(push, last=len(push.landing.block_ids), is_last=True, first_token=first_token)

    def cancel(self, push: Push) -> CancelPush | None:
        """Stop writing. None: no write was ever asked for, and the push is closed at once."""
        if not push.has_started:
            self._close(push)
            return None
        push.is_cancelled = True
        return CancelPush(landing=push.landing)

    def on_done(self, message: PushDone) -> Push | None:
        """Take in a rank's word; return the push if that closed it. push.error tells a failed last write."""
        self.totals.count(message)
        push = self._pushes.get((message.generation, message.key))
        if push is None:
            return None
        if message.status == "failed":
            push.error = message.error
        if message.status == "undelivered":
            push.is_undelivered = True
        # After a failure the rank still says when it is drained: only that makes the source reusable.
        if message.status in ("drained", "undelivered") or (message.status == "done" and message.is_last):
            push.ranks_left.discard(message.rank)
        if push.ranks_left:
            return None
        self._close(push)
        return push

    def _plan(self, push: Push, *, last: int, is_last: bool = False, first_token: int = -1) -> PushPlan:
        first, push.num_pushed, push.has_started = push.num_pushed, last, True
        return PushPlan(
            landing=push.landing,
            block_ids=push.sequence.block_ids,
            slot=push.sequence.slot,
            first=first,
            last=last,
            is_last=is_last,
            first_token=first_token,
            checksum=push.has_checksum,
        )

    def _close(self, push: Push) -> None:
        push.is_open = False
        del self._pushes[push.landing.generation, push.landing.key]
