"""Measure kernels on the GPU of this machine.

    isthmus bench kernels --group attention [--filter TEXT] [--json FILE] [--list]
    python -m kernels.bench ...                       the same; needs torch and triton only

For owners of kernels: a module exports `benches() -> list[Bench]`, built without touching a device, and
`samples() -> list[Bench]`: small inputs, edges included, one for each shipped path; `kernels.sanitize` runs those.

How a time comes about: launches are captured in a CUDA graph and the graph is replayed; the result is the median of
many replays over the launches in it. Launch i works on input i mod COPIES, each with memory of its own. Clocks are
warmed up before. Each bench is measured in three conditions:

    alone   the kernel back to back with itself. A small input stays in L2 (the row says how much is in rotation)
    cold    twice the L2 is read before each launch; cost by difference to the reads alone
    chain   a matrix product, then every bench of the same `chain` in order, then a norm; cost by difference to the
            same graph without this bench, and with each launch on its own data

A cost by difference is what the step gets longer by: less than alone where launches overlap. `floor_us` is the longer
of bytes over memory bandwidth and operations over the tensor cores' bf16 rate, as measured on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pkgutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import kernels
from kernels.gpu_timer import Device, Launch, describe, graph_timer, warm_clocks
from kernels.table import format_table

GROUPS = ("attention", "moe", "linear", "indexer", "sampling", "prefill")
COPIES = 8

Timer = Callable[[Sequence[Launch]], list[float]]


@dataclasses.dataclass(frozen=True)
class Bench:
    """One operation at one shape.

    op, shape: what the rows say, as in "sparse_attention", "B=16 heads=16 keys=128+512".
    make(device, i) -> launch: builds input i (random, seeded with i, memory of its own; never zeros) and returns a
    function without arguments that runs the operation once: no synchronisation, no allocation that a graph can't hold.
    bytes: the fewest that must move through device memory, each input read once and each output written once.
    flops: of its matrix products, 0 if there are none.   chain: name of the sequence it is part of, as in "CSA B=16".
    """

    group: str
    op: str
    shape: str
    make: Callable[[torch.device, int], Launch]
    bytes: int
    flops: int = 0
    chain: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One result. us: median; low, high: 10th and 90th percentile of the replays.   fraction: floor_us / us.

    A time by difference can come out below 0 where noise exceeds it; fraction is None then.
    """

    op: str
    shape: str
    condition: str
    us: float
    low_us: float
    high_us: float
    floor_us: float
    fraction: float | None
    copies: int
    rotated_bytes: int
    device: str
    commit: str
    conditions: str


def collect(which: str = "benches") -> list[Bench]:
    """Return what all kernel modules export as `benches` (or `samples`), in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__))
    names = [name for name in names if name not in ("bench", "check", "sanitize")]
    modules = [importlib.import_module(f"kernels.{name}") for name in names]
    return [bench for module in modules if hasattr(module, which) for bench in getattr(module, which)()]


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What is launched around a bench: a read of twice the L2 and its time, a product before, a norm after."""

    target: torch.device
    timer: Timer
    flush: Launch
    flush_us: list[float]
    product: Launch
    norm: Launch

    @classmethod
    def prepare(cls, device: Device, target: torch.device, timer: Timer) -> Surroundings:
        """Allocate on `target` and time the flush. The product is [16, 1024] x [1024, 4096], bfloat16."""
        filler = torch.randn(2 * device.l2 // 4, device=target)  # only read: dirty lines would be written back later
        total = torch.empty((), device=target)
        x, weight = (torch.randn(shape, dtype=torch.bfloat16, device=target) for shape in ((16, 1024), (1024, 4096)))
        y = torch.empty(16, 4096, dtype=torch.bfloat16, device=target)
        normed = torch.empty(16, dtype=torch.bfloat16, device=target)

        def flush() -> object:
            return torch.sum(filler, dim=0, out=total)

        return cls(
            target,
            timer,
            flush,
            timer([flush] * COPIES),
            lambda: torch.matmul(x, weight, out=y),
            lambda: torch.linalg.vector_norm(y, dim=1, out=normed),
        )


def measure(bench: Bench, chain: Sequence[Bench], around: Surroundings, device: Device, commit: str) -> list[Row]:
    """Return the three rows of `bench`. chain: the benches of its chain in order, itself among them."""
    inputs = {id(each): [each.make(around.target, i) for i in range(COPIES)] for each in chain}
    own = inputs[id(bench)]
    alone = [us / COPIES for us in around.timer(own)]
    cold = around.timer([launch for own_i in own for launch in (around.flush, own_i)])
    whole = [step for i in range(COPIES) for step in _pass(chain, inputs, i, around)]
    rest = [step for i in range(COPIES) for step in _pass([b for b in chain if b is not bench], inputs, i, around)]
    chained = _difference(around.timer(whole), around.timer(rest))
    times = {"alone": alone, "cold": _difference(cold, around.flush_us), "chain": chained}
    return [_row(bench, condition, found, device, commit) for condition, found in times.items()]


def _pass(chain: Sequence[Bench], inputs: dict[int, list[Launch]], i: int, around: Surroundings) -> list[Launch]:
    return [around.product, *(inputs[id(bench)][i] for bench in chain), around.norm]


def _difference(whole: Sequence[float], without: Sequence[float]) -> list[float]:
    base = statistics.median(without)
    return [(us - base) / COPIES for us in whole]


def _row(bench: Bench, condition: str, times: Sequence[float], device: Device, commit: str) -> Row:
    us, floor = statistics.median(times), device.floor_us(bench.bytes, bench.flops)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Row(
        op=bench.op,
        shape=bench.shape,
        condition=condition,
        us=round(us, 2),
        low_us=round(deciles[0], 2),
        high_us=round(deciles[-1], 2),
        floor_us=round(floor, 2),
        fraction=round(floor / us, 3) if us > 0 else None,
        copies=COPIES,
        rotated_bytes=COPIES * bench.bytes,
        device=device.name,
        commit=commit,
        conditions=f"graph replay, median of {len(times)}; L2 {device.l2 >> 20} MiB; floor: {device.source}",
    )


def current_commit() -> str:
    """Return the checkout's commit, with "+" if files differ from it; else $ISTHMUS_COMMIT, else "unknown"."""
    here = Path(__file__).resolve().parent
    try:
        said = [
            subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "."])
        ]
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ISTHMUS_COMMIT", "unknown")
    return said[0] + ("+" if said[1] else "")


def format_rows(rows: Sequence[Row]) -> str:
    """Return the results as a table, one line for each op and shape."""
    head = ["op", "shape", "floor us", "alone", "cold", "chain", "10-90 % alone", "of floor", "rotated MB"]
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.op, row.shape), {})[row.condition] = row
    lines = [
        [
            *(op, shape, f"{by['alone'].floor_us:.2f}"),
            *(f"{by[condition].us:.2f}" for condition in ("alone", "cold", "chain")),
            f"{by['alone'].low_us:.2f}-{by['alone'].high_us:.2f}",
            *(f"{by['alone'].fraction or 0:.0%}", f"{by['alone'].rotated_bytes / 1e6:.1f}"),
        ]
        for (op, shape), by in found.items()
    ]
    return format_table(head, lines, left=2)


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m kernels.bench") -> int:
    """Measure; return 0 well, 1 if a kernel failed or there is no GPU."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure GPU kernels on the GPU of this machine.")
    parser.add_argument("--group", choices=GROUPS, required=True, help="which operations")
    parser.add_argument("--filter", metavar="TEXT", help="only where op and shape contain it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--list", action="store_true", help="print what would be measured; needs no GPU")
    args = parser.parse_args(argv)
    benches = [bench for bench in collect() if bench.group == args.group]
    selected = [bench for bench in benches if (args.filter or "") in f"{bench.op} {bench.shape}"]
    if not selected:
        parser.error(f"nothing in group {args.group} matches; it has {sorted({bench.op for bench in benches})}")
    if args.list:
        lines = [[b.op, b.shape, b.chain or "-", f"{b.bytes:,}", f"{b.flops:,}"] for b in selected]
        print(format_table(["op", "shape", "chain", "bytes", "flops"], lines, left=3))
        return 0
    if not torch.cuda.is_available():
        print(
            f"{prog}: no CUDA device here (torch {torch.__version__}); --list shows what it would do", file=sys.stderr
        )
        return 1
    target = torch.device("cuda", torch.cuda.current_device())
    warm_clocks(target)
    device, commit = describe(target), current_commit()
    print(f"{device.name}, L2 {device.l2 >> 20} MiB, floors at {device.bandwidth / 1e12:.2f} TB/s and "
          f"{device.bf16 / 1e12:.0f} TFLOP/s ({device.source}); commit {commit}", flush=True)  # fmt: skip
    around = Surroundings.prepare(device, target, graph_timer)
    rows: list[Row] = []
    failed = 0
    for bench in selected:
        try:
            chain = [b for b in benches if b is bench or (b.chain and b.chain == bench.chain)]
            rows += measure(bench, chain, around, device, commit)
        except Exception as error:  # one kernel's failure must not cost the others' rows
            failed += 1
            print(f"FAIL {bench.op} {bench.shape}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if rows:
        print(format_rows(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
