"""The seams of LocalTransport that fault tests rely on."""

from __future__ import annotations

import pytest

from kv_transfer.local_transport import LocalTransport
from kv_transfer.plan import TransferPlan
from kv_transfer.transport import TransferError, TransferStatus

from .conftest import Cluster, Side, assert_same_bytes, expected_after, scattered_plan


@pytest.fixture
def pair(local_cluster: Cluster) -> tuple[LocalTransport, Side, Side]:
    prefill, decode = local_cluster.pair()
    assert isinstance(prefill.transport, LocalTransport)
    return prefill.transport, prefill, decode


def test_a_held_write_stands_after_as_many_pieces_as_allowed(
    local_cluster: Cluster, pair: tuple[LocalTransport, Side, Side]
) -> None:
    transport, prefill, decode = pair
    plan, _, _ = scattered_plan(local_cluster.layout)
    partial = expected_after(TransferPlan(plan.pieces[:3]), prefill.pools, decode.pools)
    whole = expected_after(plan, prefill.pools, decode.pools)
    transport.gate.hold(3)
    transfer = transport.write(decode.endpoint.agent, plan, b"end")
    for _ in range(3):
        assert transport.check(transfer) is TransferStatus.PENDING
    assert_same_bytes(decode.pools, partial)
    assert decode.transport.poll() == []
    transport.gate.open()
    assert transport.check(transfer) is TransferStatus.DONE
    assert_same_bytes(decode.pools, whole)
    assert [message for _, message in decode.transport.poll()] == [b"end"]


def test_a_failed_write_keeps_its_cause_and_sends_no_word(
    local_cluster: Cluster, pair: tuple[LocalTransport, Side, Side]
) -> None:
    transport, _, decode = pair
    plan, _, _ = scattered_plan(local_cluster.layout)
    transport.gate.hold(1)
    transfer = transport.write(decode.endpoint.agent, plan, b"end")
    transport.gate.fail("link down")
    assert transport.check(transfer) is TransferStatus.FAILED
    transport.gate.open()
    assert transport.check(transfer) is TransferStatus.FAILED
    assert "link down" in transfer.error
    assert decode.transport.poll() == []


def test_a_peer_that_died_fails_what_is_under_way_and_refuses_the_rest(
    local_cluster: Cluster, pair: tuple[LocalTransport, Side, Side]
) -> None:
    transport, _, decode = pair
    plan, _, _ = scattered_plan(local_cluster.layout)
    agent = decode.endpoint.agent
    transport.gate.hold(1)
    transfer = transport.write(agent, plan)
    decode.transport.close()
    assert transport.check(transfer) is TransferStatus.FAILED
    with pytest.raises(TransferError, match="the peer is gone"):
        transport.write(agent, plan)
    with pytest.raises(TransferError, match="the peer is gone"):
        transport.notify(agent, b"x")


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_words_can_be_dropped_and_repeated(copies: int, pair: tuple[LocalTransport, Side, Side]) -> None:
    transport, _, decode = pair
    transport.gate.on_notification = lambda agent, message: [message] * copies
    transport.notify(decode.endpoint.agent, b"word")
    assert [message for _, message in decode.transport.poll()] == [b"word"] * copies


def test_words_can_be_delayed(pair: tuple[LocalTransport, Side, Side]) -> None:
    transport, _, decode = pair
    late: list[bytes] = []
    transport.gate.on_notification = lambda agent, message: late.append(message) or []
    transport.notify(decode.endpoint.agent, b"word")
    assert decode.transport.poll() == []
    transport.gate.on_notification = lambda agent, message: [message]
    for message in late:
        transport.notify(decode.endpoint.agent, message)
    assert [message for _, message in decode.transport.poll()] == [b"word"]
