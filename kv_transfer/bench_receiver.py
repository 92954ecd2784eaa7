"""The receiving process of the transfer benchmark: pools, a transport that it polls, and what has landed in them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import select
import signal
import time
from multiprocessing.connection import Connection
from typing import Literal

import torch

from kv_transfer.bench_layouts import LAYOUTS
from kv_transfer.bench_pools import BenchPools, Units
from kv_transfer.transport import KvTransport, TransferError
from kv_transfer.transports import make_transport

NUM_SLOTS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What both processes have to agree on. nap_us: of the receiver between two polls, 0: none.

    device_ids: GPU of the source and of the target.   num_blocks: of a pool.   lengths: tokens.
    """

    transport: str
    device: Literal["cpu", "cuda"]
    device_ids: tuple[int, int]
    layout: str
    lengths: tuple[int, ...]
    chunk_tokens: int
    repetitions: int
    nap_us: float
    seed: int

    @property
    def num_blocks(self) -> int:
        """Of a pool: an eighth more than the longest prompt takes, so that a random order is of a pool in use."""
        needed = LAYOUTS[self.layout]().num_blocks_for(max(self.lengths))
        return needed + max(2, needed // 8)

    @property
    def one_piece_bytes(self) -> int:
        layout = LAYOUTS[self.layout]()
        return layout.num_blocks_for(max(self.lengths)) * layout.block_bytes + layout.slot_bytes

    def pools(self, side: Literal[0, 1]) -> BenchPools:
        """Return pools of the source (0) or the target (1), on its device. Raises TransferError if they don't fit."""
        device = torch.device("cpu") if self.device == "cpu" else torch.device("cuda", self.device_ids[side])
        if device.type == "cuda" and device.index >= torch.cuda.device_count():
            raise TransferError(f"no GPU number {device.index} here (torch {torch.__version__}): use --device cpu")
        torch.set_num_threads(1)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # UCX looks for the context of the thread that calls it
        try:
            return BenchPools(
                LAYOUTS[self.layout](),
                num_blocks=self.num_blocks,
                num_slots=NUM_SLOTS,
                one_piece_bytes=self.one_piece_bytes,
                device=device,
            )
        except RuntimeError as error:
            raise TransferError(f"no memory for the pools, take shorter --lengths: {error}") from error

    def open_transport(self, side: Literal[0, 1]) -> KvTransport:
        memory: Literal["DRAM", "VRAM"] = "DRAM" if self.device == "cpu" else "VRAM"
        worker = ("bench-source", "bench-target")[side]
        return make_transport(self.transport, worker, memory=memory, device=self.device_ids[side])


@dataclasses.dataclass(frozen=True, slots=True)
class Erase:
    """Fill these units with 0xFF; the answer is None."""

    units: Units


@dataclasses.dataclass(frozen=True, slots=True)
class Collect:
    """Wait for a notification; the answer is Landed, with the checksums of these units."""

    units: Units


@dataclasses.dataclass(frozen=True, slots=True)
class Landed:
    """seen_s: time.monotonic() when `poll` had returned the message."""

    message: bytes
    seen_s: float
    checksums: dict[str, int]


def receive(setting: Setting, orders: Connection) -> None:
    """Run until the other end of `orders` is closed. Sends first an Endpoint, or the text of what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its children itself
    try:
        pools = setting.pools(1)
        pools.erase()
        transport = setting.open_transport(1)
        endpoint = transport.register(pools.addresses, generation=1, rank=0)
    except TransferError as error:
        orders.send(str(error))
        return
    gc.disable()  # a pause here would count as the lane's
    with contextlib.suppress(EOFError, ConnectionError):
        orders.send(endpoint)
        _serve(pools, transport, orders, nap_s=setting.nap_us / 1e6)
    transport.close()


def _serve(pools: BenchPools, transport: KvTransport, orders: Connection, *, nap_s: float) -> None:
    arrived: list[tuple[bytes, float]] = []
    awaited: Units | None = None
    while True:
        for _, message in transport.poll():
            arrived.append((message, time.monotonic()))
        if awaited is not None and arrived:
            message, seen_s = arrived.pop(0)
            orders.send(Landed(message, seen_s, pools.checksums(awaited)))
            awaited = None
        if select.select([orders], [], [], nap_s)[0]:
            match orders.recv():
                case Erase(units):
                    pools.erase(units)
                    orders.send(None)
                case Collect(units):
                    awaited = units
