"""What a sum over ranks costs by its size: `python -m bench.all_reduce`, and for the floor of `bench step --ranks`.

    python -m bench.all_reduce --ranks 2 --device cuda --json all_reduce.json        a GPU for each rank
    python -m bench.all_reduce --ranks 2                                             gloo over loopback: a dry run

On GPUs of captured calls in a row, as decode steps have them, on the slowest rank: through peers' memory (one-shot), by
the settings of NCCL that the group has kept, and the way that a step takes (chosen). What was measured when the ranks
met, all settings of NCCL among it, is in `exchange`. bench.bars holds one-shot sums against NCCL's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from bench.ranks import RanksFailed, run_in_ranks
from bench.report import write_json
from bench.step_flags import count
from engine.runner import DTYPES
from kernels.bench import current_commit

if TYPE_CHECKING:
    from engine.parallel import Rank

SIZES = tuple(1 << power for power in range(13, 21))
"""Bytes: 8 KiB to 1 MiB, one to 128 tokens of 4,096 channels in bfloat16."""
CHOSEN = "chosen"
_CALLS = 20


def sum_times(group: Rank, sizes: Sequence[int], dtype: torch.dtype) -> dict[str, dict[int, float]]:
    """Return microseconds of a sum by way and bytes; every rank of the group calls it at the same time."""
    from engine.device_group import DeviceGroup

    if isinstance(group, DeviceGroup):
        return group.measure(sizes, dtype)
    return {CHOSEN: {size: host_sum_us(group, size, dtype) for size in sizes}}


def host_sum_us(group: Rank, num_bytes: int, dtype: torch.dtype) -> float:
    """Return microseconds of a sum in host memory: median of calls one after the other."""
    x, found = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype), []
    for _ in range(_CALLS):
        began = time.perf_counter()
        group.all_reduce(x)
        found.append(1e6 * (time.perf_counter() - began))
    return statistics.median(found)


def measure(group: Rank, sizes: Sequence[int], dtype: str) -> dict[str, Any]:
    """Return the report of one rank."""
    times = sum_times(group, sizes, DTYPES[dtype])
    on_gpu = torch.cuda.is_available() and group.exchange is not None and group.exchange.backend == "nccl"
    return {
        "conditions": {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "commit": current_commit(),
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "torch": torch.__version__,
            "ranks": group.count,
            "dtype": dtype,
        },
        "exchange": msgspec.to_builtins(group.exchange),
        "sums_us": {way: {str(size): us for size, us in found.items()} for way, found in times.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; return 0 well, 1 for a rank that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.all_reduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of sums (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    args = parser.parse_args(argv)
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: a sum needs two or more")
    try:
        report = run_in_ranks(args.ranks, measure, SIZES, args.dtype, device=args.device, dtype=args.dtype)
    except RanksFailed as error:
        print(f"bench.all_reduce: {error}", file=sys.stderr)
        return 1
    for way, found in report["sums_us"].items():
        print(f"{way:<14}" + "  ".join(f"{int(size) >> 10} KiB {us:.1f}" for size, us in found.items()) + " us")
    if report["exchange"]["one_shot"]:
        print(f"no one-shot sums: {report['exchange']['one_shot']}")
    if args.json:
        write_json(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
