"""What the files beside this one share: their cases, which are no package, and a run of all from a command line."""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

KERNEL_TESTS = Path(__file__).resolve().parent.parent / "kernels"
Job = tuple[str, Callable[[], str]]  # a name, and what returns a fault, "" for none


def load(name: str) -> ModuleType:
    """Import a file of tests/kernels, once, under its own name."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, KERNEL_TESTS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def main(about: str, op: str, jobs_of: Callable[..., list[Job]], *, jobs: int = 12) -> int:
    """Run jobs_of(device, small=...), a row for each; return 1 if one has a fault.

    about: for --help.   jobs: processes, since most of the time goes into compiling, one kernel at a time in each.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--jobs", type=int, default=jobs, help="processes, default: %(default)s")
    args = parser.parse_args()
    from kernels.triton_env import INTERPRETED

    if INTERPRETED:
        load("interp").repair()
    found = jobs_of(args.device, small=args.small)
    faults = 0
    with _pool(1 if INTERPRETED else args.jobs) as pool:
        for (name, _), fault in zip(found, pool.map(_run, [job for _, job in found]), strict=True):
            print(f"{fault or 'ok':<6} {op} {name}", flush=True)
            faults += bool(fault)
    print(f"{len(found)} cases, {faults} failed")
    return 1 if faults else 0


def _run(job: Callable[[], str]) -> str:
    try:
        return job()
    except Exception as error:  # a case that can't run has failed; the others go on
        return f"{type(error).__name__}: {error}"


def _pool(jobs: int) -> concurrent.futures.Executor:
    if jobs == 1:
        return concurrent.futures.ThreadPoolExecutor(1)
    return concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
