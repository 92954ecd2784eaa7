"""Peer: a process that receives what bench.push writes: pools of the same layout, and the thread of a decode rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch

from engine.arrivals import ArrivalThread
from engine.cache import KVCache
from kv_transfer.checksum import units_checksum
from kv_transfer.landing import Endpoint
from kv_transfer.layout import KVLayout
from kv_transfer.transports import make_transport

GENERATION = 2
_PATIENCE_S = 120.0


class PushFailed(RuntimeError):
    """A push failed, or its receiver did; the text says why."""


class Pools(NamedTuple):
    """What the receiver allocates. device: "cpu", "cuda:1"."""

    layout: KVLayout
    num_blocks: int
    num_slots: int
    device: str
    transport: str


class Peer:
    """The receiver, started. endpoint: where to write."""

    def __init__(self, pools: Pools) -> None:
        """Raises PushFailed."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, pools), name="receiver", daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint: Endpoint = self._ask(None)

    def checksums(self, blocks: Sequence[int], slot: int) -> dict[str, int]:
        """Return the checksum of each group of what has landed there. Raises PushFailed."""
        found: dict[str, int] = self._ask((list(blocks), slot))
        return found

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, asked: Any) -> Any:
        with contextlib.suppress(EOFError, OSError):
            if asked is not None:
                self._pipe.send(asked)
            if self._pipe.poll(_PATIENCE_S):
                answer = self._pipe.recv()
                if isinstance(answer, str):
                    raise PushFailed(f"receiver: {answer}")
                return answer
        raise PushFailed(f"receiver: no answer within {_PATIENCE_S:.0f} s, or it has ended")


def checksums(cache: KVCache, blocks: Sequence[int], slot: int) -> dict[str, int]:
    """Return the checksum of each group of a prompt's units, in its order."""
    return {
        group.name: units_checksum(cache.pools[group.name], list(blocks) if group.unit == "block" else [slot])
        for group in cache.layout.groups
    }


def memory_of(device: str) -> Literal["DRAM", "VRAM"]:
    return "DRAM" if device == "cpu" else "VRAM"


def _receive(pipe: Connection, pools: Pools) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the pipe
    torch.set_num_threads(1)
    device = torch.device(pools.device)
    try:
        if device.type == "cuda":
            if (device.index or 0) >= torch.cuda.device_count():
                raise ValueError(
                    f"GPU {device.index}: torch finds {torch.cuda.device_count()} here; lower --peer-device"
                )
            torch.cuda.set_device(device)
        cache = KVCache(pools.layout, pools.num_blocks, pools.num_slots, device)
        arrivals = ArrivalThread(
            lambda: make_transport(
                pools.transport, "push-target", memory=memory_of(pools.device), device=device.index or 0
            ),
            cache.pool_addresses(),
            rank=0,
            generation=GENERATION,
            emit=lambda message: None,
            on_failed=lambda reason: None,
        )
        endpoint = arrivals.start()
        arrivals.hint(1)  # looks often, as with a landing open
    except Exception as error:  # told to the parent, who raises it
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(endpoint)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            blocks, slot = pipe.recv()
            pipe.send(checksums(cache, blocks, slot))
    arrivals.stop()
