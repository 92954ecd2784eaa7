"""What only UcxxTransport does: the receiver leads, and nothing that comes in is believed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_transfer.landing import Endpoint, encode
from kv_transfer.layout import KVLayout
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferError, TransferStatus
from kv_transfer.ucxx_transport import UcxxTransport

from .conftest import PATIENCE_S, Cluster, Side, make_cluster

SCRATCH_WRITE = TransferPlan((Piece("scratch", 0, 0, 4096),))


@pytest.fixture
def ucxx_cluster(layout: KVLayout) -> Iterator[Cluster]:
    yield from make_cluster("ucxx", layout)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "ucxx"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(TransferError, match=r"needs the package ucxx-cu13 .*pip install '\.\[ucxx\]'"):
        UcxxTransport("decode").register([], generation=1, rank=0)


def test_a_write_ends_only_when_the_receiver_has_said_so(ucxx_cluster: Cluster) -> None:
    prefill, decode = ucxx_cluster.pair()
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, b"all there")
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert prefill.transport.check(transfer) is TransferStatus.PENDING
    assert ucxx_cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    assert decode.messages == [b"all there"]
    assert np.array_equal(decode.pools["scratch"], prefill.pools["scratch"])


def test_the_receiver_refuses_what_lies_outside_its_pools(ucxx_cluster: Cluster) -> None:
    """Though the endpoint that the writer was given says otherwise."""
    prefill, decode = ucxx_cluster.side(1), ucxx_cluster.side(None)
    pools = tuple(msgspec.structs.replace(pool, num_units=pool.num_units * 2) for pool in decode.endpoint.pools)
    prefill.transport.connect(msgspec.structs.replace(decode.endpoint, pools=pools))
    half = decode.pools["csa_kv"].size
    plan = TransferPlan((*SCRATCH_WRITE.pieces, Piece("csa_kv", 0, half - 16, 32)))
    transfer = prefill.transport.write(decode.endpoint.agent, plan, b"refused")
    assert ucxx_cluster.settle(transfer, prefill, decode) is TransferStatus.FAILED
    assert f"bytes {half - 16}..{half + 16} of pool 'csa_kv': the pool has {half} bytes" in transfer.error
    assert not decode.messages
    assert all((array == 0xEE).all() for array in decode.pools.values())
    again = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE)
    assert ucxx_cluster.settle(again, prefill, decode) is TransferStatus.DONE


def test_metadata_of_an_earlier_life_is_refused_though_its_port_answers(ucxx_cluster: Cluster) -> None:
    prefill, decode = ucxx_cluster.side(1), ucxx_cluster.side(None)
    agent, host, port, _ = msgspec.msgpack.decode(decode.endpoint.metadata)
    stale = changed_metadata(decode.endpoint, [agent, host, port, bytes(16)])
    prefill.transport.connect(stale)
    transfer = prefill.transport.write(agent, SCRATCH_WRITE, b"stale")
    assert ucxx_cluster.settle(transfer, prefill, decode) is TransferStatus.FAILED
    assert "stale: another process has its port now" in transfer.error
    assert not decode.messages
    ucxx_cluster.link(prefill, decode)


def test_a_transport_that_closes_fails_the_writes_to_it(ucxx_cluster: Cluster) -> None:
    prefill, decode = ucxx_cluster.pair()
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, b"too late")
    decode.transport.close()
    assert ucxx_cluster.settle(transfer, prefill, decode) is TransferStatus.FAILED
    assert decode.endpoint.agent in transfer.error
    with pytest.raises(TransferError, match="not connected"):
        prefill.transport.notify(decode.endpoint.agent, b"x")


def test_a_writer_that_dies_between_grant_and_bytes_leaves_no_trace(ucxx_cluster: Cluster) -> None:
    prefill, decode = ucxx_cluster.pair()
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, b"never")
    await_until(lambda: any(writer.incoming for writer in writers_of(decode)), decode)
    sending: Any = prefill.transport
    sending._peers[decode.endpoint.agent].link.close()
    assert prefill.transport.check(transfer) is TransferStatus.FAILED
    await_until(lambda: not writers_of(decode), decode)
    ucxx_cluster.link(prefill, decode)
    assert not decode.messages


def test_what_a_writer_said_last_arrives_though_it_closes_at_once(ucxx_cluster: Cluster) -> None:
    decode = ucxx_cluster.side(None)
    with writer_process(decode, "leave") as process:
        await_until(lambda: process.poll() is not None and not writers_of(decode), decode)
    assert decode.messages == [b"first", b"second", b"third"]


def test_a_writer_killed_amid_its_bytes_says_nothing_and_writes_no_more(ucxx_cluster: Cluster) -> None:
    decode = ucxx_cluster.side(None)
    with writer_process(decode, "write") as process:
        await_until(lambda: decode.messages and any(writer.incoming for writer in writers_of(decode)), decode)
        process.kill()
        process.wait(PATIENCE_S)
        await_until(lambda: not writers_of(decode), decode)
    complete = len(decode.messages)
    decode.pools["csa_kv"][:] = 0xEE
    ucxx_cluster.link(ucxx_cluster.side(1), decode)
    assert (decode.pools["csa_kv"] == 0xEE).all()
    assert decode.messages == [b"whole"] * complete


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x03\x00\x00\x00abc"])
def test_a_stranger_is_dropped_and_others_are_served(ucxx_cluster: Cluster, frame: bytes) -> None:
    prefill, decode = ucxx_cluster.pair()
    sending: Any = prefill.transport
    _, host, port, _ = msgspec.msgpack.decode(decode.endpoint.metadata)
    endpoint = sending._ucxx.core.UCXEndpoint.create(sending._worker, host, port, True)
    buffer = bytearray(frame)
    request = sending._ucxx.stream_send(endpoint, buffer)
    await_until(lambda: len(writers_of(decode)) == 2, prefill, decode)
    await_until(lambda: len(writers_of(decode)) == 1, prefill, decode)
    assert request.completed
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, b"served")
    assert ucxx_cluster.settle(transfer, prefill, decode) is TransferStatus.DONE
    assert decode.messages == [b"served"]


def test_both_ends_may_write_at_once(ucxx_cluster: Cluster) -> None:
    one, other = ucxx_cluster.pair()
    ucxx_cluster.link(other, one)
    size = one.pools["csa_kv"].size // 2
    there = one.transport.write(other.endpoint.agent, TransferPlan((Piece("csa_kv", 0, size, size),)))
    back = other.transport.write(one.endpoint.agent, TransferPlan((Piece("hca_kv", 0, 0, 48),)))
    assert ucxx_cluster.settle(there, one, other) is TransferStatus.DONE
    assert ucxx_cluster.settle(back, other, one) is TransferStatus.DONE
    assert np.array_equal(other.pools["csa_kv"][size : 2 * size], one.pools["csa_kv"][:size])
    assert (one.pools["hca_kv"][:48] == 0xEE).all()


@contextlib.contextmanager
def writer_process(target: Side, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(__file__).with_name("sender.py")
    command = [sys.executable, str(script), encode(target.endpoint).hex(), mode]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def writers_of(side: Side) -> list[Any]:
    receiving: Any = side.transport
    return list(receiving._receiver.writers)


def changed_metadata(endpoint: Endpoint, address: list[Any]) -> Endpoint:
    return msgspec.structs.replace(endpoint, metadata=msgspec.msgpack.encode(address))


def await_until(condition: Any, *sides: Side) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        for side in sides:
            side.poll()
        assert time.monotonic() < until
