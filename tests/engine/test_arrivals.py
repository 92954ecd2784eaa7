"""A decode rank's arrival thread: words come through in order, and its death is told."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from engine.arrivals import ArrivalThread
from engine.plan import Arrived
from kv_transfer.landing import PoolAddress
from kv_transfer.link_test import LINK_WORD
from kv_transfer.local_transport import LocalRegistry, LocalTransport
from kv_transfer.transport import TransferError

PATIENCE_S = 10


class Bench:
    def __init__(self, make: Any = None) -> None:
        self.registry = LocalRegistry()
        self.emitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread = ArrivalThread(
            make or (lambda: LocalTransport("decode", self.registry)),
            [PoolAddress(name="scratch", base=0, unit_bytes=4096, num_units=0)],
            rank=3,
            generation=5,
            emit=self.emitted.put,
            on_failed=self.failures.put,
        )

    def writer(self) -> LocalTransport:
        transport = LocalTransport("prefill", self.registry)
        transport.register([], generation=1, rank=0)
        transport.connect(self.endpoint)
        return transport

    def start(self) -> None:
        self.endpoint = self.thread.start()


def test_words_are_emitted_in_order_and_the_link_word_is_not() -> None:
    bench = Bench()
    bench.start()
    assert (bench.endpoint.rank, bench.endpoint.generation) == (3, 5)
    writer = bench.writer()
    for word in (b"one", LINK_WORD, b"two"):
        writer.notify(bench.endpoint.agent, word)
    bench.thread.hint(2)
    arrived = [bench.emitted.get(timeout=PATIENCE_S) for _ in range(2)]
    bench.thread.stop()
    assert [message.notification for message in arrived] == [b"one", b"two"]
    assert all(isinstance(m, Arrived) and m.rank == 3 and m.agent == "prefill.r0.g1" for m in arrived)
    assert 0 <= time.monotonic() - arrived[0].at < PATIENCE_S
    assert bench.emitted.empty() and bench.failures.empty()


def test_a_transport_that_does_not_start_raises_in_start() -> None:
    def make() -> Any:
        raise TransferError("no such library")

    with pytest.raises(TransferError, match="no such library"):
        Bench(make).start()


def test_the_death_of_the_thread_is_told() -> None:
    class Dying(LocalTransport):
        def poll(self) -> list[tuple[str, bytes]]:
            raise RuntimeError("the lane is gone")

    bench = Bench(lambda: Dying("decode", bench.registry))
    bench.start()
    assert "thread of arrivals: RuntimeError: the lane is gone" in bench.failures.get(timeout=PATIENCE_S)
