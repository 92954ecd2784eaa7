"""What only HostTransport does: buffers that pieces share or are split over, and how its ends part."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.host_link import (
    MAX_MESSAGE_BYTES,
    Word,
    pack_pieces,
)
from kv_transfer.host_transport import HostTransport
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferError, TransferStatus

from .conftest import PATIENCE_S, Cluster, assert_same_bytes, expected_after, scattered_plan
from .host_ends import (
    ODD_BYTES,
    SCRATCH_WRITE,
    SHORT_WRITE,
    BrokenCopier,
    StrangeWriter,
    await_copy,
    await_until,
    cut,
    held_by_this_process,
    hold,
    switches,
    writer_process,
    writers_of,
)


def test_pieces_larger_than_all_buffers_land_whole(tight_cluster: Cluster) -> None:
    prefill, decode = tight_cluster.pair()
    plan = TransferPlan(
        tuple(Piece(name, 0, 0, array.size) for name, array in prefill.pools.items() if name != "scratch")
    )
    expected = expected_after(plan, prefill.pools, decode.pools)
    transfer = prefill.transport.write(decode.endpoint.agent, plan, b"whole")
    assert tight_cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    assert_same_bytes(decode.pools, expected)
    assert (transfer.num_bytes, transfer.num_pieces) == (plan.num_bytes, len(plan.pieces))


def test_pieces_that_share_buffers_land_each_in_its_place(tight_cluster: Cluster) -> None:
    prefill, decode = tight_cluster.pair()
    plan, _, _ = scattered_plan(tight_cluster.layout, blocks=20)
    expected = expected_after(plan, prefill.pools, decode.pools)
    transfer = prefill.transport.write(decode.endpoint.agent, plan)
    assert tight_cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    assert_same_bytes(decode.pools, expected)


def test_more_pieces_than_a_message_holds_land(host_cluster: Cluster) -> None:
    prefill, decode = host_cluster.pair()
    size = prefill.pools["csa_kv"].size
    plan = TransferPlan(tuple(Piece("csa_kv", at, size - 3 - at, 3) for at in range(0, size, 3)))
    assert len(pack_pieces(np.zeros((1, 3)))) * len(plan.pieces) > MAX_MESSAGE_BYTES
    expected = expected_after(plan, prefill.pools, decode.pools)
    transfer = prefill.transport.write(decode.endpoint.agent, plan)
    assert host_cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    assert_same_bytes(decode.pools, expected)


def test_writes_under_way_at_once_to_two_peers_keep_their_order(tight_cluster: Cluster) -> None:
    prefill, first = tight_cluster.pair()
    second = tight_cluster.side(None)
    tight_cluster.link(prefill, second)
    size = prefill.pools["csa_kv"].size // 2
    halves = [TransferPlan((Piece("csa_kv", at, 0, size),)) for at in (0, size, 0, size)]
    transfers = [
        prefill.transport.write(side.endpoint.agent, plan, str(number).encode())
        for number, plan in enumerate(halves)
        for side in (first, second)
    ]
    for transfer in transfers:
        assert tight_cluster.settle(transfer, prefill) is TransferStatus.DONE
    for side in (first, second):
        side.poll()
        assert side.messages == [b"0", b"1", b"2", b"3"]
        assert np.array_equal(side.pools["csa_kv"][:size], prefill.pools["csa_kv"][size : 2 * size])


def test_both_ends_may_write_at_once(tight_cluster: Cluster) -> None:
    one, other = tight_cluster.pair()
    tight_cluster.link(other, one)
    size = one.pools["csa_kv"].size // 2
    there = one.transport.write(other.endpoint.agent, TransferPlan((Piece("csa_kv", 0, size, size),)))
    back = other.transport.write(one.endpoint.agent, TransferPlan((Piece("hca_kv", 0, 0, 48),)))
    assert tight_cluster.settle(there, one) is TransferStatus.DONE
    assert tight_cluster.settle(back, other) is TransferStatus.DONE
    assert np.array_equal(other.pools["csa_kv"][size : 2 * size], one.pools["csa_kv"][:size])
    assert (one.pools["hca_kv"][:48] == 0xEE).all()


def test_a_write_does_not_wait_for_the_receiver(tight_cluster: Cluster) -> None:
    prefill, decode = tight_cluster.pair()
    held = hold(decode)
    transfer = prefill.transport.write(decode.endpoint.agent, TransferPlan((Piece("csa_kv", 0, 0, 8 * ODD_BYTES),)))
    await_copy(held, prefill, transfer)
    assert prefill.transport.check(transfer) is TransferStatus.PENDING
    held.may_copy.set()
    assert tight_cluster.settle(transfer, prefill) is TransferStatus.DONE


def test_a_disconnected_peer_is_let_go_of_when_its_last_write_has_ended(tight_cluster: Cluster) -> None:
    prefill, decode = tight_cluster.pair()
    held = hold(decode)
    transfer = prefill.transport.write(decode.endpoint.agent, SHORT_WRITE, b"whole")
    await_copy(held, prefill, transfer)
    prefill.transport.disconnect(decode.endpoint.agent)
    assert writers_of(decode)
    held.may_copy.set()
    assert tight_cluster.settle(transfer, prefill) is TransferStatus.DONE
    await_until(lambda: not writers_of(decode))


def test_a_peer_that_is_replaced_is_let_go_of(host_cluster: Cluster) -> None:
    prefill, old, new = host_cluster.side(1), *(host_cluster.side(None, name="decode") for _ in range(2))
    assert old.endpoint.agent == new.endpoint.agent
    host_cluster.link(prefill, old)
    host_cluster.link(prefill, new)
    await_until(lambda: not writers_of(old))


def test_a_notification_too_long_for_a_message_is_refused(host_cluster: Cluster) -> None:
    prefill, decode = host_cluster.pair()
    for say in (
        lambda: prefill.transport.notify(decode.endpoint.agent, bytes(70_000)),
        lambda: prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, bytes(70_000)),
    ):
        with pytest.raises(TransferError, match="notification of 70000 bytes: at most 65536"):
            say()


def test_a_writer_killed_amid_its_bytes_writes_no_more_and_leaves_nothing_behind(host_cluster: Cluster) -> None:
    decode = host_cluster.side(None)
    before = held_by_this_process()
    with writer_process(decode, "write") as process:
        await_until(lambda: bool(decode.poll() or decode.messages))
        assert held_by_this_process() - before
        process.kill()
        process.wait(PATIENCE_S)
        await_until(lambda: not writers_of(decode))
    assert not held_by_this_process() - before
    decode.poll()
    complete = len(decode.messages)
    decode.pools["csa_kv"][:] = 0xEE
    host_cluster.link(host_cluster.side(1), decode)
    decode.poll()
    assert (decode.pools["csa_kv"] == 0xEE).all()
    assert decode.messages == [b"whole"] * complete


def test_buffers_that_a_writer_left_full_are_not_emptied_once_it_is_gone(host_cluster: Cluster) -> None:
    decode = host_cluster.side(None)
    held = hold(decode)
    with StrangeWriter(decode.endpoint) as writer:
        writer.enter()
        writer.fill(0, [(0, 0, 16)], notification=b"too early")
        assert held.has_begun.wait(PATIENCE_S)
        writer.fill(1, [(0, 16, 16)], is_last=True, notification=b"whole")
        writer.link.send(Word(b"last word"))
    held.may_copy.set()
    await_until(lambda: not writers_of(decode))
    decode.poll()
    assert decode.messages == [b"last word"]
    assert (decode.pools["csa_kv"][:16] == 7).all()  # its copy was under way
    assert (decode.pools["csa_kv"][16:] == 0xEE).all()


def test_what_a_writer_said_last_arrives_though_it_closes_at_once(host_cluster: Cluster) -> None:
    decode = host_cluster.side(None)
    with writer_process(decode, "leave") as process:
        assert process.wait(PATIENCE_S) == 0
    await_until(lambda: not writers_of(decode))
    decode.poll()
    assert decode.messages == [b"first", b"second", b"third"]


def test_a_process_that_ends_with_a_write_under_way_ends_well(host_cluster: Cluster) -> None:
    decode = host_cluster.side(None)
    with writer_process(decode, "abandon") as process:
        assert process.wait(PATIENCE_S) == 0


def test_a_receiver_that_closes_fails_the_writes_to_it_and_nothing_lands_later(tight_cluster: Cluster) -> None:
    prefill, decode = tight_cluster.pair()
    held = hold(decode)
    size = decode.pools["csa_kv"].size
    transfer = prefill.transport.write(decode.endpoint.agent, TransferPlan((Piece("csa_kv", 0, 0, size),)), b"late")
    await_copy(held, prefill, transfer)
    held.may_copy.set()
    decode.transport.close()
    landed = decode.pools["csa_kv"].copy()
    assert tight_cluster.settle(transfer, prefill) is TransferStatus.FAILED
    assert "hung up" in transfer.error
    with pytest.raises(TransferError, match="not connected"):
        prefill.transport.notify(decode.endpoint.agent, b"x")
    assert np.array_equal(decode.pools["csa_kv"], landed)


def test_a_write_whose_connection_is_cut_fails_when_the_copy_under_way_has_ended(tight_cluster: Cluster) -> None:
    prefill, decode = tight_cluster.pair()
    held = hold(decode)
    size = decode.pools["csa_kv"].size
    transfer = prefill.transport.write(decode.endpoint.agent, TransferPlan((Piece("csa_kv", 0, 0, size),)), b"late")
    await_copy(held, prefill, transfer)
    cut(prefill, decode)
    for _ in range(20):
        assert prefill.transport.check(transfer) is TransferStatus.PENDING
    with pytest.raises(TransferError, match="under way"):
        prefill.transport.connect(decode.endpoint)
    held.may_copy.set()
    assert tight_cluster.settle(transfer, prefill) is TransferStatus.FAILED
    landed = decode.pools["csa_kv"].copy()
    await_until(lambda: not writers_of(decode))
    assert np.array_equal(decode.pools["csa_kv"], landed)
    tight_cluster.link(prefill, decode)


def test_a_writer_that_closes_breaks_its_writes_off(tight_cluster: Cluster) -> None:
    prefill, decode = tight_cluster.pair()
    held = hold(decode)
    size = decode.pools["csa_kv"].size
    transfer = prefill.transport.write(decode.endpoint.agent, TransferPlan((Piece("csa_kv", 0, 0, size),)), b"whole")
    await_copy(held, prefill, transfer)
    held.may_copy.set()
    prefill.transport.close()
    assert transfer.status is not TransferStatus.PENDING
    landed = decode.pools["csa_kv"].copy()
    await_until(lambda: not writers_of(decode))
    assert np.array_equal(decode.pools["csa_kv"], landed)


def test_nothing_is_left_when_both_ends_have_closed(host_cluster: Cluster) -> None:
    before = held_by_this_process()
    prefill, decode = host_cluster.pair()
    transfer = prefill.transport.write(decode.endpoint.agent, SHORT_WRITE)
    assert host_cluster.settle(transfer, prefill) is TransferStatus.DONE
    assert held_by_this_process() - before
    for side in (prefill, decode):
        side.transport.close()
        side.transport.close()
    assert not held_by_this_process() - before


def test_a_transport_that_is_dropped_ends_its_thread() -> None:
    transport = HostTransport("dropped")
    transport.register([], generation=1, rank=0)
    thread = transport._receiver.thread
    assert thread.is_alive()
    del transport
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_thread_with_nothing_to_do_sleeps(host_cluster: Cluster) -> None:
    _, decode = host_cluster.pair()
    receiving: Any = decode.transport
    status = Path(f"/proc/self/task/{receiving._receiver.thread.native_id}/status")
    await_until(lambda: "State:\tS" in status.read_text())
    before = switches(status)
    time.sleep(0.1)
    assert switches(status) == before


def test_pools_in_vram_without_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TransferError, match=r"could not start the host lane: .* finds no device"):
        HostTransport("decode", memory="VRAM").register([], generation=1, rank=0)


def test_a_device_that_fails_at_the_receiver_fails_all_writes_and_is_reported(host_cluster: Cluster) -> None:
    prefill, decode = host_cluster.pair()
    receiving: Any = decode.transport
    receiving._receiver._copier = BrokenCopier()
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, b"whole")
    assert host_cluster.settle(transfer, prefill) is TransferStatus.FAILED
    with pytest.raises(TransferError, match="receives nothing any more: CopyError: the device has fallen off the bus"):
        decode.poll()
    with pytest.raises(TransferError, match="its process is gone"):
        prefill.transport.connect(decode.endpoint)
    assert (decode.pools["scratch"] == 0xEE).all()


def test_a_device_that_fails_at_the_writer_fails_its_write(host_cluster: Cluster) -> None:
    prefill, decode = host_cluster.side(1), host_cluster.side(None)
    sending: Any = prefill.transport
    sending._copier = BrokenCopier()
    prefill.transport.connect(decode.endpoint)
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, b"whole")
    assert host_cluster.settle(transfer, prefill) is TransferStatus.FAILED
    assert "the device has fallen off the bus" in transfer.error
    await_until(lambda: not writers_of(decode))
    decode.poll()
    assert not decode.messages
