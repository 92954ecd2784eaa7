"""A small layout, pools of real memory, and pairs of transports that reach each other."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from kv_transfer.landing import Endpoint, Landing, PoolAddress
from kv_transfer.layout import KVLayout, make_group
from kv_transfer.local_transport import LocalRegistry, LocalTransport
from kv_transfer.plan import TransferPlan, plan_push
from kv_transfer.transport import KvTransport, Transfer, TransferStatus
from kv_transfer.warm import warm

from .pool_memory import Memory

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS, NUM_SLOTS = 24, 4
PATIENCE_S = 10.0
_names = itertools.count()

Pools = dict[str, NDArray[np.uint8]]


class Lane(NamedTuple):
    """A way between two processes: a transport, what UCX may use, and where the pools of both lie."""

    transport: str
    ucx_tls: str
    memory: Memory = "DRAM"

    @property
    def expected(self) -> set[str]:
        """What may carry bulk data then."""
        if self.memory == "VRAM":
            return {"cuda_ipc"} if self.transport == "nixl" else {"shm"}
        return {"nixl all": {"cma", "tcp"}, "host all": {"shm"}}.get(f"{self.transport} {self.ucx_tls}", {"tcp"})


@pytest.fixture(scope="session")
def layout() -> KVLayout:
    """Three block groups and a state group, of unequal unit sizes."""
    return KVLayout(
        block_tokens=8,
        groups=(
            make_group("csa_kv", "block", [("rows", 2, 4, "fp32", 24)]),
            make_group("csa_index", "block", [("keys", 2, 4, "fp32", 8)]),
            make_group("hca_kv", "block", [("rows", 1, 1, "bf16", 24)]),
            make_group("state", "slot", [("window", 3, 5, "fp32", 12)]),
        ),
    )


def make_pools(layout: KVLayout, seed: int | None) -> Pools:
    """Return one array per group and the scratch pool: random bytes, or all 0xEE if seed is None."""
    sizes = {g.name: g.unit_bytes * (NUM_BLOCKS if g.unit == "block" else NUM_SLOTS) for g in layout.groups}
    sizes["scratch"] = 4096
    if seed is None:
        return {name: np.full(size, 0xEE, dtype=np.uint8) for name, size in sizes.items()}
    draw = np.random.default_rng(seed)
    return {name: draw.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}


def addresses(layout: KVLayout, pools: Pools) -> list[PoolAddress]:
    units = {group.name: group.unit_bytes for group in layout.groups} | {"scratch": 4096}
    return [
        PoolAddress(name=name, base=array.ctypes.data, unit_bytes=units[name], num_units=array.size // units[name])
        for name, array in pools.items()
    ]


@dataclasses.dataclass
class Side:
    """One transport with its pools. notifications: everything that has come in so far."""

    transport: KvTransport
    pools: Pools
    endpoint: Endpoint
    notifications: list[tuple[str, bytes]] = dataclasses.field(default_factory=list)

    def poll(self) -> None:
        self.notifications += self.transport.poll()

    @property
    def messages(self) -> list[bytes]:
        return [message for _, message in self.notifications]


@dataclasses.dataclass
class Cluster:
    """Makes sides of one kind that can be connected. Nothing outlives the test."""

    kind: str
    layout: KVLayout
    make: Callable[[str], KvTransport]
    sides: list[Side] = dataclasses.field(default_factory=list)

    def side(self, seed: int | None, *, name: str = "", generation: int = 1, rank: int = 0) -> Side:
        transport = self.make(name or f"worker{next(_names)}")
        pools = make_pools(self.layout, seed)
        endpoint = transport.register(addresses(self.layout, pools), generation=generation, rank=rank)
        self.sides.append(Side(transport, pools, endpoint))
        return self.sides[-1]

    def pair(self) -> tuple[Side, Side]:
        """Return (prefill, decode), prefill linked to decode. Prefill's bytes are random, decode's are 0xEE."""
        prefill, decode = self.side(1), self.side(None)
        self.link(prefill, decode)
        return prefill, decode

    def link(self, writer: Side, reader: Side) -> None:
        """Connect and warm as a prefill rank does, through the reader's scratch pool."""
        writer.transport.connect(reader.endpoint)
        warm(writer.transport, reader.endpoint.agent, sleep=lambda seconds: reader.poll())
        reader.pools["scratch"][:] = 0xEE

    def settle(self, transfer: Transfer, writer: Side, *readers: Side) -> TransferStatus:
        """Drive both sides until the write has ended."""
        until = time.monotonic() + PATIENCE_S
        while (status := writer.transport.check(transfer)) is TransferStatus.PENDING:
            for reader in readers:
                reader.poll()
            assert time.monotonic() < until, "the write did not end"
        return status

    def await_messages(self, reader: Side, count: int) -> list[bytes]:
        """Drive everybody until `reader` has `count` messages."""
        until = time.monotonic() + PATIENCE_S
        while len(reader.notifications) < count:
            for side in self.sides:
                side.poll()
            assert time.monotonic() < until, f"{len(reader.notifications)} of {count} messages came"
        return reader.messages


def require_nixl() -> None:
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")):
        pytest.skip("needs the package nixl-cu13")


def require_transport(kind: str) -> Any:
    """Return the class of a transport between processes, or skip the test."""
    if kind == "host":
        from kv_transfer.host_transport import HostTransport

        return HostTransport
    if kind == "nixl":
        require_nixl()
        from kv_transfer.nixl_transport import NixlTransport

        return NixlTransport
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("needs the package ucxx-cu13: pip install '.[ucxx]'")
    from kv_transfer.ucxx_transport import UcxxTransport

    return UcxxTransport


def lanes(*wanted: Lane) -> list[Any]:
    """Return lanes as parameters of a test. Those between pools in VRAM are for machines with a GPU."""
    return [
        pytest.param(lane, id="-".join(lane), marks=[pytest.mark.gpu] if lane.memory == "VRAM" else [])
        for lane in wanted
    ]


def require_lane(lane: Lane) -> None:
    """Skip the test if this machine lacks what the lane needs."""
    require_transport(lane.transport)
    if lane.memory == "VRAM" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a CUDA device")


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a child process that finds what this one finds."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


def make_cluster(kind: str, layout: KVLayout) -> Iterator[Cluster]:
    if kind == "local":
        registry = LocalRegistry()
        cluster = Cluster(kind, layout, lambda name: LocalTransport(name, registry))
    else:
        cluster = Cluster(kind, layout, require_transport(kind))
    yield cluster
    for side in cluster.sides:
        side.transport.close()


@pytest.fixture(params=["local", "host", "nixl", "ucxx"])
def cluster(request: pytest.FixtureRequest, layout: KVLayout) -> Iterator[Cluster]:
    yield from make_cluster(request.param, layout)


@pytest.fixture
def host_cluster(layout: KVLayout) -> Iterator[Cluster]:
    yield from make_cluster("host", layout)


@pytest.fixture(params=["at_once", "late"])
def tight_cluster(
    request: pytest.FixtureRequest, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Ends of the host lane with two small buffers for each writer, and copies that are done at once or late."""
    from kv_transfer import host_transport

    from .host_ends import ODD_BYTES, LateCopier

    if request.param == "late":
        monkeypatch.setattr(host_transport, "make_copier", lambda memory, device: LateCopier())
    for cluster in make_cluster("host", layout):
        cluster.make = lambda name: host_transport.HostTransport(name, buffer_bytes=ODD_BYTES, num_buffers=2)
        yield cluster


@pytest.fixture
def local_cluster(layout: KVLayout) -> Iterator[Cluster]:
    yield from make_cluster("local", layout)


@pytest.fixture
def nixl_cluster(layout: KVLayout) -> Iterator[Cluster]:
    yield from make_cluster("nixl", layout)


def scattered_plan(layout: KVLayout, *, blocks: int = 6, seed: int = 0) -> tuple[TransferPlan, list[int], list[int]]:
    """Return a plan of blocks in random order plus state (slot 1 to slot 2), and the block lists of both sides."""
    draw = random.Random(seed)
    source, target = draw.sample(range(NUM_BLOCKS), blocks), draw.sample(range(NUM_BLOCKS), blocks)
    plan = plan_push(
        layout, source_blocks=source, target_blocks=target, first=0, last=blocks, source_slot=1, target_slot=2
    )
    return plan, source, target


def expected_after(plan: TransferPlan, source: Pools, before: Pools) -> Pools:
    """Return what the target pools must hold after the plan: every other byte as before."""
    after = {name: array.copy() for name, array in before.items()}
    for piece in plan.pieces:
        after[piece.pool][piece.target : piece.target + piece.num_bytes] = source[piece.pool][
            piece.source : piece.source + piece.num_bytes
        ]
    return after


def assert_same_bytes(pools: Pools, expected: Pools) -> None:
    for name, array in expected.items():
        assert np.array_equal(pools[name], array), f"pool {name} differs"


def make_landing(
    geometry: KVLayout, /, *agents: str, key: int = 1, blocks: tuple[int, ...] = (5, 6, 9), **fields: object
) -> Landing:
    """Return a landing for a prompt that fills `blocks` but for one token, in slot 2 unless told otherwise."""
    values: dict[str, object] = {
        "request_id": f"req-{key}",
        "key": key,
        "generation": 7,
        "num_tokens": len(blocks) * geometry.block_tokens - 1,
        "block_ids": blocks,
        "slot": 2,
        "layout": geometry.fingerprint(),
        "agents": agents,
        "leader_url": "http://decode",
    }
    return Landing(**(values | fields))  # type: ignore[arg-type]
