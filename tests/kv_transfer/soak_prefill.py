"""The writing process of the soak: pushes landings chunk by chunk through Writer, as a prefill rank does.

Run as `python soak_prefill.py TRANSPORT MEMORY GENERATION FD`; FD is a multiprocessing connection. In:

    ("connect", Endpoint)    ("push", request, Landing, blocks of a chunk, chunks after which it is cancelled or None)
    ("break", seconds)       ("state",)

Out: ("linked", agent, lane), ("event", request, Landing, status, is_last, error), ("state", dict).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import select
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from pool_memory import Memory
from soak_content import DEADLINE_S, GONE, LAYOUT, NUM_BLOCKS, NUM_SLOTS, resources
from soak_pools import Pools

from kv_transfer.landing import Endpoint, Landing
from kv_transfer.plan import plan_push
from kv_transfer.transport import KvTransport, TransferError
from kv_transfer.transports import make_transport
from kv_transfer.warm import warm
from kv_transfer.writer import Writer, WriterEvent

_BUSY_NAP_S, _IDLE_NAP_S = 0.0002, 1.0


@dataclasses.dataclass
class Push:
    """A request on its way. blocks, slot: where it lies here."""

    request: int
    landing: Landing
    blocks: tuple[int, ...]
    slot: int
    chunk: int
    cancel_after: int | None
    num_pushed: int = 0
    num_chunks: int = 0


class Prefill:
    def __init__(self, transport: KvTransport, memory: Memory, generation: int, conductor: Connection) -> None:
        self._transport, self._conductor = transport, conductor
        self._pools = Pools(GONE, memory)
        self._random = random.Random(generation)
        self._blocks, self._slots = set(range(NUM_BLOCKS)), set(range(NUM_SLOTS))
        self._peers: dict[str, Endpoint] = {}
        self._pushes: dict[tuple[int, int], Push] = {}
        self._due: collections.deque[Push] = collections.deque()
        transport.register(self._pools.addresses, generation=generation, rank=0)
        self.writer = Writer(transport, layout=LAYOUT, generation=generation, min_deadline_s=DEADLINE_S)

    def obey(self, order: tuple[Any, ...]) -> None:
        match order:
            case ("connect", endpoint):
                self._connect(endpoint)
            case ("push", request, landing, chunk, cancel_after):
                self._begin(request, landing, chunk, cancel_after)
            case ("break", seconds):
                threading.Timer(seconds, break_connections, (self._conductor.fileno(),)).start()
            case ("state",):
                self._conductor.send(("state", self._state()))
            case _:
                raise ValueError(order)

    @property
    def nap_s(self) -> float:
        return 0.0 if self._due else _IDLE_NAP_S if self.writer.is_idle else _BUSY_NAP_S

    def pump(self) -> None:
        """Follow what is under way, and push one chunk that is due."""
        for event in self.writer.pump():
            self._report(event)
        if self._due:
            self._go_on(self._due.popleft())

    def _connect(self, peer: Endpoint) -> None:
        for agent in self._peers:
            self._transport.disconnect(agent)
        self._peers = {peer.agent: peer}
        self._transport.connect(peer)
        self._conductor.send(("linked", peer.agent, warm(self._transport, peer.agent).lane))

    def _begin(self, request: int, landing: Landing, chunk: int, cancel_after: int | None) -> None:
        blocks = tuple(self._random.sample(sorted(self._blocks), len(landing.block_ids)))
        slot = self._random.choice(sorted(self._slots))
        self._blocks -= set(blocks)
        self._slots.remove(slot)
        self._pools.write(request, blocks, slot)
        push = Push(request, landing, blocks, slot, chunk, cancel_after)
        self._pushes[landing.generation, landing.key] = push
        self._due.append(push)

    def _go_on(self, push: Push) -> None:
        """Push the next chunk; a peer that a failure has disconnected is known again first, as the engine does it."""
        for agent in push.landing.agents:
            if agent in self._peers:
                with contextlib.suppress(TransferError):
                    self._transport.connect(self._peers[agent])
        first, last = push.num_pushed, min(push.num_pushed + push.chunk, len(push.blocks))
        is_last = last == len(push.blocks)
        plan = plan_push(
            LAYOUT,
            source_blocks=push.blocks,
            target_blocks=push.landing.block_ids,
            first=first,
            last=last,
            source_slot=push.slot if is_last else None,
            target_slot=push.landing.slot if is_last else None,
        )
        push.num_pushed, push.num_chunks = last, push.num_chunks + 1
        self.writer.push(push.landing, plan, is_last=is_last, first_token=push.request if is_last else -1)
        for event in self.writer.pump():  # posts it
            self._report(event)
        if push.cancel_after == push.num_chunks and (push.landing.generation, push.landing.key) in self._pushes:
            self.writer.cancel(push.landing)

    def _report(self, event: WriterEvent) -> None:
        push = self._pushes.get((event.generation, event.key))
        if push is None:
            return  # the word "drained" after the last push of a cancelled landing was done
        if event.status == "done" and not event.is_last:
            if push.cancel_after is None or push.num_chunks < push.cancel_after:
                self._due.append(push)
            return
        self._conductor.send(("event", push.request, push.landing, event.status, event.is_last, event.error))
        if event.status != "failed":
            # Only now nothing reads these blocks any more.
            del self._pushes[event.generation, event.key]
            self._pools.fill(GONE, push.blocks, push.slot)
            self._blocks |= set(push.blocks)
            self._slots.add(push.slot)

    def _state(self) -> dict[str, int]:
        return resources() | {
            "free_blocks": len(self._blocks),
            "free_slots": len(self._slots),
            "held": len(self._pushes) + self.writer.num_open,
        }


def break_connections(spared: int) -> None:
    """Shut down every connected socket of this process but one, as a fault on the way would."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) == spared or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                connection.getpeername()  # a listener has none, and stays
                connection.shutdown(socket.SHUT_RDWR)


def main(kind: str, memory: Memory, generation: int, conductor: Connection) -> None:
    transport = make_transport(kind, "prefill", memory=memory)
    prefill = Prefill(transport, memory, generation, conductor)
    with contextlib.suppress(EOFError):
        while True:
            prefill.pump()
            if select.select([conductor], [], [], prefill.nap_s)[0]:
                prefill.obey(conductor.recv())
    until = time.monotonic() + DEADLINE_S
    while not prefill.writer.is_idle and time.monotonic() < until:
        prefill.pump()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Connection(int(sys.argv[4])))  # type: ignore[arg-type]
