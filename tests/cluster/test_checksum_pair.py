"""Bytes that change on their way are found where they land, in every group; those that arrive whole are served."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import pytest

from kv_transfer.plan import TransferPlan
from router.protocol import PrefillResult

HERE = Path(__file__).parent


def _pair_module():
    if "cluster_pair" not in sys.modules:
        spec = importlib.util.spec_from_file_location("cluster_pair", HERE / "pair.py")
        sys.modules["cluster_pair"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["cluster_pair"])
    return sys.modules["cluster_pair"]


class Faulty:
    """A transport that reports every write as done. fault(plan, endpoint): what it does to what has landed."""

    def __init__(self, inner):
        self._inner, self._peers, self.fault = inner, {}, None

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def connect(self, peer):
        self._peers[peer.agent] = peer
        self._inner.connect(peer)

    def write(self, agent, plan, notification=b""):
        if self.fault is not None:
            plan = self.fault(plan, self._peers[agent]) or plan
        return self._inner.write(agent, plan, notification)


PROMPT = [3 + i % 300 for i in range(300)]  # a whole block of 256 and a part: two pushes


@pytest.fixture(scope="module")
def pair(oracle_model):
    return _pair_module().Pair(oracle_model, chunk=128, wrap=Faulty, kv_checksum=True, decode_ranks=2)


def test_what_arrives_whole_is_served_as_without_checksums(pair, oracle_model):
    tokens, _ = pair.generate(PROMPT, 3)
    plain = _pair_module().Pair(oracle_model, chunk=128)
    assert tokens == plain.generate(PROMPT, 3)[0]
    assert pair.decode.worker.stats().checksum_failures == 0
    assert pair.is_all_free()


def groups(pair):
    return [group.name for group in pair.decode.plan.layout.groups]


def lose(name):
    """Drop what goes into one group, and say that it is done."""

    def fault(plan, peer):
        return TransferPlan(tuple(piece for piece in plan.pieces if piece.pool != name))

    return fault


def flip(name):
    """Change one bit of one group once it has landed: the addresses are left in `pending`."""

    def fault(plan, peer):
        for piece in plan.pieces:
            if piece.pool == name:
                pending.append(peer.pool(name).base + piece.target + piece.num_bytes // 2)
        return None

    pending: list[int] = []
    fault.pending = pending
    return fault


@pytest.mark.parametrize("kind", [lose, flip])
@pytest.mark.parametrize("index", range(4))
def test_a_lost_write_and_a_changed_bit_fail_the_request_by_group(pair, index, kind):
    name, before = groups(pair)[index], pair.decode.worker.stats()
    pair.prefill.poison()
    pair.decode.poison()
    transport = pair.prefill.transport
    transport.fault = kind(name)
    request = pair.send(f"{kind.__name__}-{name}", PROMPT, 3)
    take_in, fault = pair.decode.worker._take_in, transport.fault

    def spoil(landed):
        for address in getattr(fault, "pending", []):
            ctypes.c_uint8.from_address(address).value ^= 0x10
        take_in(landed)

    pair.decode.worker._take_in = spoil
    try:
        pair.run_until(lambda: request.is_over and pair.prefill.worker.is_idle)
    finally:
        pair.decode.worker._take_in, transport.fault = take_in, None
    assert isinstance(request.result, PrefillResult)
    (error,) = [output.error for output in request.outputs]
    assert error.code == "transfer_failed"
    assert f"the cache that arrived is not what was sent: {name}" in error.message
    assert request.decoded == [], "no token may come out of it"
    assert pair.decode.worker.stats().checksum_failures == before.checksum_failures + 1
    assert pair.is_all_free()
    assert pair.generate(PROMPT, 2)[0], "the next request is served"
