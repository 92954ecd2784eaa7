"""UcxxTransport: KvTransport over ucxx, for machines where NIXL's UCX backend does not start, and to check NIXL by.

One-sided writes are made of two-sided messages, and the receiver leads:

    writer                                        receiver (in poll)
    Open: pieces, notification  ------------->    checks them against its own pools
                                <-------------    Grant: receives are posted, straight into the pools
    pieces, one tagged message each  -------->
                                <-------------    Ended: all are in place; now it delivers the notification

So bytes land only where the receiver has let them, nothing is staged, and DONE means that the receiver has said so.
Tags are the receiver's, never used twice: what is left of a broken connection meets no later write. Host memory only.

A writer connects to the receiver's listener; Endpoint.metadata is its host, port and a random name of that process'
life. A port that another process has taken since is recognised by the life, and refused. The listener is open on every
interface (ucxx offers no other); whoever does not know the life is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import logging
import os
import time
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.locality import host_id
from kv_transfer.plan import TransferPlan
from kv_transfer.ranges import check_pools, pool_bytes, resolve
from kv_transfer.transport import Transfer, TransferError, TransferStatus
from kv_transfer.ucxx_link import (
    Ended,
    Grant,
    Hello,
    Leave,
    Link,
    LinkError,
    Message,
    Open,
    Stale,
    Ucxx,
    Welcome,
    Word,
    cause,
)
from kv_transfer.ucxx_receiver import UcxxReceiver

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.002
_HANDSHAKE_S = 0.05
_FLUSH_S = 0.05
_LEAVE_S = 0.2


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """What Endpoint.metadata holds."""

    agent: str
    host: str
    port: int
    life: bytes


@dataclasses.dataclass(slots=True, eq=False)
class UcxxTransfer:
    """A write under way. sends: requests of its pieces, held until it has ended."""

    peer: _Peer
    number: int
    plan: TransferPlan
    num_bytes: int
    num_pieces: int
    sends: list[Any] = dataclasses.field(default_factory=list)
    status: TransferStatus = TransferStatus.PENDING
    error: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class _Peer:
    """Somebody this transport writes to."""

    endpoint: Endpoint
    link: Link
    lane: str = "unknown"
    is_welcome: bool = False
    has_written: bool = False
    is_open: bool = True
    error: str = ""
    transfers: list[UcxxTransfer] = dataclasses.field(default_factory=list)


class UcxxTransport:
    """One UCX worker with a listener. worker: name of the worker group.  host: where writers find the listener."""

    name = "ucxx"

    def __init__(self, worker: str, *, host: str = "127.0.0.1") -> None:
        self._group = worker
        self._host = host
        self._ucxx: Ucxx
        self._worker: Any = None
        self._receiver: UcxxReceiver
        self._endpoint: Endpoint | None = None
        self._life = os.urandom(16)
        self._pools: dict[str, NDArray[np.uint8]] = {}
        self._peers: dict[str, _Peer] = {}
        self._numbers = itertools.count(1)

    def register(self, pools: list[PoolAddress], *, generation: int, rank: int) -> Endpoint:
        """Listen, and let peers write into `pools`. Raises TransferError if ucxx is missing or does not start."""
        if self._endpoint is not None:
            raise TransferError(f"{self._endpoint.agent} has registered its pools already")
        agent = f"{self._group}.r{rank}.g{generation:x}"
        try:
            self._ucxx = Ucxx()
            core = self._ucxx.core
            context = core.UCXContext({}, feature_flags=(core.Feature.TAG, core.Feature.STREAM))
            self._worker = core.UCXWorker(context)
            self._receiver = UcxxReceiver(self._ucxx, self._worker, pools=self._pools, life=self._life)
            host = self._ucxx.address() if self._host in ("", "0.0.0.0", "::") else self._host
        except ModuleNotFoundError as error:
            raise TransferError(
                f"transport ucxx needs the package ucxx-cu13 ({error}): pip install '.[ucxx]', or use transport nixl"
            ) from error
        except Exception as error:
            raise TransferError(
                f"{agent} could not start over ucxx: {cause(error)}; if UCX_TLS is set "
                f"({os.environ.get('UCX_TLS', 'it is not')}), it must contain tcp"
            ) from error
        for pool in pools:
            memory = (ctypes.c_uint8 * pool_bytes(pool)).from_address(pool.base)
            self._pools[pool.name] = np.ctypeslib.as_array(memory)
        self._endpoint = Endpoint(
            transport=self.name,
            agent=agent,
            generation=generation,
            rank=rank,
            metadata=msgspec.msgpack.encode(_Address(agent, host, self._receiver.port, self._life)),
            pools=tuple(pools),
            host=host_id(),
        )
        return self._endpoint

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer, its new metadata after it restarted, or anew after a failure.

        Waits up to 50 ms for its answer; a peer that does not poll now answers later. Raises TransferError for metadata
        that can't be read or is stale, a process that is gone, pools of another geometry, or while writes over the
        connection that this one replaces are still under way.
        """
        own = self._own()
        if peer.transport != self.name:
            raise TransferError(f"{peer.agent} speaks {peer.transport!r}, not {self.name!r}: use one transport")
        check_pools(own, peer)
        self._progress()
        known = self._peers.get(peer.agent)
        if known is not None and known.endpoint == peer:
            known.is_open = True
            return
        if known is not None and known.transfers:
            raise TransferError(
                f"{peer.agent} can't be connected anew while {len(known.transfers)} writes over its previous "
                "connection are under way: try again when they have ended, or end the process they go to"
            )
        try:
            address = msgspec.msgpack.decode(peer.metadata, type=_Address)
        except msgspec.DecodeError as error:
            raise TransferError(f"metadata of {peer.agent} is unusable: {error}") from None
        if address.agent != peer.agent:
            raise TransferError(f"endpoint {peer.agent} carries the metadata of {address.agent}")
        if known is not None:
            self._remove(known)
        try:
            endpoint = self._ucxx.core.UCXEndpoint.create(self._worker, address.host, address.port, True)
            linked = _Peer(peer, Link(self._ucxx, endpoint))
            linked.link.send(Hello(own.agent, address.life))
        except Exception as error:
            raise TransferError(f"{peer.agent} at {address.host}:{address.port}: {cause(error)}") from error
        self._peers[peer.agent] = linked
        until = time.monotonic() + _HANDSHAKE_S
        while not linked.is_welcome and not linked.error and time.monotonic() < until:
            self._progress()
        if linked.error:
            raise TransferError(f"metadata of {peer.agent} is unusable, or its process is gone: {linked.error}")

    def disconnect(self, agent: str) -> None:
        """Refuse writes to a peer from now on, and forget it once those under way have ended."""
        peer = self._peers.get(agent)
        if peer is not None:
            peer.is_open = False
            if not peer.transfers:
                self._remove(peer)

    def write(self, agent: str, plan: TransferPlan, notification: bytes = b"") -> Transfer:
        """Ask the peer to receive the plan's pieces; they are sent by `check`, once it has granted them."""
        peer = self._peer(agent)
        transfer = UcxxTransfer(peer, next(self._numbers), plan, plan.num_bytes, len(plan.pieces))
        if not plan.pieces:
            if notification:
                self.notify(agent, notification)
            transfer.status = TransferStatus.DONE
            return transfer
        resolve(plan, self._own(), peer.endpoint)
        pieces = tuple((piece.pool, piece.target, piece.num_bytes) for piece in plan.pieces)
        peer.transfers.append(transfer)
        try:
            peer.link.send(Open(transfer.number, pieces, notification))
        except Exception as error:
            self._fail(peer, cause(error))
        self._progress()
        return transfer

    def check(self, transfer: Transfer) -> TransferStatus:
        """Return the state of a write, driving progress. Never raises."""
        assert isinstance(transfer, UcxxTransfer)
        if transfer.status is TransferStatus.PENDING:
            self._progress()
        return transfer.status

    def notify(self, agent: str, message: bytes) -> None:
        """Send a word. Refused before a first write has ended: until then it might wait here, unnoticed."""
        peer = self._peer(agent)
        if not peer.has_written:
            raise TransferError(f"{agent} can't be notified: its connection is not set up; write to it first (warm)")
        try:
            peer.link.send(Word(message))
        except Exception as error:
            self._fail(peer, cause(error))
        self._flush(peer.link)
        if peer.error:
            raise TransferError(f"{agent} can't be notified: {peer.error}")

    def poll(self) -> list[tuple[str, bytes]]:
        self._progress()
        return [] if self._endpoint is None else self._receiver.take()

    def lane(self, agent: str) -> str:
        peer = self._peers.get(agent)
        return "unknown" if peer is None else peer.lane

    def close(self) -> None:
        """Wait up to 0.2 s for peers to read what was said, then end all connections.

        With a write still under way everything is left to the process' end.
        """
        if self._worker is None:
            return
        self._progress()
        if pending := sum(len(peer.transfers) for peer in self._peers.values()):
            logger.warning("%s closes with %d writes under way", self._own().agent, pending)
            return
        for peer in self._peers.values():
            with contextlib.suppress(Exception):
                peer.link.send(Leave())
        until = time.monotonic() + _LEAVE_S
        while self._peers and time.monotonic() < until:
            self._progress()
        for peer in list(self._peers.values()):
            self._remove(peer)
        self._receiver.close()
        until = time.monotonic() + _FLUSH_S
        while self._worker.progress_once() and time.monotonic() < until:
            pass  # only now the sockets are closed, and the peers learn of it
        self._worker = None

    # ------------------------------------------------------------ below: progress

    def _progress(self) -> None:
        """Let UCX work and answer what comes in, until nothing moves; but not for long, the owner has more to do."""
        until = time.monotonic() + _PROGRESS_S
        while self._worker is not None:
            has_moved = self._worker.progress_once()
            has_moved |= self._receiver.serve()
            for peer in list(self._peers.values()):
                has_moved |= self._follow(peer)
            if not has_moved or time.monotonic() > until:
                return

    def _flush(self, link: Link) -> None:
        """Hand what was said to the operating system: the owner may be idle from now on."""
        until = time.monotonic() + _FLUSH_S
        self._progress()
        while not link.is_flushed and link.endpoint.alive and time.monotonic() < until:
            self._progress()

    # ------------------------------------------------------------ below: the writing side

    def _own(self) -> Endpoint:
        if self._endpoint is None:
            raise TransferError("register the pools first")
        return self._endpoint

    def _peer(self, agent: str) -> _Peer:
        peer = self._peers.get(agent)
        if peer is None or not peer.is_open:
            raise TransferError(f"{agent} is not connected: it was never linked, or was disconnected after a failure")
        return peer

    def _follow(self, peer: _Peer) -> bool:
        """Take the answers of a peer. Returns whether there were any."""
        try:
            messages = peer.link.receive()
            for message in messages:
                self._heed(peer, message)
        except Exception as error:
            self._fail(peer, cause(error))
            return True
        return bool(messages)

    def _heed(self, peer: _Peer, message: Message) -> None:
        match message:
            case Welcome():
                peer.is_welcome = True
            case Stale():
                raise LinkError("the metadata is stale: another process has its port now")
            case Grant():
                transfer = self._transfer(peer, message.number)
                for index, piece in enumerate(transfer.plan.pieces):
                    memory = self._pools[piece.pool][piece.source : piece.source + piece.num_bytes]
                    transfer.sends.append(self._ucxx.tag_send(peer.link.endpoint, memory, message.tag + index))
            case Ended():
                transfer = self._transfer(peer, message.number)
                if not message.error and not peer.has_written:
                    peer.has_written, peer.lane = True, self._ucxx.lane(peer.link.endpoint)
                self._end(transfer, message.error)
                if not peer.is_open and not peer.transfers:
                    self._remove(peer)
            case _:
                raise LinkError(f"{type(message).__name__} was not expected from it")

    def _transfer(self, peer: _Peer, number: int) -> UcxxTransfer:
        for transfer in peer.transfers:
            if transfer.number == number:
                return transfer
        raise LinkError(f"it speaks of write {number}, which is not under way")

    def _end(self, transfer: UcxxTransfer, error: str) -> None:
        transfer.status = TransferStatus.FAILED if error else TransferStatus.DONE
        transfer.error = error and f"write to {transfer.peer.endpoint.agent} failed: {error}"
        transfer.peer.transfers.remove(transfer)
        transfer.sends.clear()

    def _fail(self, peer: _Peer, error: str) -> None:
        """Give up a connection, even if the peer lives; first close it, so that no byte leaves after the verdict."""
        peer.error, peer.is_open = error, False
        self._remove(peer)
        for transfer in list(peer.transfers):
            self._end(transfer, error)

    def _remove(self, peer: _Peer) -> None:
        agent = peer.endpoint.agent
        if self._peers.get(agent) is peer:
            del self._peers[agent]
        peer.link.close()
