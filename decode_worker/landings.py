"""LandingTable: who owns each landing, and the only place where its blocks go back after a transfer.

    reserve -> OPEN --"last" from the writer of every rank, manifest right--> landed: the sequence owns the blocks
                 |--abort, deadline, failed write--> QUARANTINED --"last" or "drained" for every rank--> free
                 |                                              |--writer asked: it never will---------> free
                 |                                              \\--writer known dead, lane drained-----> free
                 \\--abort, and no write was or will be made--> free

A deadline alone frees nothing: a late write must find memory that is nobody else's.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import msgspec

from engine.block_allocator import BlockAllocator, SlotAllocator
from engine.errors import InvalidRequest, NoCapacity
from engine.sequence import max_cached_tokens
from kv_transfer.landing import Landing, Notification
from kv_transfer.layout import KVLayout
from kv_transfer.plan import manifest
from router.protocol import ReserveRequest

WRITER_LOST_GRACE_S = 1.0
"""How long the blocks of a dead writer stay held: what its kernel had taken over may still arrive on the lane."""

_LOST_KEPT = 256

ASK_WRITER_S = 2.0
"""How long a quarantined landing waits for its writer's word before, and between, asking for it."""


class LandingState(enum.Enum):
    OPEN = "open"
    QUARANTINED = "quarantined"


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """One landing that is not free and not landed.

    words: what the writer of each decode rank has said.   checksums: by rank, of each cache group, where one was sent.
    """

    landing: Landing
    request: ReserveRequest
    promised: int
    deadline: float
    state: LandingState = LandingState.OPEN
    words: dict[int, str] = dataclasses.field(default_factory=dict)
    checksums: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict)
    first_token: int = -1
    ask_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Landed:
    """Complete on every rank: the caller now owns blocks, slot and promise."""

    held: Held


@dataclasses.dataclass(frozen=True, slots=True)
class LandingFailed:
    """Will never be complete: tell the router."""

    request_id: str
    reason: str
    is_deadline: bool = False


class LandingTable:
    def __init__(
        self,
        layout: KVLayout,
        *,
        blocks: BlockAllocator,
        slots: SlotAllocator,
        generation: int,
        max_model_len: int,
        leader_url: str,
        on_blocks: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """on_blocks: a test seam: called inside `reserve` when the blocks are taken; may raise."""
        self._on_blocks = on_blocks
        self._layout, self._blocks, self._slots = layout, blocks, slots
        self._generation, self._max_model_len = generation, max_model_len
        self._leader_url = leader_url
        self.agents: tuple[str, ...] = ()
        self._held: dict[int, Held] = {}
        self._key_of: dict[str, int] = {}
        self._lost: dict[int, float] = {}  # generations of dead writers: when what they held is free
        self._next_key = 1
        self.num_stale = 0
        self.num_failures = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_open(self) -> int:
        return sum(h.state is LandingState.OPEN for h in self._held.values())

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(h.landing.block_ids) for h in self._held.values() if h.state is LandingState.QUARANTINED)

    def open_requests(self, *, router: str | None = None) -> list[str]:
        """Return the ids whose landing is open; of one router, or of all."""
        return [r for r, key in self._key_of.items() if router in (None, self._held[key].request.router)]

    def reserve(self, request: ReserveRequest, now: float) -> Landing:
        """Hold blocks for the prompt, a slot, and the promise of all growth. Whatever it raises, nothing is held.

        Raises NoCapacity, also when this process has no memory for it, or InvalidRequest.
        """
        num_tokens = len(request.prompt_token_ids)
        if request.request_id in self._key_of:
            raise InvalidRequest(f"request_id {request.request_id!r} has a landing already")
        most = max_cached_tokens(num_tokens, request.num_prior_outputs, request.sampling, self._max_model_len)
        count = self._layout.num_blocks_for(num_tokens)
        promised = self._layout.num_blocks_for(most) - count
        block_ids, slot = self._blocks.admit(count, later=promised), None
        try:
            self._on_blocks(request.request_id)
            slot = self._slots.take()
            landing = Landing(
                request_id=request.request_id,
                key=self._next_key,
                generation=self._generation,
                num_tokens=num_tokens,
                block_ids=tuple(block_ids),
                slot=slot,
                layout=self._layout.fingerprint(),
                agents=self.agents,
                leader_url=self._leader_url,
            )
            held = Held(landing, request, promised, deadline=now + request.timeout_s)
        except BaseException as error:
            self._blocks.release(block_ids, unused_promise=promised)
            if slot is not None:
                self._slots.release(slot)
            if isinstance(error, MemoryError):
                raise NoCapacity(
                    "the decode leader has no memory for another landing; wait for running requests"
                ) from error
            raise
        self._next_key += 1
        self._held[landing.key] = held
        self._key_of[request.request_id] = landing.key
        return landing

    def on_notification(self, rank: int, word: Notification) -> Landed | LandingFailed | None:
        """Take in a writer's word to decode rank `rank`."""
        held = self._held.get(word.key) if word.generation == self._generation else None
        if held is None:
            self.num_stale += 1  # of an earlier life, or said twice
            return None
        if rank in held.words:
            self.num_stale += 1
            return None
        wrong = self._what_is_wrong(held, word) if word.kind == "last" else "the writer gave up"
        held.words[rank] = "wrong" if wrong else word.kind
        if word.kind == "last":
            held.first_token = word.first_token
            held.checksums[rank] = {g.name: g.checksum for g in word.manifest if g.checksum is not None}
        failed = self._fail(held, wrong) if wrong else None
        if len(held.words) == len(self.agents):
            if held.state is LandingState.OPEN:
                self._forget(held)
                return Landed(held)
            self._free(held)
        return failed

    def on_drained(self, key: int, generation: int) -> LandingFailed | None:
        """The writer's leader says that no rank of it will touch the landing again."""
        held = self._held.get(key) if generation == self._generation else None
        if held is None:
            self.num_stale += 1
            return None
        failed = self._fail(held, "the writer gave up, and could not say so over the transport")
        self._free(held)
        return failed

    def abort(self, request_id: str, *, drained: bool) -> bool:
        """End an open landing; True if there was one. Freed at once only if no write can come any more."""
        key = self._key_of.get(request_id)
        if key is None:
            return False
        held = self._held[key]
        self._quarantine(held)
        if drained:
            self._free(held)
        return True

    def writer_lost(self, generation: int, now: float) -> list[LandingFailed]:
        """The prefill group of that generation is dead: its landings end, and are free after a grace.

        Those that come later, from a router that does not know it yet, end with the next `expire`.
        """
        self._lost.setdefault(generation, now + WRITER_LOST_GRACE_S)
        while len(self._lost) > _LOST_KEPT:
            del self._lost[next(iter(self._lost))]
        return self._fail_lost()

    def expire(self, now: float) -> list[LandingFailed]:
        """End landings whose time is up or whose writer is dead; free the latter once their grace is over."""
        failures = self._fail_lost()
        for held in list(self._held.values()):
            if now >= self._lost.get(held.request.writer_generation, float("inf")):
                self._free(held)
            elif held.state is LandingState.OPEN and now >= held.deadline:
                failures.append(
                    LandingFailed(
                        held.landing.request_id,
                        f"the cache did not arrive within {held.request.timeout_s:.1f} s (phase: transfer)",
                        is_deadline=True,
                    )
                )
                self._quarantine(held)
        return failures

    def to_ask(self, now: float) -> list[Held]:
        """Return quarantined landings whose writer has been silent for ASK_WRITER_S.

        It may never have heard of them: a router that died, or gave up a stopped worker, tells nobody.
        """
        due = []
        for held in self._held.values():
            is_silent = held.request.writer_generation not in self._lost
            if held.state is LandingState.QUARANTINED and is_silent and held.request.writer_url:
                if held.ask_at is not None and now >= held.ask_at:
                    due.append(held)
                if held.ask_at is None or now >= held.ask_at:
                    held.ask_at = now + ASK_WRITER_S
        return due

    # ------------------------------------------------------------ inner

    def _what_is_wrong(self, held: Held, word: Notification) -> str:
        expected = manifest(self._layout, held.landing.num_tokens)
        if word.num_tokens != held.landing.num_tokens:
            return f"the writer sent {word.num_tokens} tokens, the landing is for {held.landing.num_tokens}"
        if tuple(msgspec.structs.replace(group, checksum=None) for group in word.manifest) != expected:
            return f"the writer sent {word.manifest}, the landing needs {expected}"
        if word.first_token < 0 or held.first_token not in (-1, word.first_token):
            return f"first token {word.first_token}, another rank was told {held.first_token}"
        return ""

    def _fail_lost(self) -> list[LandingFailed]:
        lost = [h for h in self._held.values() if h.request.writer_generation in self._lost]
        return [failed for held in lost if (failed := self._fail(held, "the prefill worker died"))]

    def _fail(self, held: Held, reason: str) -> LandingFailed | None:
        """Quarantine an open landing; None if the router was told already."""
        if held.state is not LandingState.OPEN:
            return None
        self.num_failures += 1
        self._quarantine(held)
        return LandingFailed(held.landing.request_id, reason)

    def _quarantine(self, held: Held) -> None:
        held.state = LandingState.QUARANTINED
        self._key_of.pop(held.landing.request_id, None)
        if held.promised:
            self._blocks.release((), unused_promise=held.promised)
            held.promised = 0
        if held.words and len(held.words) == len(self.agents):
            self._free(held)

    def _forget(self, held: Held) -> None:
        del self._held[held.landing.key]
        self._key_of.pop(held.landing.request_id, None)

    def _free(self, held: Held) -> None:
        if held.landing.key in self._held:
            self._forget(held)
            self._blocks.release(held.landing.block_ids, unused_promise=held.promised)
            self._slots.release(held.landing.slot)
