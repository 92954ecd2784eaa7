"""LinkTable: the /link requests that wait for ranks, and what is answered when all have linked or one has failed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import msgspec

from engine import errors
from engine.plan import ConnectPeer, DisconnectPeer, LeaderMessage, PeerLinked
from kv_transfer.landing import decode_endpoint
from router.protocol import LinkReply, LinkRequest, WriterLost

LinkCallback = Callable[[LinkReply | errors.RequestError], None]


@dataclasses.dataclass(slots=True, eq=False)
class _Link:
    """waiting: agents not linked yet."""

    waiting: set[str]
    on_result: LinkCallback
    replies: list[PeerLinked]


class LinkTable:
    """send: to every rank; the one that writes to an endpoint answers for it."""

    def __init__(self, send: Callable[[LeaderMessage], None]) -> None:
        self._send = send
        self._links: list[_Link] = []

    def link(self, request: LinkRequest, on_result: LinkCallback) -> None:
        """Connect the ranks to every endpoint of a decode group. Raises InvalidRequest for what is none."""
        try:
            endpoints = [decode_endpoint(data) for data in request.endpoints]
        except msgspec.MsgspecError as e:
            raise errors.InvalidRequest(f"endpoints: {e}") from e
        if not endpoints:
            raise errors.InvalidRequest(f"endpoints: worker {request.worker_id} names none; is it loaded?")
        self._links.append(_Link({e.agent for e in endpoints}, on_result, []))
        for data in request.endpoints:
            self._send(ConnectPeer(endpoint=data))

    def forget(self, on_result: LinkCallback) -> None:
        """Nobody waits for this /link any more."""
        self._links = [link for link in self._links if link.on_result is not on_result]

    def unlink(self, request: WriterLost) -> None:
        """Forget a decode group. Pushes to it fail by themselves."""
        self._send(DisconnectPeer(generation=request.generation))

    def on_linked(self, message: PeerLinked) -> None:
        for link in [link for link in self._links if message.agent in link.waiting]:
            link.waiting.discard(message.agent)
            link.replies.append(message)
            if message.error:
                self._links.remove(link)
                link.on_result(errors.TransferFailed(f"rank {message.rank} to {message.agent}: {message.error}"))
            elif not link.waiting:
                self._links.remove(link)
                link.on_result(_reply(link.replies))


def _reply(replies: list[PeerLinked]) -> LinkReply:
    """Return what the slowest rank makes of a link."""
    staging = sum((Counter(r.staging_pages) for r in replies), Counter[int]())
    return LinkReply(
        transport="+".join(sorted({r.transport for r in replies})),
        lane="+".join(sorted({r.lane for r in replies})),
        warmup_us=max(r.warmup_us for r in replies),
        latency_us=max(r.latency_us for r in replies),
        gb_per_s=min(r.gb_per_s for r in replies),
        copy_gb_per_s=min(r.copy_gb_per_s for r in replies),
        staging_pages=dict(staging),
    )
