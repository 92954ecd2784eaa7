"""Measure kernels on the GPU of this machine.

    isthmus bench kernels --group attention [--filter TEXT] [--json FILE] [--list]
    python -m kernels.bench ...                       the same; needs torch and triton only

For owners of kernels: a module exports `benches() -> list[Bench]`, built without touching a device, and
`samples() -> list[Bench]`: small inputs, edges included, one for each shipped path; `kernels.sanitize` runs those.

How a time comes about: launches are captured in a CUDA graph and the graph is replayed; the result is the median of
many replays over the launches in it. Launch i works on input i mod COPIES, each with memory of its own. Clocks are
warmed up before. Each bench is measured in three conditions:

    alone   the kernel back to back with itself. A small input stays in L2 (the row says how much is in rotation)
    cold    a copy of twice the L2 before each launch; cost by difference to the copies alone
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
from kernels.table import format_table

GROUPS = ("attention", "moe", "linear", "indexer", "sampling", "prefill")
COPIES = 8
LAUNCHES = 64  # in one graph, at least: its own launch takes microseconds
REPLAYS = 60

Launch = Callable[[], object]
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
class Device:
    """A device's ceilings: memory bytes/s, bf16 operations/s, bytes of L2, and where the first two come from."""

    name: str
    bandwidth: float
    bf16: float
    l2: int
    source: str

    def floor_us(self, bench: Bench) -> float:
        return 1e6 * max(bench.bytes / self.bandwidth, bench.flops / self.bf16)


@dataclasses.dataclass(frozen=True)
class Row:
    """One result. us: median; low, high: 10th and 90th percentile of the replays.   fraction: floor_us / us."""

    op: str
    shape: str
    condition: str
    us: float
    low_us: float
    high_us: float
    floor_us: float
    fraction: float
    copies: int
    rotated_bytes: int
    device: str
    commit: str
    conditions: str


# Copy bandwidth (read + write) and bf16 product of random data, both through torch; a name is matched by its beginning.
_CEILINGS = {
    "NVIDIA H200": (4.3e12, 788e12, "measured"),
    "NVIDIA RTX PRO 6000 Blackwell Server": (1.597e12, 439e12, "not measured: vendor's figures"),
    "NVIDIA RTX PRO 6000 Blackwell": (1.792e12, 503e12, "not measured: vendor's figures"),
}


def collect(which: str = "benches") -> list[Bench]:
    """Return what all kernel modules export as `benches` (or `samples`), in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__))
    names = [name for name in names if name not in ("bench", "check", "sanitize")]
    modules = [importlib.import_module(f"kernels.{name}") for name in names]
    return [bench for module in modules if hasattr(module, which) for bench in getattr(module, which)()]


def measure(
    benches: Sequence[Bench], selected: Sequence[Bench], device: Device, target: torch.device, timer: Timer, commit: str
) -> list[Row]:
    """Return the rows of the `selected` ones of `benches`; the others take part in chains only."""
    rows: list[Row] = []
    stream, product, norm = _neighbours(device, target)
    flushes = [stream] * COPIES
    flush_us = timer(flushes)
    for bench in selected:
        own = [bench.make(target, i) for i in range(COPIES)]
        rows.append(_row(bench, "alone", [t / COPIES for t in timer(own)], device, commit))
        spoilt = timer([launch for pair in zip(flushes, own, strict=True) for launch in pair])
        rows.append(_row(bench, "cold", _difference(spoilt, flush_us), device, commit))
        before, after = _around(bench, benches)
        parts = {id(other): [other.make(target, i) for i in range(COPIES)] for other in [*before, *after]}
        whole, without = [], []
        for i in range(COPIES):
            head = [product, *(parts[id(other)][i] for other in before)]
            tail = [*(parts[id(other)][i] for other in after), norm]
            whole += [*head, own[i], *tail]
            without += [*head, *tail]
        rows.append(_row(bench, "chain", _difference(timer(whole), timer(without)), device, commit))
    return rows


def _around(bench: Bench, benches: Sequence[Bench]) -> tuple[list[Bench], list[Bench]]:
    if bench.chain is None:
        return [], []
    chain = [other for other in benches if other.chain == bench.chain]
    at = chain.index(bench)
    return chain[:at], chain[at + 1 :]


def _difference(whole: Sequence[float], without: Sequence[float]) -> list[float]:
    base = statistics.median(without)
    return [(us - base) / COPIES for us in whole]


def _row(bench: Bench, condition: str, times: Sequence[float], device: Device, commit: str) -> Row:
    us, floor = statistics.median(times), device.floor_us(bench)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Row(
        op=bench.op,
        shape=bench.shape,
        condition=condition,
        us=round(us, 2),
        low_us=round(deciles[0], 2),
        high_us=round(deciles[-1], 2),
        floor_us=round(floor, 2),
        fraction=round(floor / us, 3) if us > 0 else float("nan"),
        copies=COPIES,
        rotated_bytes=COPIES * bench.bytes,
        device=device.name,
        commit=commit,
        conditions=f"graph replay, median of {len(times)}; L2 {device.l2 >> 20} MiB; floor: {device.source}",
    )


def _neighbours(device: Device, target: torch.device) -> tuple[Launch, Launch, Launch]:
    """Return a copy larger than L2, a product [16, 1024] x [1024, 4096] and a norm of its result."""
    source = torch.ones(device.l2, dtype=torch.uint8, device=target)  # reads one L2, writes another
    sink = torch.empty_like(source)
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device=target)
    weight = torch.randn(1024, 4096, dtype=torch.bfloat16, device=target)
    y = torch.empty(16, 4096, dtype=torch.bfloat16, device=target)
    normed = torch.empty(16, dtype=torch.float32, device=target)
    return (
        lambda: sink.copy_(source),
        lambda: torch.matmul(x, weight, out=y),
        lambda: torch.linalg.vector_norm(y, dim=1, dtype=torch.float32, out=normed),
    )


def graph_timer(launches: Sequence[Launch], *, replays: int = REPLAYS) -> list[float]:
    """Return the microseconds that one pass over `launches` takes, once for each replay of a graph of many passes."""
    passes = -(-LAUNCHES // len(launches))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for launch in launches:
                launch()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for _ in range(10):
        graph.replay()
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e3 / passes for begin, end in marks]
    graph.reset()
    return times


def describe(target: torch.device) -> Device:
    """Return the device's ceilings; one that is not in the table is measured with a copy and a product."""
    properties = torch.cuda.get_device_properties(target)
    l2 = int(properties.L2_cache_size)
    for name, (bandwidth, bf16, source) in _CEILINGS.items():
        if properties.name.startswith(name):
            return Device(properties.name, bandwidth, bf16, l2, source)
    big = torch.empty(1 << 30, dtype=torch.uint8, device=target)
    other = torch.empty_like(big)
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device=target) for _ in range(2))
    copy_us = statistics.median(graph_timer([lambda: other.copy_(big)], replays=5))
    product_us = statistics.median(graph_timer([lambda: a @ b], replays=5))
    return Device(properties.name, (2 << 30) / copy_us * 1e6, 2 * 4096**3 / product_us * 1e6, l2, "measured just now")


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


def _warm_clocks(target: torch.device) -> None:
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=target)
    for _ in range(500):
        a @ a
    torch.cuda.synchronize()


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
            *(f"{by['alone'].fraction:.0%}", f"{by['alone'].rotated_bytes / 1e6:.1f}"),
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
        rows = [[b.op, b.shape, b.chain or "-", f"{b.bytes:,}", f"{b.flops:,}"] for b in selected]
        print(format_table(["op", "shape", "chain", "bytes", "flops"], rows, left=3))
        return 0
    if not torch.cuda.is_available():
        print(
            f"{prog}: no CUDA device here (torch {torch.__version__}); --list shows what it would do", file=sys.stderr
        )
        return 1
    target = torch.device("cuda", torch.cuda.current_device())
    _warm_clocks(target)
    device, commit = describe(target), current_commit()
    print(f"{device.name}, L2 {device.l2 >> 20} MiB, floors at {device.bandwidth / 1e12:.2f} TB/s and "
          f"{device.bf16 / 1e12:.0f} TFLOP/s ({device.source}); commit {commit}", flush=True)  # fmt: skip
    rows: list[Row] = []
    failed = 0
    for bench in selected:
        try:
            rows += measure(benches, [bench], device, target, graph_timer, commit)
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
