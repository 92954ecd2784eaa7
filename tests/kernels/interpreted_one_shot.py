"""One-shot sums between processes: each rank runs the kernel in its own interpreter, over memory that all have mapped.

What this shows: who writes where, halves that take turns, flags that count on, sizes that change from call to call. How
two GPUs order memory it can't show; the gate looks at the instructions that see to that.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import shared_memory

import pytest
import torch

from kernels import one_shot

SIZES = (3, 1024, 1500, 2, 2048, 1025, 4, 700)  # of calls in a row: another number of programs each


def values(rank: int, call: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * call + rank))


def rank_process(rank, names, start_epoch, delays, results):
    import time

    torch.set_num_threads(1)
    count = len(names)
    regions = [shared_memory.SharedMemory(name) for name in names]
    mapped = [torch.frombuffer(region.buf, dtype=torch.uint8) for region in regions]
    epochs = torch.full((one_shot.num_programs(torch.float32),), start_epoch, dtype=torch.int32)
    addresses = torch.tensor([m.data_ptr() for m in mapped])
    peers = one_shot.PeerRegions(rank, count, torch.float32, addresses, epochs)
    found = []
    for call, size in enumerate(SIZES):
        if call in delays:
            time.sleep(0.05)
        found.append(one_shot.one_shot_sum(values(rank, call, size), peers).tolist())
    results.put((rank, found, epochs[:3].tolist()))
    del mapped
    results.close()
    results.join_thread()


def run(count, start_epoch=0):
    """Return by rank what it found, and how far its programs have counted."""
    context = multiprocessing.get_context("spawn")
    size = one_shot.region_bytes(count, torch.float32)
    regions = [shared_memory.SharedMemory(create=True, size=size) for _ in range(count)]
    results = context.Queue()
    names = [region.name for region in regions]
    processes = [
        context.Process(target=rank_process, args=(rank, names, start_epoch, {rank, rank + 3}, results))
        for rank in range(count)
    ]
    try:
        for process in processes:
            process.start()
        found = {rank: rest for rank, *rest in (results.get(timeout=120) for _ in processes)}
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
        for region in regions:
            region.close()
            region.unlink()
    return found


@pytest.mark.parametrize(("count", "start_epoch"), [(2, 0), (3, 2**31 - 4)], ids=["two", "three-counting-over"])
def test_every_rank_has_the_sum_of_all_call_by_call(count, start_epoch):
    found = run(count, start_epoch)
    wanted = [
        one_shot.one_shot_sum_reference([values(rank, call, size) for rank in range(count)])
        for call, size in enumerate(SIZES)
    ]
    calls = [sum(-(-size // one_shot.BLOCK) > program for size in SIZES) for program in range(3)]
    counted = [(start_epoch + n + 2**31) % 2**32 - 2**31 for n in calls]
    for rank in range(count):
        sums, epochs = found[rank]
        for got, expected in zip(sums, wanted, strict=True):
            assert torch.equal(torch.tensor(got), expected)
        assert epochs == counted


def test_what_does_not_fit_is_refused():
    epochs = torch.zeros(one_shot.num_programs(torch.float32), dtype=torch.int32)
    peers = one_shot.PeerRegions(0, 2, torch.float32, torch.zeros(2, dtype=torch.int64), epochs)
    with pytest.raises(ValueError, match="131072 values at most"):
        one_shot.one_shot_sum(torch.zeros(131073), peers)
    with pytest.raises(ValueError, match=r"wanted contiguous torch\.float32"):
        one_shot.one_shot_sum(torch.zeros(4, dtype=torch.bfloat16), peers)
    with pytest.raises(ValueError, match="rank 0 of 1"):
        one_shot.PeerRegions(0, 1, torch.float32, torch.zeros(1, dtype=torch.int64), epochs)
