"""Pools of tests: those for GPU memory are tried here in host memory, so that they are right where there is a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kv_transfer.host_transport import HostTransport
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferStatus

from .conftest import PATIENCE_S
from .pool_memory import GpuPool, HostPool

UNIT_BYTES, NUM_UNITS = 4096, 12

Make = Callable[[], HostPool]


def host_pool() -> HostPool:
    return HostPool(NUM_UNITS, UNIT_BYTES)


def gpu_pool() -> HostPool:
    pytest.importorskip("torch")
    return GpuPool(NUM_UNITS, UNIT_BYTES, device="cpu")


@pytest.mark.parametrize("make", [host_pool, gpu_pool])
def test_units_hold_what_was_written(make: Make) -> None:
    pool = make()
    words = np.random.default_rng(1).integers(0, 1 << 64, (3, pool.num_words), dtype=np.uint64)
    pool.write([7, 0, 11], words)
    pool.fill([3, 4], 0xEEEE_EEEE_EEEE_EEEE)
    pool.fill([], 1)
    assert np.array_equal(pool.read([0, 7, 11]), words[[1, 0, 2]])
    assert (pool.read(range(3, 5)) == np.uint64(0xEEEE_EEEE_EEEE_EEEE)).all()
    assert not pool.read([1, 2, 5, 6, 8, 9, 10]).any()
    assert pool.read([]).shape == (0, pool.num_words)


def test_both_kinds_have_the_same_sum_and_the_one_for_gpus_begins_with_a_page() -> None:
    pools = [host_pool(), gpu_pool()]
    words = np.random.default_rng(2).integers(0, 1 << 64, (NUM_UNITS, UNIT_BYTES // 8), dtype=np.uint64)
    for pool in pools:
        pool.write(range(NUM_UNITS), words)
    assert pools[0].crc() == pools[1].crc() != host_pool().crc()
    assert pools[1].base % 4096 == 0


@pytest.mark.parametrize(("source", "target"), [(host_pool, gpu_pool), (gpu_pool, host_pool)])
def test_a_transport_finds_the_bytes_at_the_address(source: Make, target: Make) -> None:
    pools = [source(), target()]
    words = np.random.default_rng(3).integers(0, 1 << 64, (NUM_UNITS, UNIT_BYTES // 8), dtype=np.uint64)
    pools[0].write(range(NUM_UNITS), words)
    writer, reader = HostTransport("writer"), HostTransport("reader")
    writer.register([pools[0].address("kv")], generation=1, rank=0)
    peer = reader.register([pools[1].address("kv")], generation=1, rank=0)
    writer.connect(peer)
    transfer = writer.write(peer.agent, TransferPlan((Piece("kv", 2 * UNIT_BYTES, 5 * UNIT_BYTES, 3 * UNIT_BYTES),)))
    until = time.monotonic() + PATIENCE_S
    while writer.check(transfer) is TransferStatus.PENDING:
        assert time.monotonic() < until
    assert np.array_equal(pools[1].read([5, 6, 7]), words[2:5])
    assert not pools[1].read([4, 8]).any()
    writer.close()
    reader.close()
