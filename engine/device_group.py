"""DeviceGroup: ranks with a GPU each exchange through NCCL and, small sums, through each other's memory.

What goes which way is measured when the group is joined, since it depends on the machine (exchange_choice.py), and
kept in `exchange`, which the rank reports. All ranks decide alike: times are those of the slowest. If trial sums
through peers' memory are not exactly right, on any rank, no rank does such sums.

All calls but `agree` launch on the current stream and may be captured. NCCL reads its settings when a communicator is
made, so each of them has one of its own; those that are not chosen are given back.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from engine.config import AllReduce
from engine.exchange_choice import ONE_SHOT, SETTINGS, SIZES, Choice, choose, describe
from engine.parallel import STEP_TIMEOUT_S, ExchangeFailed, HostGroup, first_line
from engine.peer_memory import NoPeerMemory, PeerMemory, require_peer_access
from kernels import one_shot
from router.protocol import ExchangeInfo, ExchangeTiming

log = logging.getLogger(__name__)

_CALLS, _CALLS_OF_LARGE, _REPLAYS = 16, 4, 5
_LARGE = 2 << 20
_TRIED = (1, 1000, 4096, 70_000)  # values of trial sums
_ANOTHER = "another rank has no use of its peers' memory; its log says why"
_NOT_ASKED = "all_reduce is nccl"


class NcclComm:
    """One communicator with settings of its own. Raises ExchangeFailed."""

    def __init__(self, store: Any, name: str, settings: Mapping[str, str], *, rank: int, count: int) -> None:
        self.name = name
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
        prefix = dist.PrefixStore(f"nccl {name}", store)  # type: ignore[attr-defined]
        with _environment(settings):
            self._nccl: Any = dist.ProcessGroupNCCL(prefix, rank, count, options)
            self.all_reduce(torch.zeros(1, device="cuda"))  # connects
            torch.cuda.synchronize()

    def all_reduce(self, x: Tensor) -> None:
        """Sum x in place."""
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on this stream, without events to another
        self._do(lambda: self._nccl.allreduce([x], options))

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fill out [count, ..] with every rank's x."""
        options = AllgatherOptions()
        options.asyncOp = False
        self._do(lambda: self._nccl._allgather_base(out, x, options))

    def close(self) -> None:
        """Give it back, without a word to the others: they may be gone."""
        self._nccl.abort()

    def _do(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise ExchangeFailed(f"NCCL ({self.name}): {first_line(error)}") from error


class DeviceGroup:
    """Rank `host.index` of `host.count`, on the current GPU. See engine.model.group.Group."""

    def __init__(
        self,
        host: HostGroup,
        comms: Mapping[str, NcclComm],
        regions: one_shot.PeerRegions | None,
        choice: Choice,
        exchange: ExchangeInfo,
    ) -> None:
        self.index, self.count, self.exchange = host.index, host.count, exchange
        self._host, self._regions, self._choice = host, regions, choice
        self._small, self._large = comms[choice.small], comms[choice.large]

    def all_reduce(self, x: Tensor) -> Tensor:
        num_bytes = x.numel() * x.element_size()
        x = x.contiguous()
        if self._regions is not None and num_bytes <= self._choice.one_shot_bytes and x.dtype == self._regions.dtype:
            return one_shot.one_shot_sum(x, self._regions)
        if num_bytes:
            self._comm(num_bytes).all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        out = torch.empty((self.count, rows, columns), dtype=x.dtype, device=x.device)
        if x.numel():
            self._comm(out.numel() * out.element_size()).all_gather(out, x.contiguous())
        return out.transpose(0, 1).reshape(rows, self.count * columns)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        return self._host.agree(flags)

    def measure(self, sizes: Sequence[int], dtype: torch.dtype) -> dict[str, dict[int, float]]:
        """Return microseconds of a captured sum, on the slowest rank, by way and bytes. All ranks call it together.

        Ways: NCCL's settings that are kept, one-shot sums up to what they have room for, and "chosen", what
        `all_reduce` takes.
        """
        runs: dict[str, Callable[[Tensor], object]] = {
            comm.name: _in_place(comm) for comm in (self._small, self._large)
        }
        runs["chosen"] = self.all_reduce
        found = {way: _measure(self._host, run, sizes, dtype) for way, run in runs.items()}
        if self._regions is not None and self._regions.dtype == dtype:
            taken = [size for size in sizes if size <= one_shot.CAPACITY_BYTES]
            found[ONE_SHOT] = _measure(self._host, _through(self._regions), taken, dtype)
        return found

    def close(self) -> None:
        for comm in {self._small.name: self._small, self._large.name: self._large}.values():
            comm.close()

    def _comm(self, num_bytes: int) -> NcclComm:
        return self._large if num_bytes >= self._choice.large_bytes else self._small


def join_devices(
    host: HostGroup, store: Any, *, dtype: torch.dtype, all_reduce: AllReduce, progress: Callable[[str], None]
) -> DeviceGroup:
    """Return the group of ranks that have met, each on its current GPU, with the ways that were fastest, or asked for.

    dtype: of sums. Raises ExchangeFailed; NoPeerMemory for one-shot sums that are asked for and can't be.
    """
    # Multicast is a way of NVLink switches only, and what is measured elsewhere should tell of machines without.
    settings = {name: {"NCCL_NVLS_ENABLE": "0", **each} for name, each in _settings(os.environ).items()}
    comms: dict[str, NcclComm] = {}
    for name, each in settings.items():
        progress(f"NCCL, {name}")
        comms[name] = NcclComm(store, name, each, rank=host.index, count=host.count)
    regions, reason = (None, _NOT_ASKED) if all_reduce == "nccl" else _open_regions(host, dtype)
    if reason and all_reduce == "one-shot":
        if reason == _ANOTHER:
            raise ExchangeFailed(reason)
        raise NoPeerMemory(f"all_reduce = 'one-shot': {reason}; else take auto or nccl")
    if reason:
        log.log(logging.INFO if all_reduce == "nccl" else logging.WARNING, "no one-shot sums: %s", reason)
    progress("measuring how sums go over the ranks")
    timings = {name: _measure(host, _in_place(comm), SIZES, dtype) for name, comm in comms.items()}
    if regions is not None:
        taken = [size for size in SIZES if size <= one_shot.CAPACITY_BYTES]
        timings[ONE_SHOT] = _measure(host, _through(regions), taken, dtype)
    choice = choose(timings, asked=all_reduce)
    for name in set(comms) - {choice.small, choice.large}:
        comms.pop(name).close()
    listed = [
        ExchangeTiming(way=way, num_bytes=size, us=round(us, 2))
        for way, found in timings.items()
        for size, us in found.items()
    ]
    log.info("rank %d of %d: %s; measured %s", host.index, host.count, describe(choice), _table(listed))
    exchange = ExchangeInfo(
        backend="nccl",
        one_shot_bytes=choice.one_shot_bytes,
        one_shot=reason,
        small=choice.small,
        large=choice.large,
        large_bytes=choice.large_bytes,
        timings=listed,
    )
    return DeviceGroup(host, comms, regions, choice, exchange)


def _settings(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what is tried: all of SETTINGS, or what whoever starts the group has set already."""
    own = [name for name in ("NCCL_PROTO", "NCCL_ALGO") if environ.get(name)]
    return {", ".join(f"{name}={environ[name]}" for name in own): {}} if own else SETTINGS


def _open_regions(host: HostGroup, dtype: torch.dtype) -> tuple[one_shot.PeerRegions | None, str]:
    """Return regions that give right sums on all ranks, or None and why there are none."""
    regions, reason, handle, memory = None, "", bytes(64), None
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        require_peer_access(host.index, host.count, torch.cuda.can_device_access_peer)
        memory = PeerMemory(one_shot.region_bytes(host.count, dtype))
        handle = memory.handle()
    except NoPeerMemory as error:
        reason = str(error)
    handles = host.every(handle)
    if not _any_fails(host, reason):
        try:
            assert memory is not None
            addresses = [
                memory.address if rank == host.index else memory.map(each) for rank, each in enumerate(handles)
            ]
            regions = one_shot.PeerRegions(
                host.index,
                host.count,
                dtype,
                torch.tensor(addresses, dtype=torch.int64, device=device),
                torch.zeros(one_shot.num_programs(dtype), dtype=torch.int32, device=device),
                memory,
            )
            torch.cuda.synchronize()
        except NoPeerMemory as error:
            reason = str(error)
    # Nobody writes before all have mapped, and what is not right everywhere is done nowhere.
    if not _any_fails(host, reason) and regions is not None:
        reason = _trial_fault(host, regions, dtype)
    if _any_fails(host, reason):
        if memory is not None:
            memory.close()
        return None, reason or _ANOTHER
    return regions, ""


def _any_fails(host: HostGroup, reason: str) -> bool:
    return host.agree([bool(reason)])[0]


def _trial_fault(host: HostGroup, regions: one_shot.PeerRegions, dtype: torch.dtype) -> str:
    """Return how sums of known values come out wrong, "" if they don't: many in a row, and of changing sizes.

    All calls are made, whatever the first ones gave: other ranks make them, too.
    """
    faults = []
    for call in range(8 * len(_TRIED)):
        size = _TRIED[call % len(_TRIED)]
        at = torch.arange(size, device=regions.addresses.device)
        parts = [((at + 7 * call + 3 * rank) % 31).to(dtype) for rank in range(host.count)]
        wanted = one_shot.one_shot_sum_reference(parts)
        found = one_shot.one_shot_sum(parts[host.index], regions)
        if not torch.equal(found, wanted):
            wrong = int((found != wanted).sum())
            faults.append(
                f"trial sum {call} of {size} values has {wrong} wrong ones: peers' writes don't arrive in order"
            )
    return faults[0] if faults else ""


def _in_place(comm: NcclComm) -> Callable[[Tensor], object]:
    return comm.all_reduce


def _through(regions: one_shot.PeerRegions) -> Callable[[Tensor], object]:
    return lambda x: one_shot.one_shot_sum(x, regions)


def _measure(
    host: HostGroup, run: Callable[[Tensor], object], sizes: Sequence[int], dtype: torch.dtype
) -> dict[int, float]:
    """Return microseconds of one sum by bytes, on the slowest rank: of captured calls in a row, as steps have them."""
    found = []
    for size in sizes:
        x = torch.zeros(size // dtype.itemsize, dtype=dtype, device="cuda")
        calls = _CALLS if size < _LARGE else _CALLS_OF_LARGE
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(2):
                run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                run(x)
        best = float("inf")
        for _ in range(_REPLAYS):
            host.agree([False])  # together
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, 1000 * begin.elapsed_time(end) / calls)
        found.append(best)
    return dict(zip(sizes, host.largest(found), strict=True))


def _table(timings: Sequence[ExchangeTiming]) -> str:
    by_way: dict[str, list[str]] = {}
    for one in timings:
        by_way.setdefault(one.way, []).append(f"{one.num_bytes >> 10} KiB {one.us:.1f}")
    return "; ".join(f"{way}: {', '.join(each)} us" for way, each in by_way.items())


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Let NCCL find settings in the environment, the only place where it looks for them."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
