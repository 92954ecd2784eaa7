"""What NixlTransport asks of a GPU, with an agent and a device that only note what is asked of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer import nixl_transport
from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferStatus

PEER = Endpoint(
    transport="nixl",
    agent="decode.r0.g1",
    generation=1,
    rank=0,
    metadata=b"decode.r0.g1",
    pools=(PoolAddress(name="kv", base=1 << 20, unit_bytes=4096, num_units=1),),
    memory="VRAM",
)


class Agent:
    """Its one write is under way, and fails when asked for."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def create_backend(self, *words: Any) -> None:
        self._calls.append("backend")

    def register_memory(self, rows: Any, memory: str) -> str:
        return memory

    def get_agent_metadata(self) -> bytes:
        return b"prefill.r0.g1"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self._calls.append("removed")

    def get_xfer_descs(self, rows: Any, memory: str) -> Any:
        return rows

    def initialize_xfer(self, *words: Any) -> Any:
        return SimpleNamespace(release=lambda: self._calls.append("released"))

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        raise RuntimeError("nixlRemoteDisconnectError")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._calls.append("progress")
        return {}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is asked of agent and device, in order."""
    torch = pytest.importorskip("torch")
    calls: list[str] = []
    api = SimpleNamespace(nixl_agent=lambda *words: Agent(calls), nixl_agent_config=lambda **words: None)
    monkeypatch.setattr(nixl_transport, "load_nixl", lambda: api)
    stream = SimpleNamespace(synchronize=lambda: calls.append("context"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"device {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"synchronized {device}"))
    return calls


def register(memory: Any) -> NixlTransport:
    transport = NixlTransport("prefill", memory=memory, device=1)
    transport.register([PoolAddress(name="kv", base=0, unit_bytes=4096, num_units=1)], generation=1, rank=0)
    return transport


def test_the_thread_has_the_context_of_its_device_before_ucx_starts(calls: list[str]) -> None:
    register("VRAM")
    assert calls == ["device 1", "context", "backend"]


@pytest.mark.parametrize(("memory", "waits"), [("VRAM", ["synchronized 1"]), ("DRAM", [])])
def test_a_failure_is_told_after_the_device_has_made_every_copy(
    calls: list[str], memory: str, waits: list[str]
) -> None:
    transport = register(memory)
    transport.connect(PEER)
    transfer = transport.write(PEER.agent, TransferPlan((Piece("kv", 0, 0, 4096),)))
    calls.clear()
    assert transport.check(transfer) is TransferStatus.FAILED
    assert calls == ["progress", *waits] * 4 + ["released", "removed"]
