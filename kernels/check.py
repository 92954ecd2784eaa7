"""The offline gate: every tile of every kernel that we ship, compiled for its targets; needs no GPU.

    isthmus kernels check [--arch sm_120] [--kernel NAME] [--json FILE] [--no-cache] [--dump FOLDER]
    python -m kernels.check ...

Each module of this package that has `variants(arch) -> list[Variant]` takes part. Refused are spills, tensor
instructions that are missing or were not declared, products that are left to run while their operands' registers are
written anew, more shared memory than a block has, and a compilation that takes more than 30 s of processor time.
Results are kept by a hash of the kernel's source, its variant and the compiler.
Exit code: 0 well, 1 something may not ship, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import triton

import kernels
from kernels import offline
from kernels.offline import Report
from kernels.table import counted, format_table
from kernels.tiles import Variant
from kernels.triton_env import ARCHES, INTERPRETED

LIMIT_S = 30.0
STALLED = 10  # times the limit, on the clock: nobody is computing any more
WORKERS = 2

_NOTE = """\
insns: instructions in the binary.  loop: of the longest loop with tensor instructions.  ldg.1, ldg.16: global loads of
1 and of 16 bytes a lane.  bars: barriers.  insns/B: lane instructions per byte of device memory.  insns/w: per packed
weight, of the innermost loop.  res: blocks that a multiprocessor holds at once."""


def shipped(arch: str) -> list[Variant]:
    """Return the variants for `arch` of all modules of this package."""
    return _collect("variants", arch)


def rare(arch: str) -> list[Variant]:
    """Return those that a run of the gate leaves out: `rare_variants` of modules, compiled by a long test."""
    return _collect("rare_variants", arch)


def _collect(name: str, arch: str) -> list[Variant]:
    names = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__))
    tools = ("check", "bench", "instructions")
    modules = [importlib.import_module(f"kernels.{module}") for module in names if module not in tools]
    return [variant for module in modules if hasattr(module, name) for variant in getattr(module, name)(arch)]


def check(
    jobs: Sequence[tuple[Variant, str]], *, cache: Path | None, limit_s: float = LIMIT_S, dump: Path | None = None
) -> list[Report]:
    """Return a report for each (variant, arch), in that order. cache: folder of earlier reports; None compiles all."""
    reports: list[Report | None] = [None] * len(jobs)
    keys = [_key(variant, arch) for variant, arch in jobs]
    if cache is not None and dump is None:
        reports = [_recall(cache / f"{key}.json") for key in keys]
    missing = [at for at, report in enumerate(reports) if report is None]
    # Others may be at it as well, as tests beside the gate are: each in an order of its own, and what they have done
    # by the time it is due is taken from them.
    random.Random(os.getpid()).shuffle(missing)

    def known(at: int) -> Report | None:
        return None if cache is None or dump is not None else _recall(cache / f"{keys[at]}.json")

    for at, report in _compile_all([(at, *jobs[at]) for at in missing], known, limit_s=limit_s, dump=dump):
        reports[at] = report
        if cache is not None and report.registers and not report.cached:  # a crash or a timeout is tried again
            try:
                _remember(cache / f"{keys[at]}.json", report)
            except OSError as error:
                print(f"reports are not kept: {error}; XDG_CACHE_HOME names another folder", file=sys.stderr)
                cache = None
    return [report for report in reports if report is not None]


def _compile_all(
    jobs: Sequence[tuple[int, Variant, str]],
    known: Callable[[int], Report | None],
    *,
    limit_s: float,
    dump: Path | None,
) -> Iterator[tuple[int, Report]]:
    """Compile each job in a process of its own, so that one can be ended, and crash, without the others.

    known: asked for a report just before a job begins.
    """
    context = multiprocessing.get_context("fork")  # the kernels are imported already, and need not be pickled
    if jobs and hasattr(triton.runtime.cache, "triton_key"):
        triton.runtime.cache.triton_key()  # hashes all of Triton: half a second here instead of in every child
    waiting, running = list(reversed(jobs)), dict[Connection, tuple[Any, float, tuple[int, Variant, str]]]()
    try:
        while waiting or running:
            while waiting and len(running) < WORKERS:
                job = waiting.pop()
                if (report := known(job[0])) is not None:
                    yield job[0], report
                    continue
                mine, theirs = context.Pipe(duplex=False)
                worker = context.Process(target=_work, args=(theirs, job[1], job[2], dump, limit_s), daemon=True)
                with warnings.catch_warnings():
                    # a caller with threads is warned of forking; the child takes none of their locks, it compiles
                    warnings.simplefilter("ignore", DeprecationWarning)
                    worker.start()
                theirs.close()
                running[mine] = (worker, time.monotonic() + STALLED * limit_s, job)
            if not running:
                break
            soonest = min(deadline for _, deadline, _ in running.values())
            for ready in wait(list(running), timeout=max(0.0, soonest - time.monotonic())):
                assert isinstance(ready, Connection)
                worker, _, (at, variant, arch) = running.pop(ready)
                yield at, _received(ready, worker, variant, arch, limit_s)
            for late in [one for one, (_, deadline, _) in running.items() if deadline <= time.monotonic()]:
                worker, _, (at, variant, arch) = running.pop(late)
                _end(worker)
                yield at, _failed(variant, arch, _too_slow(limit_s))
    finally:
        for worker, _, _ in running.values():
            _end(worker)


def _work(out: Connection, variant: Variant, arch: str, dump: Path | None, limit_s: float) -> None:
    os.setpgrp()  # ptxas is a child of this process and must end with it
    seconds = max(1, math.ceil(limit_s))  # of processor time, so that a busy machine refuses nothing; ptxas inherits it
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with tempfile.TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 2)  # LLVM prints what failed, with the whole module, straight to stderr
        try:
            out.send(offline.compile_variant(variant, arch, dump=dump))
        except Exception as error:
            said.seek(0)
            lines = [line.strip() for line in said if "error:" in line][:3]
            own = "".join(traceback.format_exception_only(error)).strip()
            fault = "does not compile: " + " | ".join([*lines, own])[:2000]
            tools = resource.getrusage(resource.RUSAGE_CHILDREN)
            is_late = tools.ru_utime + tools.ru_stime >= 0.9 * seconds
            out.send(_failed(variant, arch, _too_slow(limit_s) if is_late else fault))


def _received(source: Connection, worker: Any, variant: Variant, arch: str, limit_s: float) -> Report:
    try:
        report: Report = source.recv()
    except EOFError:
        worker.join()
        if worker.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):  # SIGKILL at the hard limit
            return _failed(variant, arch, _too_slow(limit_s))
        return _failed(variant, arch, f"the compiler crashed (exit code {worker.exitcode}): try a smaller tile")
    worker.join()
    return report


def _end(worker: Any) -> None:
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not called setpgrp yet
        worker.kill()
    worker.join()


def _too_slow(limit_s: float) -> str:
    return f"not compiled in {limit_s:g} s of processor time: take a smaller tile"


def _failed(variant: Variant, arch: str, fault: str) -> Report:
    return Report(variant.op, variant.kernel.__name__, offline.tile_name(variant), arch, faults=(fault,))


def _key(variant: Variant, arch: str) -> str:
    plain = {name: value for name, value in vars(variant).items() if name != "kernel"}
    plain = {name: dict(value) if hasattr(value, "items") else value for name, value in plain.items()}
    gate = [
        Path(offline.__file__).read_bytes(),
        triton.__version__,
        arch,
        variant.kernel.cache_key,
        sorted(plain.items()),
    ]
    return hashlib.sha256(repr(gate).encode()).hexdigest()


def _recall(path: Path) -> Report | None:
    try:
        found = json.loads(path.read_text())
        return Report(**{**found, "faults": tuple(found["faults"]), "cached": True})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remember(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(dataclasses.asdict(report), file)
    os.replace(file.name, path)


def cache_folder() -> Path:
    """Return where reports are kept: $XDG_CACHE_HOME/isthmus/kernels, or ~/.cache/isthmus/kernels."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "isthmus" / "kernels"


def _distinct_tiles(reports: Sequence[Report]) -> list[str]:
    """Return each report's tile without the constants that all variants of its operation share."""
    parts = [report.tile.split(",") for report in reports]
    groups: dict[tuple[str, str], list[set[str]]] = {}
    for report, own in zip(reports, parts, strict=True):
        groups.setdefault((report.op, report.kernel), []).append(set(own))
    shared = {name: set.intersection(*tiles) for name, tiles in groups.items()}
    return [
        ",".join([*(part for part in own[:-1] if part not in shared[report.op, report.kernel]), own[-1]])
        for report, own in zip(reports, parts, strict=True)
    ]


def format_reports(reports: Sequence[Report]) -> str:
    """Return the table of what was compiled, and below it every fault."""
    head = [
        "op",
        "kernel",
        "tile",
        "target",
        "regs",
        "spill B",
        "smem B",
        "res",
        "insns",
        "loop",
        "insns/B",
        "insns/w",
        "bars",
        "ldg.1",
    ]
    head += ["ldg.16", "s", "tensor"]
    rows = [
        [
            *(report.op, report.kernel, tile, report.arch),
            *(str(report.registers), str(report.spill), f"{report.smem:,}"),
            *(str(report.resident), str(report.instructions), str(report.loop)),
            "-" if report.per_byte is None else f"{report.per_byte:.2f}",
            "-" if report.per_weight is None else f"{report.per_weight:.2f}",
            *(str(report.barriers), str(report.narrow), str(report.wide)),
            "kept" if report.cached else f"{report.seconds:.1f}",
            "FAIL" if report.faults else ", ".join(f"{op} x{n}" for op, n in report.tensor.items()) or "none",
        ]
        for report, tile in zip(reports, _distinct_tiles(reports), strict=True)
    ]
    failed = [f"FAIL {r.op}: {r.kernel} [{r.tile}] on {r.arch}: {fault}" for r in reports for fault in r.faults]
    return "\n".join([format_table(head, rows, left=4), "", _NOTE, *failed])


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m kernels.check") -> int:
    """Run the gate; see the module."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Compile every shipped kernel for its targets, without a GPU."
    )
    parser.add_argument("--arch", action="append", choices=ARCHES, help="only this target; may be repeated")
    parser.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="only operations and kernels whose name has it; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--no-cache", action="store_true", help="compile what an earlier run has compiled, too")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write ptx, ttgir and sass there; compiles all")
    args = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: the interpreter has nothing to compile; unset it")
    begin = time.monotonic()
    jobs = [(variant, arch) for arch in args.arch or ARCHES for variant in shipped(arch)]
    known = [(job, f"{job[0].op} {job[0].kernel.__name__}") for job in jobs]
    unknown = [wanted for wanted in args.kernel or () if not any(wanted in name for _, name in known)]
    if unknown:
        parser.error(
            f"no kernel or operation {', '.join(unknown)}; there are: {', '.join({name for _, name in known})}"
        )
    jobs = [job for job, name in known if not args.kernel or any(wanted in name for wanted in args.kernel)]
    reports = check(jobs, cache=None if args.no_cache else cache_folder(), dump=args.dump)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n")
    failed = sum(bool(report.faults) for report in reports)
    if reports:
        print(format_reports(reports))
    print(
        f"{counted(len(reports), 'compilation')}, {sum(r.cached for r in reports)} known from before, "
        f"{failed} refused, {time.monotonic() - begin:.1f} s, Triton {triton.__version__}"
    )
    return 1 if failed or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
