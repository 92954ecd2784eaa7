"""The host lane with pools in GPU memory at one end or both."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import pytest

from kv_transfer.host_transport import HostTransport
from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferStatus

from .conftest import PATIENCE_S

UNIT_BYTES, NUM_UNITS = 785_408, 40
Memory = Literal["DRAM", "VRAM"]


class End:
    """A transport with one pool, of random bytes or of zeros."""

    def __init__(self, torch: Any, memory: Memory, *, is_random: bool) -> None:
        device = "cuda:0" if memory == "VRAM" else "cpu"
        pool = torch.randint(0, 256, (UNIT_BYTES * NUM_UNITS,), dtype=torch.uint8)
        self.pool = (pool if is_random else torch.zeros_like(pool)).to(device)
        if memory == "VRAM":
            torch.cuda.synchronize()  # the lane has a stream of its own
        self.transport = HostTransport(f"end{id(self)}", memory=memory)
        address = PoolAddress(name="kv", base=self.pool.data_ptr(), unit_bytes=UNIT_BYTES, num_units=NUM_UNITS)
        self.endpoint: Endpoint = self.transport.register([address], generation=1, rank=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), [("VRAM", "VRAM"), ("VRAM", "DRAM"), ("DRAM", "VRAM")])
def test_every_byte_lands_and_no_other(source: Memory, target: Memory) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    writer, reader = End(torch, source, is_random=True), End(torch, target, is_random=False)
    order = torch.randperm(NUM_UNITS - 1, generator=torch.Generator().manual_seed(0)).tolist()
    # Whole units in random order, one piece larger than a buffer apart from them, one of 16 bytes.
    pieces = [Piece("kv", unit * UNIT_BYTES, to * UNIT_BYTES, UNIT_BYTES) for to, unit in enumerate(order[:30])]
    pieces += [Piece("kv", 0, 30 * UNIT_BYTES, 9 * UNIT_BYTES), Piece("kv", 16, 39 * UNIT_BYTES + 32, 16)]
    expected = torch.zeros(UNIT_BYTES * NUM_UNITS, dtype=torch.uint8)
    for piece in pieces:
        moved = writer.pool[piece.source : piece.source + piece.num_bytes].cpu()
        expected[piece.target : piece.target + piece.num_bytes] = moved
    writer.transport.connect(reader.endpoint)
    for word in (b"first", b"second"):
        transfer = writer.transport.write(reader.endpoint.agent, TransferPlan(tuple(pieces)), word)
        until = time.monotonic() + PATIENCE_S
        while writer.transport.check(transfer) is TransferStatus.PENDING:
            assert time.monotonic() < until
        assert writer.transport.check(transfer) is TransferStatus.DONE, transfer.error
    assert [message for _, message in reader.transport.poll()] == [b"first", b"second"]
    assert torch.equal(reader.pool.cpu(), expected)
    writer.transport.close()
    reader.transport.close()


@pytest.mark.gpu
def test_a_peer_connected_again_and_again_leaves_no_memory_pinned() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    writer, reader = End(torch, "VRAM", is_random=True), End(torch, "VRAM", is_random=False)
    for _ in range(50):  # 32 MiB at each end, every time
        writer.transport.connect(reader.endpoint)
        plan = TransferPlan((Piece("kv", 0, 0, UNIT_BYTES),))
        transfer = writer.transport.write(reader.endpoint.agent, plan)
        while writer.transport.check(transfer) is TransferStatus.PENDING:
            pass
        assert transfer.status is TransferStatus.DONE, transfer.error
        writer.transport.disconnect(reader.endpoint.agent)
    writer.transport.close()
    reader.transport.close()
    assert "isthmus-staging" not in Path("/proc/self/maps").read_text()
