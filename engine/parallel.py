"""Groups of rank processes that compute one model: how they find each other, and what they exchange.

    join     every rank of a group, at the same time: meets the others in a file of the group's run directory
    gloo     on the CPU: sums and gathers through loopback
    NCCL     on GPUs: device_group.py, which adds the one-shot sum through peers' memory

A group lives on one host and dies as one: who loses the others raises ExchangeFailed, which its leader takes for the
consequence that it is, and looks for the cause. Waiting has limits everywhere but on a GPU, where a rank's leader and
its own watch (rank.py) end what hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from engine.config import AllReduce
from engine.model.group import Alone, Group
from router.protocol import ExchangeInfo

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0
"""For all ranks to start and import torch on a busy machine; a rank that fails to is noticed by the leader at once."""
STEP_TIMEOUT_S = 300.0
"""For the slowest rank to reach the same exchange: it may be computing a long prompt on a busy CPU."""


class ExchangeFailed(Exception):
    """The other ranks of the group are lost, or did not come."""


class Rank(Group, Protocol):
    """What a rank process holds: the group that the model asks, and how it exchanges."""

    @property
    def exchange(self) -> ExchangeInfo | None: ...

    def close(self) -> None:
        """Give back what exchanging takes. Nobody exchanges any more."""


class Single(Alone):
    """The only rank of its group."""

    exchange: ExchangeInfo | None = None

    def close(self) -> None:
        pass


def join(
    run_dir: Path,
    *,
    rank: int,
    count: int,
    generation: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    all_reduce: AllReduce = "auto",
    progress: Callable[[str], None] = log.info,
    timeout_s: float = JOIN_TIMEOUT_S,
) -> Rank:
    """Return the group of `count` ranks, once all are there. Raises ExchangeFailed if they do not come in time, and
    NoPeerMemory for one-shot sums that are asked for and can't be.

    run_dir: of this life of the group, on the ranks' host; generation tells apart lives that share one.   dtype: of
    sums on a GPU, and all_reduce how they go there.   progress: gets a line of text now and then.
    """
    if count == 1:
        return Single()
    progress(f"rank {rank} of {count} waits for the others")
    # Through a file: needs no port, and who may read the run directory may do worse than join.
    path = run_dir / f"exchange-{generation}"
    store = dist.FileStore(str(path), count)  # type: ignore[attr-defined]
    host = HostGroup(store, rank=rank, count=count, timeout_s=timeout_s)
    if device == "cpu":
        return host
    from engine.device_group import join_devices

    return join_devices(host, store, dtype=dtype, all_reduce=all_reduce, progress=progress)


class HostGroup:
    """Ranks that exchange host memory, by gloo over loopback.

    store: fresh, and shared by all.   timeout_s: until all have come; then STEP_TIMEOUT_S for each exchange. Raises
    ExchangeFailed.
    """

    def __init__(self, store: Any, *, rank: int, count: int, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        self.index, self.count = rank, count
        self.exchange: ExchangeInfo | None = ExchangeInfo(backend="gloo")
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            store.set_timeout(timedelta(seconds=timeout_s))
            store.set(f"arrived/{rank}", "1")
            store.wait([f"arrived/{other}" for other in range(count)])
            named = dist.PrefixStore("gloo", store)  # type: ignore[attr-defined]
            self._gloo: Any = dist.ProcessGroupGloo(named, rank, count, options)
        except RuntimeError as error:
            raise ExchangeFailed(
                f"rank {rank} of {count} found not all others within {timeout_s:.0f} s ({first_line(error)}): one has "
                "not started or has ended, and its log says why"
            ) from error
        self._gloo._set_default_timeout(timedelta(seconds=STEP_TIMEOUT_S))

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():
            self._do(lambda: self._gloo.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.count)]
        if x.numel():
            self._do(lambda: self._gloo.allgather([parts], [x.contiguous()]))
        return torch.cat(parts, -1)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        raised = torch.tensor(list(flags), dtype=torch.int32)
        return [count > 0 for count in self.all_reduce(raised).tolist()]

    def close(self) -> None:
        """Close the connections and end the threads that look after them; the others lose this rank."""
        self._gloo = None

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return of each value the largest that any rank has given, so that all decide alike."""
        given = torch.tensor(list(values), dtype=torch.float64)
        self._do(lambda: self._gloo.allreduce([given], dist.ReduceOp.MAX))
        found: list[float] = given.tolist()
        return found

    def every(self, value: bytes) -> list[bytes]:
        """Return what each rank has given, by rank; all of one length."""
        given = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        parts = [torch.empty_like(given) for _ in range(self.count)]
        self._do(lambda: self._gloo.allgather([parts], [given]))
        return [bytes(part.tolist()) for part in parts]

    def _do(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise ExchangeFailed(
                f"rank {self.index} of {self.count} lost the others ({first_line(error)}): one of them has ended, or "
                f"came {STEP_TIMEOUT_S:.0f} s late; its log says why"
            ) from error


def first_line(error: BaseException) -> str:
    """Return what an error of the library says, without the stack that it brings along."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
