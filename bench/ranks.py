"""Groups of ranks for measurements: a process for each, all in step; what the first one returns is the result.

Each joins as a rank of a worker does (engine/parallel.py), on the GPU of its number or over gloo. Nobody serves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.config import AllReduce
from engine.runner import DTYPES

if TYPE_CHECKING:
    from engine.parallel import Rank

_CAUSE_WITHIN_S = 5.0  # who merely lost the others says so first, sometimes
_END_WITHIN_S = 20.0


class RanksFailed(RuntimeError):
    """A rank has failed; the text says which, and why."""


class _Failure(NamedTuple):
    kind: str
    text: str


def run_in_ranks(
    count: int,
    work: Callable[..., Any],
    *args: Any,
    device: str,
    dtype: str,
    threads: int = 1,
    all_reduce: AllReduce = "auto",
) -> Any:
    """Call work(group, *args) in `count` processes; return what rank 0 returned. Raises RanksFailed.

    work: of a module, and so are its arguments and result: they are pickled.   dtype: of sums.   all_reduce: how they
    go on GPUs.
    """
    if device == "cuda" and torch.cuda.device_count() < count:
        raise RanksFailed(f"ranks {count}: torch finds {torch.cuda.device_count()} GPUs here; take fewer ranks")
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: dict[Any, int] = {}
    with tempfile.TemporaryDirectory(prefix="isthmus-ranks-") as run_dir:
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                place = (Path(run_dir), rank, count, device, dtype, threads, all_reduce)
                processes.append(context.Process(target=_rank, args=(theirs, place, work, args), name=f"rank {rank}"))
                processes[-1].start()
                theirs.close()  # else nobody would see its end
                pipes[ours] = rank
            result = _await(pipes)
            for process in processes:
                process.join(_END_WITHIN_S)
            return result
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()  # on a GPU it may wait for ever for one that has failed
                process.join()


def _await(pipes: dict[Any, int]) -> Any:
    found: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    until = float("inf")
    while pipes and time.monotonic() < until:
        for pipe in wait(list(pipes), timeout=0.5):
            rank = pipes.pop(pipe)
            assert isinstance(pipe, Connection)
            try:
                found[rank] = pipe.recv()
            except EOFError:
                found[rank] = _Failure("ended", "it ended without a word: killed, or out of memory")
            if isinstance(found[rank], _Failure):
                failures[rank] = found[rank]
                until = min(until, time.monotonic() + _CAUSE_WITHIN_S)
    if failures:
        rank, failure = min(failures.items(), key=lambda each: (each[1].kind == "ExchangeFailed", each[0]))
        raise RanksFailed(f"rank {rank}: {failure.text}")
    return found[0]


def _rank(
    pipe: Connection,
    place: tuple[Path, int, int, str, str, int, AllReduce],
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    from engine.parallel import join

    run_dir, rank, count, device, dtype, threads, all_reduce = place
    outcome: Any
    group: Rank | None = None
    try:
        torch.set_num_threads(threads)
        if device == "cuda":
            torch.cuda.set_device(rank)
        group = join(
            run_dir, rank=rank, count=count, generation=1, device=device, dtype=DTYPES[dtype], all_reduce=all_reduce
        )
        outcome = work(group, *args)
    except Exception as error:  # told to the parent, who raises it
        outcome = _Failure(type(error).__name__, f"{type(error).__name__}: {error}")
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome if rank == 0 or isinstance(outcome, _Failure) else None)
    if group is not None and not isinstance(outcome, _Failure):
        group.agree([False])  # nobody leaves while others exchange
        group.close()
