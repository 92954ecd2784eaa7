"""One of two transports for each peer: everything goes over the chosen one, and the other stands in where it must."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from kv_transfer import link_test
from kv_transfer.auto_transport import AutoTransport
from kv_transfer.landing import Endpoint
from kv_transfer.layout import KVLayout
from kv_transfer.link_test import LINK_WORD, LinksItself
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transport import TransferError, TransferStatus

from .conftest import Cluster, Side, assert_same_bytes, expected_after, require_nixl, scattered_plan


@pytest.fixture
def cluster(layout: KVLayout) -> Iterator[Cluster]:
    require_nixl()
    cluster = Cluster("auto", layout, AutoTransport)
    yield cluster
    for side in cluster.sides:
        side.transport.close()


def link(prefill: Side, decode: Side, **options: Any) -> link_test.Link:
    """Link as a prefill rank does, while decode listens on a thread of its own."""
    assert isinstance(prefill.transport, LinksItself)
    is_over = threading.Event()

    def listen() -> None:
        while not is_over.wait(0.0005):
            decode.poll()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        scratch = torch.from_numpy(prefill.pools["scratch"])
        return prefill.transport.link(
            decode.endpoint, **{"scratch": scratch, "allow_tcp": True, "timeout_s": 10.0, **options}
        )
    finally:
        is_over.set()
        thread.join()
        decode.poll()
        assert set(decode.messages) <= {LINK_WORD}
        decode.notifications.clear()
        decode.pools["scratch"][:] = 0xEE


def assert_carries(cluster: Cluster, prefill: Side, decode: Side) -> None:
    plan, _, _ = scattered_plan(cluster.layout)
    expected = expected_after(plan, prefill.pools, decode.pools)
    transfer = prefill.transport.write(decode.endpoint.agent, plan, b"all there")
    assert cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    cluster.await_messages(decode, 1)
    assert_same_bytes(decode.pools, expected)
    assert decode.notifications == [(prefill.endpoint.agent, b"all there")]


def test_nixl_is_preferred_and_carries_bytes_and_words(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_test, "_POOR_SHARE", 0.0)  # 4 KiB say nothing of bandwidth
    prefill, decode = cluster.side(1), cluster.side(None)
    chosen = link(prefill, decode)
    assert chosen.transport == "nixl"
    assert prefill.transport.lane(decode.endpoint.agent) == chosen.lane != "unknown"
    assert_carries(cluster, prefill, decode)


def test_the_host_lane_stands_in_for_tcp(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlTransport, "lane", lambda self, agent: "tcp")
    prefill, decode = cluster.side(1), cluster.side(None)
    assert link(prefill, decode, allow_tcp=False).transport == "host"
    assert_carries(cluster, prefill, decode)


def test_without_nixl_the_host_lane_serves_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: NixlTransport, *args: object, **options: object) -> Endpoint:
        raise TransferError("transport nixl needs the package nixl-cu13")

    prefill = cluster.side(1)
    monkeypatch.setattr(NixlTransport, "register", missing)
    decode = cluster.side(None)
    assert link(prefill, decode).transport == "host"
    assert_carries(cluster, prefill, decode)


def test_a_peer_connected_anew_keeps_what_was_chosen_for_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlTransport, "lane", lambda self, agent: "tcp")
    prefill, decode = cluster.side(1), cluster.side(None)
    link(prefill, decode, allow_tcp=False)
    prefill.transport.disconnect(decode.endpoint.agent)
    with pytest.raises(TransferError, match="not connected"):
        prefill.transport.notify(decode.endpoint.agent, b"x")
    prefill.transport.connect(decode.endpoint)
    assert prefill.transport.lane(decode.endpoint.agent) != "tcp"
    assert_carries(cluster, prefill, decode)


def test_peers_that_share_no_transport_are_refused_by_what_they_have(cluster: Cluster) -> None:
    prefill, decode = cluster.side(1), cluster.side(None)
    offered = msgspec.msgpack.decode(decode.endpoint.metadata, type=list[Endpoint])
    foreign = [msgspec.structs.replace(e, host="another") for e in offered if e.transport == "host"]
    peer = msgspec.structs.replace(decode.endpoint, metadata=msgspec.msgpack.encode(foreign))

    def link_to(endpoint: Endpoint) -> None:
        assert isinstance(prefill.transport, LinksItself)
        prefill.transport.link(endpoint, scratch=torch.zeros(4096), allow_tcp=True, timeout_s=1.0)

    with pytest.raises(TransferError, match=r"offers host from another host, this rank has nixl, host: install nixl"):
        link_to(peer)
    with pytest.raises(TransferError, match=f"metadata of {decode.endpoint.agent} is unusable"):
        link_to(msgspec.structs.replace(decode.endpoint, metadata=b"\xc1"))
    with pytest.raises(TransferError, match="speaks 'nixl', not 'auto'"):
        link_to(offered[0])


def test_nothing_goes_over_what_was_not_measured(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> link_test.Link:
        raise TransferError("no answer")

    prefill, decode = cluster.side(1), cluster.side(None)
    with pytest.raises(TransferError, match="link it first"):
        prefill.transport.connect(decode.endpoint)
    link(prefill, decode)
    monkeypatch.setattr(link_test, "measure", fails)
    with pytest.raises(TransferError, match="no answer"):
        link(prefill, decode)
    with pytest.raises(TransferError, match="link it first"):
        prefill.transport.connect(decode.endpoint)
    with pytest.raises(TransferError, match="not connected"):
        prefill.transport.notify(decode.endpoint.agent, b"x")
