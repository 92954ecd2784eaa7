"""What every transport must do, between two transports of one process."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kv_transfer.landing import Endpoint, PoolAddress, decode_endpoint, encode
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferError, TransferStatus
from kv_transfer.warm import warm

from .conftest import PATIENCE_S, Cluster, assert_same_bytes, expected_after, scattered_plan

SCRATCH_WRITE = TransferPlan((Piece("scratch", 0, 0, 4096),))


def test_every_byte_of_a_plan_lands_and_no_other(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    plan, _, _ = scattered_plan(cluster.layout)
    expected = expected_after(plan, prefill.pools, decode.pools)
    transfer = prefill.transport.write(decode.endpoint.agent, plan)
    assert cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    assert_same_bytes(decode.pools, expected)
    assert (transfer.num_bytes, transfer.num_pieces, transfer.error) == (plan.num_bytes, len(plan.pieces), "")


def test_a_notification_comes_once_and_after_the_data(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    plan, _, _ = scattered_plan(cluster.layout)
    expected = expected_after(plan, prefill.pools, decode.pools)
    transfer = prefill.transport.write(decode.endpoint.agent, plan, b"all there")
    while not decode.notifications:
        prefill.transport.check(transfer)
        decode.poll()
    assert_same_bytes(decode.pools, expected)
    assert cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    for _ in range(20):
        prefill.poll()
        decode.poll()
    assert decode.notifications == [(prefill.endpoint.agent, b"all there")]


def test_words_arrive_in_the_order_they_were_sent(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    agent = decode.endpoint.agent
    prefill.transport.notify(agent, b"first")
    transfer = prefill.transport.write(agent, SCRATCH_WRITE, b"second")
    assert cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    empty = prefill.transport.write(agent, TransferPlan(()), b"third")
    assert prefill.transport.check(empty) is TransferStatus.DONE
    assert cluster.await_messages(decode, 3) == [b"first", b"second", b"third"]


def test_a_large_notification_arrives_whole(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    message = np.random.default_rng(3).bytes(40_000)
    prefill.transport.notify(decode.endpoint.agent, message)
    assert cluster.await_messages(decode, 1) == [message]


def test_two_destinations_get_the_same_bytes(cluster: Cluster) -> None:
    prefill, first = cluster.pair()
    second = cluster.side(None)
    prefill.transport.connect(second.endpoint)
    plan, _, _ = scattered_plan(cluster.layout)
    expected = expected_after(plan, prefill.pools, first.pools)
    transfers = [prefill.transport.write(side.endpoint.agent, plan) for side in (first, second)]
    for transfer in transfers:
        assert cluster.settle(transfer, prefill, first, second) is TransferStatus.DONE
    assert_same_bytes(first.pools, expected)
    assert_same_bytes(second.pools, expected)


def test_an_agent_never_connected_is_refused_by_name(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    with pytest.raises(TransferError, match="nobody is not connected"):
        prefill.transport.write("nobody", SCRATCH_WRITE)
    with pytest.raises(TransferError, match="nobody is not connected"):
        prefill.transport.notify("nobody", b"x")


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece("csa_kv", 0, 1 << 40, 16), "pool 'csa_kv' at"),
        (Piece("csa_kv", -16, 0, 16), "bytes -16..0"),
        (Piece("scratch", 0, 4000, 4096), "the pool has 4096 bytes"),
        (Piece("draft_kv", 0, 0, 16), "has no pool 'draft_kv'"),
        (Piece("scratch", 0, 0, 0), "bytes 0..0"),
    ],
)
def test_a_piece_outside_its_pool_stops_the_whole_write(cluster: Cluster, piece: Piece, message: str) -> None:
    prefill, decode = cluster.pair()
    before = {name: array.copy() for name, array in decode.pools.items()}
    with pytest.raises(TransferError, match=message):
        prefill.transport.write(decode.endpoint.agent, TransferPlan((*SCRATCH_WRITE.pieces, piece)), b"sent")
    prefill.transport.notify(decode.endpoint.agent, b"marker")
    assert cluster.await_messages(decode, 1) == [b"marker"]
    assert_same_bytes(decode.pools, before)


def test_a_write_after_disconnect_is_refused_until_the_peer_is_connected_again(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    agent = decode.endpoint.agent
    prefill.transport.disconnect(agent)
    prefill.transport.disconnect(agent)
    with pytest.raises(TransferError, match="not connected"):
        prefill.transport.write(agent, SCRATCH_WRITE)
    prefill.transport.connect(decode.endpoint)
    assert cluster.settle(prefill.transport.write(agent, SCRATCH_WRITE), prefill, decode) is TransferStatus.DONE


def test_connecting_twice_changes_nothing(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    agent = decode.endpoint.agent
    assert cluster.settle(prefill.transport.write(agent, SCRATCH_WRITE), prefill, decode) is TransferStatus.DONE
    lane = prefill.transport.lane(agent)
    prefill.transport.connect(decode_endpoint(encode(decode.endpoint)))
    assert prefill.transport.lane(agent) == lane != "unknown"


def test_damaged_metadata_is_refused(cluster: Cluster) -> None:
    prefill, decode = cluster.side(1), cluster.side(None)
    broken = decode.endpoint.metadata[: len(decode.endpoint.metadata) // 2]
    with pytest.raises(TransferError, match=f"metadata of {decode.endpoint.agent} is unusable"):
        prefill.transport.connect(changed(decode.endpoint, metadata=broken))
    with pytest.raises(TransferError, match="not connected"):
        prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE)


def test_pools_of_another_geometry_are_refused(cluster: Cluster) -> None:
    prefill, decode = cluster.side(1), cluster.side(None)
    pool = decode.endpoint.pool("csa_kv")
    other = PoolAddress(name="csa_kv", base=pool.base, unit_bytes=pool.unit_bytes * 2, num_units=pool.num_units // 2)
    with pytest.raises(TransferError, match="same model, kv_cache_dtype and block size"):
        prefill.transport.connect(changed(decode.endpoint, pools=(other,)))


def test_another_kind_of_transport_is_refused(cluster: Cluster) -> None:
    prefill, decode = cluster.side(1), cluster.side(None)
    with pytest.raises(TransferError, match="speaks 'pigeon'"):
        prefill.transport.connect(changed(decode.endpoint, transport="pigeon"))


def test_a_peer_that_came_back_under_its_name_is_reached_by_its_new_metadata(cluster: Cluster) -> None:
    prefill, old = cluster.side(1), cluster.side(None, name="decode")
    prefill.transport.connect(old.endpoint)
    first = prefill.transport.write(old.endpoint.agent, SCRATCH_WRITE)
    assert cluster.settle(first, prefill, old) is TransferStatus.DONE
    old.transport.close()
    new = cluster.side(None, name="decode")
    assert new.endpoint.agent == old.endpoint.agent
    prefill.transport.connect(new.endpoint)
    plan, _, _ = scattered_plan(cluster.layout)
    expected = expected_after(plan, prefill.pools, new.pools)
    untouched = {name: array.copy() for name, array in old.pools.items()}
    transfer = prefill.transport.write(new.endpoint.agent, plan)
    assert cluster.settle(transfer, prefill, new) is TransferStatus.DONE
    assert_same_bytes(new.pools, expected)
    assert_same_bytes(old.pools, untouched)


def test_generations_of_a_worker_are_different_agents(cluster: Cluster) -> None:
    first = cluster.side(None, name="decode", generation=1)
    second = cluster.side(None, name="decode", generation=2)
    other_rank = cluster.side(None, name="decode", generation=2, rank=1)
    assert len({side.endpoint.agent for side in (first, second, other_rank)}) == 3


def test_pools_are_registered_once(cluster: Cluster) -> None:
    side = cluster.side(None)
    with pytest.raises(TransferError, match="registered its pools already"):
        side.transport.register([], generation=1, rank=0)


def test_nothing_works_before_pools_are_registered(cluster: Cluster) -> None:
    transport, peer = cluster.make("unregistered"), cluster.side(None)
    assert transport.poll() == []
    with pytest.raises(TransferError, match="register the pools first"):
        transport.connect(peer.endpoint)


def test_the_first_write_warms_the_lane_and_takes_no_notification(cluster: Cluster) -> None:
    prefill, decode = cluster.side(1), cluster.side(None)
    agent = decode.endpoint.agent
    cluster.link(decode, prefill)
    prefill.transport.connect(decode.endpoint)
    decode.transport.notify(prefill.endpoint.agent, b"for prefill")
    assert prefill.transport.lane(agent) == "unknown"
    warmth = warm(prefill.transport, agent, sleep=lambda seconds: decode.poll())
    assert warmth.lane == prefill.transport.lane(agent) != "unknown"
    assert 0 < warmth.microseconds < 10e6
    assert cluster.await_messages(prefill, 1) == [b"for prefill"]


@pytest.mark.parametrize("cluster", ["host", "nixl"], indirect=True)
def test_a_word_before_the_connection_is_set_up_is_refused_not_lost(cluster: Cluster) -> None:
    prefill, decode = cluster.side(1), cluster.side(None)
    agent = decode.endpoint.agent
    prefill.transport.connect(decode.endpoint)
    with pytest.raises(TransferError, match="write to it first"):
        prefill.transport.notify(agent, b"lost")
    cluster.link(prefill, decode)
    prefill.transport.notify(agent, b"word")
    until = time.monotonic() + PATIENCE_S
    while not decode.notifications and time.monotonic() < until:  # the sender makes no progress any more
        decode.poll()
    assert decode.messages == [b"word"]


def changed(endpoint: Endpoint, **fields: object) -> Endpoint:
    values = {name: getattr(endpoint, name) for name in endpoint.__struct_fields__}
    return Endpoint(**(values | fields))
