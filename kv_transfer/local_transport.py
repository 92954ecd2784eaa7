"""LocalTransport: KvTransport between endpoints of one process, copying bytes for real.

Same checks as NIXL: ranges inside the registered pools, known agents, metadata of the present life. `Gate` is where a
test stands between a write and its bytes.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import threading
from collections.abc import Callable

from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.locality import host_id
from kv_transfer.plan import TransferPlan
from kv_transfer.ranges import Ranges, check_pools, resolve
from kv_transfer.transport import Transfer, TransferError, TransferStatus


class LocalRegistry:
    """The endpoints that can reach each other. Thread-safe: each transport may live on a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.in_flight: list[LocalTransfer] = []
        self._lives = 0
        self._inboxes: dict[str, tuple[bytes, collections.deque[tuple[str, bytes]]]] = {}

    def enter(self, agent: str) -> bytes:
        """Start a life of `agent`, ending an earlier one; return its metadata."""
        with self.lock:
            self._lives += 1
            metadata = f"{agent}#{self._lives}".encode()
            self._inboxes[agent] = (metadata, collections.deque())
            return metadata

    def leave(self, agent: str, metadata: bytes) -> None:
        """End that life, as a killed process would: writes to it fail, and nothing more arrives."""
        with self.lock:
            if self._inboxes.get(agent, (b"",))[0] == metadata:
                del self._inboxes[agent]

    def inbox(self, agent: str, metadata: bytes) -> collections.deque[tuple[str, bytes]] | None:
        """Return where messages to this life of `agent` go, None if it has ended."""
        with self.lock:
            life = self._inboxes.get(agent)
            return life[1] if life is not None and life[0] == metadata else None


class Gate:
    """Decides how far the writes of one transport get. Open at first. For tests.

    on_notification: maps (agent, message) to the messages that are delivered: drop, repeat or change them.
    """

    def __init__(self) -> None:
        self.on_notification: Callable[[str, bytes], list[bytes]] = lambda agent, message: [message]
        self._budget: int | None = None
        self._failure = ""

    def hold(self, pieces: int = 0) -> None:
        """Let only `pieces` more pieces pass; writes that need more stay PENDING."""
        self._budget = pieces

    def open(self) -> None:
        """Let everything pass again."""
        self._budget, self._failure = None, ""

    def fail(self, error: str) -> None:
        """Fail the writes under way, and all that start, at their next piece."""
        self._failure = error

    @property
    def failure(self) -> str:
        return self._failure

    def take_piece(self) -> bool:
        """Claim the right to copy one piece; False while held."""
        if self._budget is None:
            return True
        if self._budget == 0:
            return False
        self._budget -= 1
        return True


@dataclasses.dataclass(slots=True, eq=False)
class LocalTransfer:
    """A write under way; `num_copied` of its pieces are at the peer."""

    peer: Endpoint
    ranges: Ranges
    notification: bytes
    num_bytes: int
    num_pieces: int
    num_copied: int = 0
    status: TransferStatus = TransferStatus.PENDING
    error: str = ""


class LocalTransport:
    """One endpoint in `registry`. With an open gate a write is over when `write` returns, as over shared memory."""

    name = "local"

    def __init__(self, worker: str, registry: LocalRegistry, *, gate: Gate | None = None) -> None:
        self.gate = gate or Gate()
        self._worker = worker
        self._registry = registry
        self._endpoint: Endpoint | None = None
        self._inbox: collections.deque[tuple[str, bytes]] = collections.deque()
        self._peers: dict[str, Endpoint] = {}
        self._used: set[str] = set()

    def register(self, pools: list[PoolAddress], *, generation: int, rank: int) -> Endpoint:
        if self._endpoint is not None:
            raise TransferError(f"{self._endpoint.agent} has registered its pools already")
        agent = f"{self._worker}.r{rank}.g{generation:x}"
        metadata = self._registry.enter(agent)
        inbox = self._registry.inbox(agent, metadata)
        assert inbox is not None
        self._inbox = inbox
        self._endpoint = Endpoint(
            transport=self.name,
            agent=agent,
            generation=generation,
            rank=rank,
            metadata=metadata,
            pools=tuple(pools),
            host=host_id(),
        )
        return self._endpoint

    def connect(self, peer: Endpoint) -> None:
        if peer.transport != self.name:
            raise TransferError(f"{peer.agent} speaks {peer.transport!r}, not {self.name!r}: use one transport")
        check_pools(self._own(), peer)
        if self._registry.inbox(peer.agent, peer.metadata) is None:
            raise TransferError(f"metadata of {peer.agent} is unusable: no such life in this process")
        self._peers[peer.agent] = peer

    def disconnect(self, agent: str) -> None:
        self._peers.pop(agent, None)
        self._used.discard(agent)

    def write(self, agent: str, plan: TransferPlan, notification: bytes = b"") -> Transfer:
        peer = self._peer(agent)
        ranges = resolve(plan, self._own(), peer)
        if self._registry.inbox(agent, peer.metadata) is None:
            raise TransferError(f"write of {plan.num_bytes} bytes to {agent} refused: the peer is gone")
        transfer = LocalTransfer(peer, ranges, notification, plan.num_bytes, len(plan.pieces))
        with self._registry.lock:
            self._registry.in_flight.append(transfer)
        self.check(transfer)
        return transfer

    def check(self, transfer: Transfer) -> TransferStatus:
        """Copy as many pieces as the gate lets pass. A write ends once; then its state stays."""
        assert isinstance(transfer, LocalTransfer)
        with self._registry.lock:
            while transfer.status is TransferStatus.PENDING:
                inbox = self._registry.inbox(transfer.peer.agent, transfer.peer.metadata)
                if inbox is None or self.gate.failure:
                    self._end(transfer, self.gate.failure or "the peer is gone")
                elif transfer.num_copied == transfer.num_pieces:
                    self._end(transfer, "")
                    if transfer.notification:
                        self._deliver(transfer.peer.agent, inbox, transfer.notification)
                elif self.gate.take_piece():
                    row = transfer.num_copied
                    ranges = transfer.ranges
                    ctypes.memmove(int(ranges.target[row]), int(ranges.source[row]), int(ranges.sizes[row]))
                    transfer.num_copied += 1
                else:
                    break
        return transfer.status

    def notify(self, agent: str, message: bytes) -> None:
        peer = self._peer(agent)
        inbox = self._registry.inbox(agent, peer.metadata)
        if inbox is None:
            raise TransferError(f"{agent} can't be notified: the peer is gone")
        self._deliver(agent, inbox, message)

    def poll(self) -> list[tuple[str, bytes]]:
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        return arrived

    def lane(self, agent: str) -> str:
        return "memcpy" if agent in self._used else "unknown"

    def close(self) -> None:
        if self._endpoint is not None:
            self._registry.leave(self._endpoint.agent, self._endpoint.metadata)
        self._peers.clear()

    def _own(self) -> Endpoint:
        if self._endpoint is None:
            raise TransferError("register the pools first")
        return self._endpoint

    def _peer(self, agent: str) -> Endpoint:
        peer = self._peers.get(agent)
        if peer is None:
            raise TransferError(f"{agent} is not connected: it was never linked, or was disconnected after a failure")
        return peer

    def _deliver(self, agent: str, inbox: collections.deque[tuple[str, bytes]], message: bytes) -> None:
        inbox.extend((self._own().agent, delivered) for delivered in self.gate.on_notification(agent, message))

    def _end(self, transfer: LocalTransfer, failure: str) -> None:
        transfer.status = TransferStatus.FAILED if failure else TransferStatus.DONE
        transfer.error = failure and f"write to {transfer.peer.agent} failed: {failure}"
        self._registry.in_flight.remove(transfer)
        if not failure:
            self._used.add(transfer.peer.agent)
