"""Who may write over the host lane, and what: neither end believes what comes over the connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_transfer import host_staging
from kv_transfer.host_link import (
    MAX_MESSAGE_BYTES,
    Coming,
    Emptied,
    Fill,
    Hello,
    Message,
    Welcome,
    Word,
    pack_pieces,
)
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferError, TransferStatus

from .conftest import Cluster
from .host_ends import (
    ODD_BYTES,
    SCRATCH_WRITE,
    SHORT_WRITE,
    StrangeWriter,
    await_copy,
    await_until,
    hold,
    is_open,
    writers_of,
)


@pytest.mark.parametrize("host", ["", "another"])
def test_another_host_is_refused(host_cluster: Cluster, host: str) -> None:
    prefill, decode = host_cluster.side(1), host_cluster.side(None)
    with pytest.raises(TransferError, match=f"is on host {host or 'unknown'}, .* use transport nixl"):
        prefill.transport.connect(msgspec.structs.replace(decode.endpoint, host=host))


def test_metadata_of_an_earlier_life_is_refused_though_its_socket_answers(host_cluster: Cluster) -> None:
    prefill, decode = host_cluster.side(1), host_cluster.side(None)
    agent, name, _ = msgspec.msgpack.decode(decode.endpoint.metadata)
    stale = msgspec.structs.replace(decode.endpoint, metadata=msgspec.msgpack.encode([agent, name, bytes(16)]))
    with pytest.raises(TransferError, match="metadata is stale: it belongs to a process that has ended"):
        prefill.transport.connect(stale)
    await_until(lambda: not writers_of(decode))
    host_cluster.link(prefill, decode)


def test_metadata_of_another_agent_is_refused(host_cluster: Cluster) -> None:
    prefill, decode, other = host_cluster.side(1), host_cluster.side(None), host_cluster.side(None)
    with pytest.raises(TransferError, match=f"carries the metadata of {other.endpoint.agent}"):
        prefill.transport.connect(msgspec.structs.replace(decode.endpoint, metadata=other.endpoint.metadata))


def test_a_receiver_without_memory_says_so(host_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    prefill, decode = host_cluster.side(1), host_cluster.side(None)
    with monkeypatch.context() as patched:
        patched.setattr(host_staging, "create", fail)
        with pytest.raises(TransferError, match="no 8388608 bytes of staging memory: "):
            prefill.transport.connect(decode.endpoint)
    host_cluster.link(prefill, decode)


def test_the_receiver_refuses_what_lies_outside_its_pools(host_cluster: Cluster) -> None:
    """Though the endpoint that the writer was given says otherwise. Other writes go on."""
    prefill, decode = host_cluster.side(1), host_cluster.side(None)
    pools = tuple(msgspec.structs.replace(pool, num_units=pool.num_units * 2) for pool in decode.endpoint.pools)
    prefill.transport.connect(msgspec.structs.replace(decode.endpoint, pools=pools))
    half = decode.pools["csa_kv"].size
    plan = TransferPlan((*SCRATCH_WRITE.pieces, Piece("csa_kv", 0, half - 16, 32)))
    transfer = prefill.transport.write(decode.endpoint.agent, plan, b"refused")
    assert host_cluster.settle(transfer, prefill) is TransferStatus.FAILED
    assert f"bytes {half - 16}..{half + 16} of pool 'csa_kv': the pool has {half} bytes" in transfer.error
    with pytest.raises(TransferError, match="write to it first"):
        prefill.transport.notify(decode.endpoint.agent, b"nothing has been written")
    decode.poll()
    assert not decode.messages
    assert all((array == 0xEE).all() for array in decode.pools.values())
    again = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE)
    assert host_cluster.settle(again, prefill) is TransferStatus.DONE


@pytest.mark.parametrize(
    ("piece", "error"),
    [
        ((99, 0, 16), "there is no pool 99"),
        ((-1, 0, 16), "there is no pool -1"),
        ((0, -16, 16), "bytes -16..0 of pool 'csa_kv'"),
        ((0, 0, 0), "bytes 0..0 of pool 'csa_kv'"),
        ((0, 0, -16), "bytes 0..-16 of pool 'csa_kv'"),
        ((0, 2**63 - 1, 16), "of pool 'csa_kv'"),
        ((0, 0, ODD_BYTES + 1), f"more than the {ODD_BYTES} bytes of their buffer"),
    ],
)
def test_a_buffer_with_a_bad_piece_is_not_emptied_at_all(
    tight_cluster: Cluster, piece: tuple[int, int, int], error: str
) -> None:
    decode = tight_cluster.side(None)
    with StrangeWriter(decode.endpoint) as writer:
        writer.enter()
        writer.fill(0, [(0, 0, 16), piece])
        writer.fill(1, [(0, 32, 16)], is_last=True, notification=b"whole")  # the same write: it has failed already
        answer, other = writer.hear(), writer.hear()
        assert isinstance(answer, Emptied) and answer.is_end and error in answer.error
        assert other == Emptied(1, 1, is_end=False)
        writer.fill(0, [(0, 48, 16)], number=2, is_last=True, notification=b"next")
        assert writer.hear() == Emptied(0, 2, is_end=True)
    decode.poll()
    assert decode.messages == [b"next"]
    assert (decode.pools["csa_kv"][48:64] == 7).all()
    decode.pools["csa_kv"][48:64] = 0xEE
    assert all((array == 0xEE).all() for array in decode.pools.values())


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(150_000),
        msgspec.msgpack.encode(Word(b"unheard")),
        msgspec.msgpack.encode(Hello("stranger", bytes(16))),
        msgspec.msgpack.encode(Fill(1, 0, pack_pieces(np.array([(0, 0, 16)])), True, b"unheard")),
    ],
    ids=["noise", "http", "huge", "word", "hello", "fill"],
)
def test_a_stranger_is_dropped_and_others_are_served(host_cluster: Cluster, packet: bytes) -> None:
    prefill, decode = host_cluster.pair()
    with StrangeWriter(decode.endpoint) as stranger:
        stranger.send(packet)
        await_until(lambda: stranger.has_been_dropped())
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE, b"served")
    assert host_cluster.settle(transfer, prefill) is TransferStatus.DONE
    decode.poll()
    assert decode.messages == [b"served"]


def test_a_packet_that_only_begins_like_a_message_is_none(host_cluster: Cluster) -> None:
    decode = host_cluster.side(None)
    with StrangeWriter(decode.endpoint) as stranger:
        hello = msgspec.msgpack.encode(Hello("x" * 100_000, stranger.life))
        name = "x" * (100_000 + MAX_MESSAGE_BYTES - len(hello))
        stranger.send(msgspec.msgpack.encode(Hello(name, stranger.life)) + b"and more")
        await_until(lambda: stranger.has_been_dropped())


@pytest.mark.parametrize(
    "packet",
    [
        msgspec.msgpack.encode(Hello("twice", bytes(16))),
        msgspec.msgpack.encode(Emptied(0, 1, True)),
        msgspec.msgpack.encode(Fill(1, 2, pack_pieces(np.array([(0, 0, 16)])), True, b"")),
        msgspec.msgpack.encode(Fill(1, -1, pack_pieces(np.array([(0, 0, 16)])), True, b"")),
        msgspec.msgpack.encode(Fill(1, 0, b"not a multiple of a piece", True, b"")),
        msgspec.msgpack.encode(Fill(1, 0, b"", True, b"")),
    ],
    ids=["hello", "emptied", "third_buffer", "negative_buffer", "torn_pieces", "no_pieces"],
)
def test_a_writer_that_breaks_the_rules_is_dropped(tight_cluster: Cluster, packet: bytes) -> None:
    decode = tight_cluster.side(None)
    with StrangeWriter(decode.endpoint) as writer:
        writer.enter()
        writer.send(packet)
        await_until(lambda: writer.has_been_dropped())
    await_until(lambda: not writers_of(decode))
    assert all((array == 0xEE).all() for array in decode.pools.values())


def test_connections_that_stay_silent_do_not_pile_up(host_cluster: Cluster) -> None:
    prefill, decode = host_cluster.pair()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(StrangeWriter(decode.endpoint)) for _ in range(40)]
        await_until(lambda: sum(writer.has_been_dropped() for writer in silent) >= 24)
        assert len(writers_of(decode)) <= 17
    transfer = prefill.transport.write(decode.endpoint.agent, SCRATCH_WRITE)
    assert host_cluster.settle(transfer, prefill) is TransferStatus.DONE


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda busy: Word(b"?"), "Word was not expected"),
        (lambda busy: Emptied(busy, 77, is_end=True), "it has ended write 77"),
        (lambda busy: Emptied(9, 1, is_end=False), "Emptied was not expected"),
        (lambda busy: Emptied(1 - busy, 1, is_end=False), "which it had not been given"),
    ],
    ids=["word", "other_write", "no_buffer", "free_buffer"],
)
def test_a_receiver_that_breaks_the_rules_fails_the_write_when_it_has_hung_up(
    tight_cluster: Cluster, answer: Callable[[int], Message], error: str
) -> None:
    prefill, decode = tight_cluster.pair()
    held = hold(decode)
    transfer = prefill.transport.write(decode.endpoint.agent, SHORT_WRITE)
    await_copy(held, prefill, transfer)
    (writer,) = writers_of(decode)
    (busy,) = writer.busy
    writer.link.send(answer(busy))
    await_until(lambda: prefill.transport.check(transfer) and not is_open(prefill, decode))
    assert prefill.transport.check(transfer) is TransferStatus.PENDING  # its copy is under way and will land
    with pytest.raises(TransferError, match="while 1 writes over its previous connection are under way"):
        prefill.transport.connect(decode.endpoint)
    held.may_copy.set()
    assert tight_cluster.settle(transfer, prefill) is TransferStatus.FAILED
    assert error in transfer.error
    assert np.array_equal(decode.pools["scratch"][:64], prefill.pools["scratch"][:64])
    tight_cluster.link(prefill, decode)


def test_a_receiver_is_told_that_a_write_comes_only_if_it_knows_the_word(
    host_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for knows_coming in (True, False):
        if not knows_coming:
            monkeypatch.setattr("kv_transfer.host_receiver.Welcome", lambda size, count, **_: Welcome(size, count))
        prefill, decode = host_cluster.pair()
        sending: Any = prefill.transport
        link = sending._peers[decode.endpoint.agent].link
        said: list[Message] = []
        monkeypatch.setattr(link, "send", lambda m, link=link, said=said: said.append(m) or type(link).send(link, m))
        sending._memory = "VRAM"  # such writers say it; their copies are not what is tested here
        transfer = prefill.transport.write(decode.endpoint.agent, SHORT_WRITE)
        assert host_cluster.settle(transfer, prefill) is TransferStatus.DONE
        assert [type(message) for message in said] == [Coming, Fill][not knows_coming :]
