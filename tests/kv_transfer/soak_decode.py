"""The receiving process of the soak: hands out landings, and their blocks again only when nobody writes there.

Run as `python soak_decode.py TRANSPORT MEMORY GENERATION FD`; FD is a multiprocessing connection. In:

    ("reserve", request, tokens, writer generation)     ("abort", landing)     ("drained", landing)
    ("writer lost", generation)                         ("state",)             ("settle",)

Out: ("endpoint", Endpoint), ("landing", request, Landing or None), ("landed", request, faults), ("late", faults),
("state", dict). A landing is the key of this process' life; orders about another life's are ignored.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import select
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from pool_memory import Memory
from soak_content import FREE, LAYOUT, NUM_BLOCKS, NUM_SLOTS, resources
from soak_pools import Pools

from kv_transfer.landing import Landing, Notification, decode_notification
from kv_transfer.plan import manifest
from kv_transfer.transports import make_transport

NUM_KEPT = 2
GRACE_S = 1.0
"""As decode has it: what the kernel of a dead writer has taken over may still arrive."""

_BUSY_NAP_S, _IDLE_NAP_S = 0.0002, 0.005


@dataclasses.dataclass
class Held:
    """A landing that somebody may write to. free_at: its writer is dead."""

    landing: Landing
    request: int
    writer_generation: int
    is_quarantined: bool = False
    free_at: float = float("inf")


class Owner:
    """Who owns each block and slot: nobody, a landing, or (for a while) the request that landed."""

    def __init__(self, pools: Pools, generation: int, agent: str) -> None:
        self._pools, self._generation, self._agent = pools, generation, agent
        self._blocks, self._slots = set(range(NUM_BLOCKS)), set(range(NUM_SLOTS))
        self._random = random.Random(generation)
        self._kept: collections.deque[tuple[int, tuple[int, ...], int]] = collections.deque()
        self._keys = 0
        self.held: dict[int, Held] = {}
        self.late: list[str] = []

    def reserve(self, request: int, tokens: int, writer_generation: int) -> Landing | None:
        """Give out blocks that lie anywhere; None if there are too few."""
        count = LAYOUT.num_blocks_for(tokens)
        if count > len(self._blocks) or not self._slots:
            return None
        blocks = tuple(self._random.sample(sorted(self._blocks), count))
        slot = self._random.choice(sorted(self._slots))
        self._blocks -= set(blocks)
        self._slots.remove(slot)
        self.late += self._pools.disturbed(FREE, blocks, slot)
        self._keys += 1
        landing = Landing(
            request_id=f"request-{request}",
            key=self._keys,
            generation=self._generation,
            num_tokens=tokens,
            block_ids=blocks,
            slot=slot,
            layout=LAYOUT.fingerprint(),
            agents=(self._agent,),
            leader_url="",
        )
        self.held[landing.key] = Held(landing, request, writer_generation)
        return landing

    def hear(self, word: Notification) -> tuple[int, list[str]] | None:
        """Take in a writer's word; return request and faults if it completes a landing."""
        held = self.held.get(word.key) if word.generation == self._generation else None
        if held is None:
            return None
        if word.kind == "drained" or held.is_quarantined:
            self.free(word.key)
            return None
        landing = held.landing
        faults = self._pools.faults(held.request, landing.block_ids, landing.slot)
        if word.manifest != manifest(LAYOUT, landing.num_tokens) or word.num_tokens != landing.num_tokens:
            faults.append(f"request {held.request}: {word} came for {landing}")
        if word.first_token != held.request:
            faults.append(f"request {held.request}: first token {word.first_token}")
        del self.held[word.key]
        self._kept.append((held.request, landing.block_ids, landing.slot))
        while len(self._kept) > NUM_KEPT:
            self.drop_oldest()
        return held.request, faults

    def quarantine(self, landing: Landing) -> None:
        if landing.generation == self._generation and landing.key in self.held:
            self.held[landing.key].is_quarantined = True

    def drained(self, landing: Landing) -> None:
        if landing.generation == self._generation and landing.key in self.held:
            self.free(landing.key)

    def writer_lost(self, generation: int) -> None:
        for held in self.held.values():
            if held.writer_generation == generation:
                held.is_quarantined, held.free_at = True, time.monotonic() + GRACE_S

    def expire(self) -> None:
        for key in [key for key, held in self.held.items() if time.monotonic() >= held.free_at]:
            self.free(key)

    def free(self, key: int) -> None:
        landing = self.held.pop(key).landing
        self._give_back(landing.block_ids, landing.slot)

    def drop_oldest(self) -> None:
        """End a request that decodes; nobody may have written to its blocks since they landed."""
        request, blocks, slot = self._kept.popleft()
        self.late += self._pools.faults(request, blocks, slot)
        self._give_back(blocks, slot)

    def settle(self) -> None:
        """End all requests, and look at every free unit."""
        while self._kept:
            self.drop_oldest()
        blocks = sorted(self._blocks)
        for slot in self._slots:
            self.late += self._pools.disturbed(FREE, blocks, slot)
            blocks = []

    def state(self) -> dict[str, int]:
        return resources() | {
            "free_blocks": len(self._blocks),
            "free_slots": len(self._slots),
            "held": len(self.held),
        }

    def _give_back(self, blocks: tuple[int, ...], slot: int) -> None:
        self._pools.fill(FREE, blocks, slot)
        self._blocks |= set(blocks)
        self._slots.add(slot)


def main(kind: str, memory: Memory, generation: int, conductor: Connection) -> None:
    pools = Pools(FREE, memory)
    transport = make_transport(kind, "decode", memory=memory)
    endpoint = transport.register(pools.addresses, generation=generation, rank=0)
    owner = Owner(pools, generation, endpoint.agent)
    conductor.send(("endpoint", endpoint))

    def obey(order: tuple[Any, ...]) -> None:
        match order:
            case ("reserve", request, tokens, writer_generation):
                conductor.send(("landing", request, owner.reserve(request, tokens, writer_generation)))
            case ("abort", landing):
                owner.quarantine(landing)
            case ("drained", landing):
                owner.drained(landing)
            case ("writer lost", lost):
                owner.writer_lost(lost)
            case ("settle",):
                owner.settle()
            case ("state",):
                conductor.send(("state", owner.state()))
            case _:
                raise ValueError(order)

    with contextlib.suppress(EOFError):
        while True:
            for _, message in transport.poll():
                if outcome := owner.hear(decode_notification(message)):
                    conductor.send(("landed", *outcome))
            owner.expire()
            if owner.late:
                conductor.send(("late", owner.late))
                owner.late = []
            if select.select([conductor], [], [], _BUSY_NAP_S if owner.held else _IDLE_NAP_S)[0]:
                obey(conductor.recv())
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Connection(int(sys.argv[4])))  # type: ignore[arg-type]
