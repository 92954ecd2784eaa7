"""LinkTable: what is answered to /link when every rank has linked."""

from __future__ import annotations

from typing import Any

from engine.errors import RequestError
from engine.plan import LeaderMessage, PeerLinked
from kv_transfer.landing import Endpoint, encode
from prefill_worker.links import LinkTable
from router.protocol import Fingerprints, LinkReply, LinkRequest


def endpoint(agent: str, rank: int) -> bytes:
    return encode(Endpoint(transport="host", agent=agent, generation=7, rank=rank, metadata=b"", pools=()))


def linked(agent: str, **figures: Any) -> PeerLinked:
    return PeerLinked(rank=0, agent=agent, generation=7, transport="host", lane="shm", **figures)


def test_reply_is_the_slowest_ranks_and_counts_the_staging_pages_of_all_by_numa_node() -> None:
    sent: list[LeaderMessage] = []
    replies: list[LinkReply | RequestError] = []
    request = LinkRequest(
        worker_id="decode-0",
        generation=7,
        url="http://d",
        fingerprints=Fingerprints(model="m", layout="l"),
        endpoints=[endpoint("decode.r0", 0), endpoint("decode.r1", 1)],
    )
    table = LinkTable(sent.append)
    table.link(request, replies.append)
    table.on_linked(linked("decode.r0", gb_per_s=9.0, latency_us=5.0, staging_pages={0: 10, 1: 3}))
    assert (len(sent), replies) == (2, [])
    table.on_linked(linked("decode.r1", gb_per_s=4.0, latency_us=2.0, staging_pages={1: 13}))
    (reply,) = replies
    assert isinstance(reply, LinkReply)
    assert (reply.lane, reply.gb_per_s, reply.latency_us) == ("shm", 4.0, 5.0)
    assert reply.staging_pages == {0: 10, 1: 16}
