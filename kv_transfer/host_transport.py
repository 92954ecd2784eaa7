"""HostTransport: KvTransport through shared memory, for hosts where GPUs can't reach each other or NIXL falls to TCP.

    writer (in write, check)                      receiver (on a thread of its own)
    Hello: its name, the receiver's life  ---->
                                 <------------    Welcome, and the staging memory: a few buffers
    Coming                       ------------>    stays awake for it
    copies pieces into a free buffer
    Fill: what lies in it        ------------>    checks every piece, copies it to its place in the pools
                                 <------------    Emptied: the buffer is free again; with the last: all is in place

So one buffer is filled while another is emptied. DONE means that the receiver has said so; it needs no poll for that.
Memory may be DRAM or VRAM, at each end: only the copies differ.

Endpoint.metadata names a Unix socket (of the abstract kind: nothing is left in a file system) and a random life. In
containers of one host, both sides have to share a network namespace.

A failure that is only this side's leaves the receiver with buffers it may be emptying. So the connection is half closed
then, and its writes stay PENDING until the receiver has hung up too. A connection that is gone while its receiver lives
says nothing; then writes stay PENDING for as long as buffers are held (host_staging.py). After FAILED no byte lands.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import time
import weakref
from typing import Literal

import msgspec
import numpy as np

from kv_transfer.host_copy import Copier, make_copier
from kv_transfer.host_link import MAX_NOTIFICATION_BYTES, Link, LinkError, Word
from kv_transfer.host_peer import HostPeer, HostTransfer
from kv_transfer.host_pieces import Rest
from kv_transfer.host_receiver import HostReceiver
from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.locality import host_id, is_same_host
from kv_transfer.plan import TransferPlan
from kv_transfer.ranges import check_pools, resolve
from kv_transfer.transport import Transfer, TransferError, TransferStatus

logger = logging.getLogger(__name__)

_BUFFERS: dict[Literal["DRAM", "VRAM"], tuple[int, int]] = {"DRAM": (2 << 20, 4), "VRAM": (8 << 20, 8)}
_HANDSHAKE_S = 0.05
_WAIT_MS = 1
_SPIN_S = 200e-6  # before it sleeps: to be woken takes some 40 us, as long as 2 MB on the way
_LEAVE_S = 0.2


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """What Endpoint.metadata holds."""

    agent: str
    socket: str
    life: bytes


class HostTransport:
    """One rank's end of the host lane. worker: name of the worker group.  device: of the pools, if memory is VRAM.

    buffer_bytes, num_buffers: of the staging memory for each peer that writes here; 0: what suits that memory.
    """

    name = "host"

    def __init__(
        self,
        worker: str,
        *,
        memory: Literal["DRAM", "VRAM"] = "DRAM",
        device: int = 0,
        buffer_bytes: int = 0,
        num_buffers: int = 0,
    ) -> None:
        self._worker = worker
        self._memory: Literal["DRAM", "VRAM"] = memory
        self._device = device
        self._buffer_bytes = buffer_bytes or _BUFFERS[memory][0]
        self._num_buffers = num_buffers or _BUFFERS[memory][1]
        self._endpoint: Endpoint | None = None
        self._receiver: HostReceiver
        self._copier: Copier
        self._peers: dict[str, HostPeer] = {}
        self._numbers = itertools.count(1)

    def register(self, pools: list[PoolAddress], *, generation: int, rank: int) -> Endpoint:
        """Let peers of this host write into `pools`; a thread takes what comes. The memory must outlive the transport.

        Raises TransferError if the socket or the device can't be had.
        """
        if self._endpoint is not None:
            raise TransferError(f"{self._endpoint.agent} has registered its pools already")
        agent = f"{self._worker}.r{rank}.g{generation:x}"
        address = _Address(agent, f"\0isthmus-{os.getpid()}-{os.urandom(8).hex()}", os.urandom(16))
        memory, device = self._memory, self._device
        try:
            self._copier = make_copier(memory, device)
            self._receiver = HostReceiver(
                address.socket,
                life=address.life,
                pools=pools,
                buffer_bytes=self._buffer_bytes,
                num_buffers=self._num_buffers,
                make_copier=lambda: make_copier(memory, device),
            )
        except Exception as error:
            raise TransferError(f"{agent} could not start the host lane: {type(error).__name__} {error}") from error
        # Without close, the thread ends with the transport or, before memory is torn down, with the interpreter.
        weakref.finalize(self, self._receiver.close)
        self._endpoint = Endpoint(
            transport=self.name,
            agent=agent,
            generation=generation,
            rank=rank,
            metadata=msgspec.msgpack.encode(address),
            pools=tuple(pools),
            host=host_id(),
            memory=memory,
            device=device,
        )
        return self._endpoint

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer, its new metadata after it restarted, or anew after a failure.

        Waits up to 50 ms for its welcome; a peer that is stopped may give it later. Raises TransferError for metadata
        that can't be read or is stale, a process that is gone, another host, pools of another geometry, or while writes
        over the connection that this one replaces are still under way.
        """
        own = self._own()
        if peer.transport != self.name:
            raise TransferError(f"{peer.agent} speaks {peer.transport!r}, not {self.name!r}: use one transport")
        check_pools(own, peer)
        if not is_same_host(own, peer):
            raise TransferError(
                f"{peer.agent} is on host {peer.host or 'unknown'}, {own.agent} on {own.host or 'unknown'}: the host "
                "lane is shared memory, which ends at a host; use transport nixl between them"
            )
        self._progress()
        known = self._peers.get(peer.agent)
        if known is not None and known.endpoint == peer and not known.error:
            known.is_open = True
            return
        if known is not None and known.transfers:
            raise TransferError(
                f"{peer.agent} can't be connected anew while {len(known.transfers)} writes over its previous "
                "connection are under way: try again when they have ended, or end the process they go to"
            )
        address = _address(peer)
        if known is not None:
            known.disconnect()
        self._peers[peer.agent] = self._reach(peer, address)

    def disconnect(self, agent: str) -> None:
        """Refuse writes to a peer from now on, and forget it once those under way have ended."""
        if (peer := self._peers.get(agent)) is not None:
            peer.disconnect()
            self._forget()

    def write(self, agent: str, plan: TransferPlan, notification: bytes = b"") -> Transfer:
        """Copy as much of the plan as the peer has room for; `check` goes on. See KvTransport."""
        peer = self._peer(agent)
        _check_length(notification)
        if plan.pieces and self._memory == "VRAM":
            peer.announce()
        sources = resolve(plan, self._own(), peer.endpoint).source.copy()
        index = {pool.name: number for number, pool in enumerate(peer.endpoint.pools)}
        rows = [(index[piece.pool], piece.target, piece.num_bytes) for piece in plan.pieces]
        rest = Rest(np.array(rows, np.int64).reshape(-1, 3), sources)
        transfer = HostTransfer(peer, next(self._numbers), rest, notification, plan.num_bytes, len(plan.pieces))
        if not plan.pieces:
            if notification:
                self.notify(agent, notification)
            transfer.status = TransferStatus.DONE
            return transfer
        peer.add(transfer)
        self._forget()
        return transfer

    def check(self, transfer: Transfer) -> TransferStatus:
        """Return the state of a write, driving progress; sleeps up to 1 ms if there is none. Never raises."""
        assert isinstance(transfer, HostTransfer)
        has_stalled = transfer.status is TransferStatus.PENDING and not self._progress()
        if has_stalled and transfer.peer.transfers[0] is transfer:  # the others can't end before the oldest
            self._wait()
            self._progress()
        return transfer.status

    def notify(self, agent: str, message: bytes) -> None:
        """Send a word. Refused before a first write has ended: until then the peer may not have said welcome."""
        peer = self._peer(agent)
        _check_length(message)
        peer.drive()
        problem = peer.error
        if not problem and not peer.has_written:
            problem = "its connection is not set up; write to it first (warm)"
        try:
            if not problem and not peer.link.send(Word(message)):
                problem = "it leaves too much unread; is its process stopped?"
        except LinkError as error:
            problem = str(error)
            peer.drive()
        self._forget()
        if problem:
            raise TransferError(f"{agent} can't be notified: {problem}")

    def poll(self) -> list[tuple[str, bytes]]:
        """Return what came in. Raises TransferError if the receiving thread has failed, which it never should."""
        if self._endpoint is None:
            return []
        self._progress()
        if self._receiver.failure:
            raise TransferError(f"{self._endpoint.agent} receives nothing any more: {self._receiver.failure}")
        return self._receiver.take()

    def lane(self, agent: str) -> str:
        peer = self._peers.get(agent)
        return "shm" if peer is not None and peer.has_written else "unknown"

    def staging_pages(self, agent: str) -> dict[int, int]:
        """Return how many pages of a peer's staging memory lie on which NUMA node; {} before it has welcomed us."""
        peer = self._peers.get(agent)
        return peer.staging_pages() if peer is not None else {}

    def close(self) -> None:
        """End the receiving thread and all connections.

        Writes under way are broken off; those to a peer that does not hang up within 0.2 s stay as they are.
        """
        if self._endpoint is None:
            return
        self._receiver.close()
        self._progress()
        for peer in self._peers.values():
            if peer.transfers:
                peer.give_up("its writer was closed")
            else:
                peer.disconnect()
        self._forget()
        until = time.monotonic() + _LEAVE_S
        while self._peers and time.monotonic() < until:
            self._wait()
            self._progress()
        if pending := sum(len(peer.transfers) for peer in self._peers.values()):
            logger.warning("%s closes with %d writes under way", self._endpoint.agent, pending)

    # ------------------------------------------------------------ below: helpers

    def _own(self) -> Endpoint:
        if self._endpoint is None:
            raise TransferError("register the pools first")
        return self._endpoint

    def _peer(self, agent: str) -> HostPeer:
        peer = self._peers.get(agent)
        if peer is None or not peer.is_open:
            raise TransferError(f"{agent} is not connected: it was never linked, or was disconnected after a failure")
        return peer

    def _reach(self, endpoint: Endpoint, address: _Address) -> HostPeer:
        """Connect, and wait a moment for the welcome. Raises TransferError."""
        gone = f"metadata of {endpoint.agent} is unusable, or its process is gone"
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = HostPeer(endpoint, Link(connected, takes_descriptor=True), copier=self._copier)
        try:
            connected.connect(address.socket)
            peer.greet(self._own().agent, address.life)
        except (OSError, LinkError) as error:
            peer.disconnect()
            raise TransferError(f"{gone}: {error}; containers of a host must share a network namespace") from error
        poll = select.poll()
        poll.register(peer.link, select.POLLIN)
        until = time.monotonic() + _HANDSHAKE_S
        while not peer.is_welcome and not peer.is_over and time.monotonic() < until:
            poll.poll(_WAIT_MS)
            peer.drive()
        if peer.error:
            raise TransferError(f"{gone}: {peer.error}")
        return peer

    def _progress(self) -> bool:
        """Drive every peer once. Returns whether anything moved."""
        has_moved = any([peer.drive() for peer in self._peers.values()])
        self._forget()
        return has_moved

    def _forget(self) -> None:
        for agent in [agent for agent, peer in self._peers.items() if peer.is_over]:
            del self._peers[agent]

    def _wait(self) -> None:
        """Wait until a copy of this side is done, or a peer has something to say; 1 ms at most."""
        if any(peer.wait_for_copy() for peer in self._peers.values()):
            return
        poll = select.poll()
        for peer in self._peers.values():
            if flags := peer.awaits:
                poll.register(peer.link, flags)
        until = time.monotonic() + _SPIN_S * (self._memory == "VRAM")
        while time.monotonic() < until:
            if poll.poll(0):
                return
        poll.poll(_WAIT_MS)


def _address(peer: Endpoint) -> _Address:
    try:
        address = msgspec.msgpack.decode(peer.metadata, type=_Address)
    except msgspec.DecodeError as error:
        raise TransferError(f"metadata of {peer.agent} is unusable: {error}") from None
    if address.agent != peer.agent:
        raise TransferError(f"endpoint {peer.agent} carries the metadata of {address.agent}")
    return address


def _check_length(notification: bytes) -> None:
    if len(notification) > MAX_NOTIFICATION_BYTES:
        raise TransferError(f"notification of {len(notification)} bytes: at most {MAX_NOTIFICATION_BYTES}")
