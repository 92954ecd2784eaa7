"""Transfers: what a prefill rank does for the leader's push orders, and TransferThread, which gives it a thread.

A write may block while it copies (shared memory lanes do), so the transport has a thread of its own, and only that
thread touches it. What ended is told with `emit`, which must be safe from any thread.

A chunk is computed before its push is ordered, so what is read here is complete, and nothing here waits for the chunk
that is computed meanwhile: transports read memory by themselves, and checksums have a stream of their own.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable

import torch

from engine.cache import KVCache
from engine.plan import (
    CancelPush,
    ConnectPeer,
    DisconnectPeer,
    PeerLinked,
    PushDone,
    PushPlan,
    RankMessage,
)
from engine.transport_thread import TransportThread
from kv_transfer.checksum import MODULUS, units_checksum
from kv_transfer.landing import Endpoint, decode_endpoint
from kv_transfer.link_test import Candidate, Link, LinksItself, establish
from kv_transfer.plan import plan_push, source_rank_for
from kv_transfer.transport import KvTransport, TransferError
from kv_transfer.warm import SCRATCH_POOL
from kv_transfer.writer import Writer, WriterEvent

_ACTIVE_NAP_S = 0.0002
_IDLE_WAIT_S = 1.0
_LINK_TEST_S = 5.0

Order = PushPlan | CancelPush | ConnectPeer | DisconnectPeer


class Transfers:
    """The orders of a prefill rank carried out on its transport. One thread only; `pump` often while not idle."""

    def __init__(
        self,
        transport: KvTransport,
        cache: KVCache,
        *,
        rank: int,
        num_ranks: int,
        generation: int,
        timeout_s: float,
        allow_tcp: bool,
        emit: Callable[[RankMessage], None],
    ) -> None:
        self._transport, self._cache = transport, cache
        self._rank, self._num_ranks, self._allow_tcp, self._emit = rank, num_ranks, allow_tcp, emit
        self.endpoint = transport.register(cache.pool_addresses(), generation=generation, rank=rank)
        self._writer = Writer(
            transport,
            layout=cache.layout,
            generation=generation,
            rank=rank,
            num_ranks=num_ranks,
            min_deadline_s=timeout_s,
        )
        self._peers: dict[str, Endpoint] = {}
        self._checksums: dict[tuple[int, int], dict[str, int]] = {}  # of landings that are not over
        self._aside = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_idle(self) -> bool:
        return self._writer.is_idle

    def obey(self, order: Order) -> None:
        match order:
            case PushPlan():
                self._push(order)
            case CancelPush():
                self._writer.cancel(order.landing)
            case ConnectPeer():
                self._connect(decode_endpoint(order.endpoint))
            case DisconnectPeer():
                for agent, peer in list(self._peers.items()):
                    if peer.generation == order.generation:
                        del self._peers[agent]
                        self._transport.disconnect(agent)

    def pump(self) -> None:
        """Drive the writes under way and report what ended."""
        for event in self._writer.pump():
            self._report(event)

    def close(self) -> None:
        self._transport.close()

    def _push(self, order: PushPlan) -> None:
        landing = order.landing
        self._reconnect(landing.agents)
        plan = plan_push(
            self._cache.layout,
            source_blocks=order.block_ids,
            target_blocks=landing.block_ids,
            first=order.first,
            last=order.last,
            source_slot=order.slot if order.is_last else None,
            target_slot=landing.slot if order.is_last else None,
        )
        checksums, fails = None, "a test asked it to fail" if order.fails else ""
        if order.checksum:
            try:
                with contextlib.nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
                    checksums = self._add_checksums(order)
            except (MemoryError, torch.OutOfMemoryError) as e:
                fails = f"no memory for checksums: {e}"
        self._writer.push(
            landing,
            plan,
            is_last=order.is_last,
            first_token=order.first_token,
            checksums=checksums,
            asked=order.ordered_at or None,
            fails=fails,
        )

    def _add_checksums(self, order: PushPlan) -> dict[str, int]:
        """Return the checksums of what a landing has been sent so far, `order` included."""
        sums = self._checksums.setdefault((order.landing.generation, order.landing.key), {})
        blocks = order.block_ids[order.first : order.last]
        for group in self._cache.layout.groups:
            pool, so_far = self._cache.pools[group.name], sums.get(group.name, 0)
            if group.unit == "block":
                sums[group.name] = (so_far + units_checksum(pool, blocks, first=order.first)) % MODULUS
            elif order.is_last:
                sums[group.name] = units_checksum(pool, [order.slot])
        return sums

    def _reconnect(self, agents: tuple[str, ...]) -> None:
        """Know the peers again that a failed write has disconnected; if one is really gone, the write will tell."""
        for agent in agents:
            if agent in self._peers:
                with contextlib.suppress(TransferError):
                    self._transport.connect(self._peers[agent])

    def _connect(self, peer: Endpoint) -> None:
        if source_rank_for(peer.rank, self._num_ranks) != self._rank:
            return  # another rank writes to it
        link, error = Link("", "", 0.0, 0.0, 0.0, 0.0), ""
        scratch = self._cache.pools[SCRATCH_POOL]
        try:
            if isinstance(self._transport, LinksItself):
                link = self._transport.link(
                    peer,
                    scratch=scratch,
                    allow_tcp=self._allow_tcp,
                    timeout_s=_LINK_TEST_S,
                    meanwhile=self.pump,
                )
            else:
                link = establish(
                    [Candidate(self._transport, self.endpoint, peer)],
                    scratch=scratch,
                    allow_tcp=self._allow_tcp,
                    timeout_s=_LINK_TEST_S,
                    meanwhile=self.pump,
                )
            self._peers[peer.agent] = peer
        except TransferError as e:
            self._peers.pop(peer.agent, None)  # nothing goes there over what has not passed the test
            error = str(e)
        self._emit(
            PeerLinked(rank=self._rank, agent=peer.agent, generation=peer.generation, error=error, **link._asdict())
        )

    def _report(self, event: WriterEvent) -> None:
        if event.status != "done" or event.is_last:
            self._checksums.pop((event.generation, event.key), None)
        self._emit(
            PushDone(
                rank=self._rank,
                key=event.key,
                generation=event.generation,
                status=event.status,
                is_last=event.is_last,
                num_bytes=event.num_bytes,
                num_pieces=event.num_pieces,
                seconds=event.seconds,
                post_seconds=event.post_seconds,
                exposed_seconds=event.exposed_seconds,
                error=event.error,
                cause=event.cause,
            )
        )


class TransferThread(TransportThread[Transfers]):
    """A thread around Transfers: `order` at will; `stop` waits for the end. See TransportThread."""

    def __init__(self, make: Callable[[], Transfers], *, on_failed: Callable[[str], None]) -> None:
        def register() -> tuple[Transfers, Endpoint]:
            transfers = make()
            return transfers, transfers.endpoint

        super().__init__("transfers", register, on_failed=on_failed)
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def order(self, order: Order) -> None:
        self._orders.put(order)

    def stop(self) -> None:
        """End after the writes under way; nothing new is started."""
        self._orders.put(None)
        self.join()

    def serve(self, transfers: Transfers) -> None:
        is_stopping = False
        while not (is_stopping and transfers.is_idle):
            for order in self._take(_IDLE_WAIT_S if transfers.is_idle else _ACTIVE_NAP_S):
                if order is None:
                    is_stopping = True
                else:
                    transfers.obey(order)
            transfers.pump()
        transfers.close()

    def _take(self, timeout_s: float) -> list[Order | None]:
        """Return the orders at hand, waiting for the first."""
        orders: list[Order | None] = []
        try:
            orders.append(self._orders.get(timeout=timeout_s))
            while True:
                orders.append(self._orders.get_nowait())
        except queue.Empty:
            return orders
