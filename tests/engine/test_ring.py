"""The rings between leader and ranks: order, sizes, wake-ups, death of the peer."""

import multiprocessing
import os
import random
import threading
import time

import pytest

from engine.ring import RING_BYTES, Doorbell, LeaderEnd, PeerGone, Waiter, open_rank_end


def _echo(address: dict[str, object], count: int) -> None:
    channel, bell = open_rank_end(address, 0)
    waiter = Waiter(bell)
    waiter.watch(address["pid"])  # type: ignore[arg-type]
    seen = 0
    while seen < count:
        for message in channel.receive():
            channel.send(message)
            seen += 1
        if seen < count and waiter.wait(10):
            return


def test_messages_of_any_size_come_back_in_order_from_another_process() -> None:
    sizes = [0, 1, 3, 1000, RING_BYTES - 5, RING_BYTES, 3 * RING_BYTES + 17, 12]
    payloads = [random.Random(n).randbytes(n) for n in sizes] * 2
    end = LeaderEnd(1)
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(end.address, len(payloads)))
    process.start()
    waiter, got = Waiter(end.bell), []
    sender = threading.Thread(target=lambda: [end.channels[0].send(p) for p in payloads])
    sender.start()
    deadline = time.monotonic() + 30
    while len(got) < len(payloads) and time.monotonic() < deadline:
        waiter.wait(1)
        got += end.channels[0].receive()
    sender.join(10)
    process.join(10)
    assert got == payloads
    assert process.exitcode == 0


def test_waiter_reports_a_watched_process_that_ends() -> None:
    end = LeaderEnd(1)
    waiter = Waiter(end.bell)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    assert process.pid is not None
    waiter.watch(process.pid)
    assert waiter.wait(0) == []
    process.kill()
    assert waiter.wait(10) == [process.pid]
    process.join()


def test_writer_of_a_full_ring_fails_when_the_reader_has_ended() -> None:
    end = LeaderEnd(1)
    end.channels[0].is_peer_alive = lambda: False
    with pytest.raises(PeerGone):
        end.channels[0].send(bytes(2 * RING_BYTES))


def test_rings_of_an_ended_leader_cannot_be_opened() -> None:
    with pytest.raises(PeerGone):
        open_rank_end({"pid": 2**22 - 3, "bell": 3, "ranks": [{"ring": 4, "bell": 5}]}, 0)


def test_doorbell_never_blocks_however_often_it_rings() -> None:
    bell = Doorbell.create()
    for _ in range(100_000):
        bell.ring()
    bell.hush()
    waiter = Waiter(bell)
    started = time.monotonic()
    waiter.wait(0.01)
    assert time.monotonic() - started >= 0.009
    os.close(bell.fd)
