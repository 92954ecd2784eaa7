"""What ranks exchange on GPUs: sums through NCCL and through peers' memory, right and timed; a process for each GPU.

    PYTHONPATH=. python tests/gpu/exchange.py --ranks 2          from the repository's root; needs as many GPUs

Joins as a rank does, prints what was measured and chosen, then sums known values: random sizes one after the other, and
a captured chain of sums replayed, while ranks are held up at random. Exit code 1 if a sum is not exactly right, or if
ranks have different bits.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _values(rank: int, call: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers: their sums are exact in any order."""
    at = torch.arange(size, device="cuda")
    return ((at * 5 + 7 * call + 3 * rank) % 13 - 6).to(dtype)


def _wanted(count: int, call: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return sum(_values(rank, call, size, dtype).float() for rank in range(count)).to(dtype)


def rank_process(run_dir: str, rank: int, count: int, name: str, calls: int, replays: int) -> tuple[list[str], str]:
    """Return what was wrong at this rank, and how it exchanges, as JSON."""
    import msgspec

    from engine.parallel import join
    from kernels import one_shot

    torch.cuda.set_device(rank)
    dtype = DTYPES[name]
    group = join(Path(run_dir), rank=rank, count=count, generation=1, device="cuda", dtype=dtype)
    faults, draw = [], torch.Generator().manual_seed(1)
    hold = torch.Generator().manual_seed(rank)
    for call in range(calls):
        size = int(torch.randint(1, 2 * one_shot.capacity(dtype), (1,), generator=draw))
        if int(torch.randint(0, 50, (1,), generator=hold)) == 0:
            time.sleep(0.01)
        found = group.all_reduce(_values(rank, call, size, dtype))
        if not torch.equal(found, _wanted(count, call, size, dtype)):
            faults.append(f"sum {call} of {size} values is wrong")
    # A chain as a step has it: each sum is what the next one starts from, kept small.
    sizes = (4096, 65536, 1000, 4096)
    state = [_values(rank, 0, size, dtype) for size in sizes]
    own = [x.clone() for x in state]
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        for x in state:
            group.all_reduce(x.clone())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for x, mine in zip(state, own, strict=True):
            x.copy_((group.all_reduce(x.clone()) + mine) % 13)
    checked = [_values(rank, 0, size, dtype) for size in sizes]
    for x, mine in zip(state, own, strict=True):
        x.copy_(mine)
    for replay in range(replays):
        graph.replay()
        if replay % 100 == rank:
            torch.cuda.synchronize()
            time.sleep(0.002)
    for at, (x, mine) in enumerate(zip(checked, own, strict=True)):
        for _ in range(replays):
            x = (group.all_reduce(x.clone()) + mine) % 13
        if not torch.equal(x, state[at]):
            faults.append(f"replayed sums of {sizes[at]} values differ from the same ones launched one by one")
    gathered = group.all_gather(_values(rank, 1, 6, torch.float32).view(2, 3))
    wanted = torch.cat([_values(other, 1, 6, torch.float32).view(2, 3) for other in range(count)], 1)
    if not torch.equal(gathered, wanted):
        faults.append("gathered columns are not those of the ranks")
    torch.cuda.synchronize()
    return faults, msgspec.json.encode(group.exchange).decode()


def main() -> int:
    """Run what the arguments say and print times and faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=list(DTYPES))
    parser.add_argument("--calls", type=int, default=2000, help="sums of random sizes")
    parser.add_argument("--replays", type=int, default=500, help="of a captured chain of four sums")
    args = parser.parse_args()
    faults = 0
    for name in args.dtype:
        with (
            tempfile.TemporaryDirectory(prefix="isthmus-exchange-") as run_dir,
            concurrent.futures.ProcessPoolExecutor(args.ranks, mp_context=multiprocessing.get_context("spawn")) as pool,
        ):
            asked = (args.ranks, name, args.calls, args.replays)
            ranks = [pool.submit(rank_process, run_dir, rank, *asked) for rank in range(args.ranks)]
            found = [rank.result(600) for rank in ranks]
        exchange = json.loads(found[0][1])
        print(f"\n{name}, {args.ranks} ranks: " + json.dumps({k: v for k, v in exchange.items() if k != "timings"}))
        for one in exchange["timings"]:
            print(f"{one['way']:<14} {one['num_bytes']:>10,} B {one['us']:>9.1f} us")
        for rank, (wrong, _) in enumerate(found):
            faults += len(wrong)
            print(f"rank {rank}: {len(wrong)} faults {wrong[:3]}")
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
