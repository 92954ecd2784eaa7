"""What two ranks are linked by: measured, chosen, and refused if it is TCP inside one host."""

from __future__ import annotations

import mmap

import msgspec
import pytest
import torch

from kv_transfer import link_test
from kv_transfer.landing import Endpoint
from kv_transfer.link_test import LINK_WORD, Candidate, Link, establish, measure, refusal
from kv_transfer.transport import TransferError

from .conftest import Cluster, Side

FAST = Link("nixl", "cma", 100.0, 50.0, gb_per_s=8.0, copy_gb_per_s=12.0)
TCP = FAST._replace(lane="tcp", gb_per_s=2.0)
POOR = FAST._replace(gb_per_s=1.0)
HOST = FAST._replace(transport="host", lane="shm", gb_per_s=6.0)


def scratch_of(side: Side) -> torch.Tensor:
    return torch.from_numpy(side.pools["scratch"])


def test_a_link_is_measured_through_scratch_pools_only_and_announced(local_cluster: Cluster) -> None:
    prefill, decode = local_cluster.side(1), local_cluster.side(None)
    prefill.transport.connect(decode.endpoint)
    before = {name: array.copy() for name, array in decode.pools.items() if name != "scratch"}
    link = measure(prefill.transport, decode.endpoint, scratch=scratch_of(prefill))
    assert (link.transport, link.lane) == ("local", "memcpy")
    assert min(link.warmup_us, link.latency_us, link.gb_per_s, link.copy_gb_per_s) > 0
    assert link.staging_pages == {}
    decode.poll()
    assert decode.messages == [LINK_WORD]
    assert all((decode.pools[name] == array).all() for name, array in before.items())
    assert (decode.pools["scratch"] == prefill.pools["scratch"]).all()


def test_link_through_staging_memory_counts_its_numa_pages(host_cluster: Cluster) -> None:
    prefill, decode = host_cluster.side(1), host_cluster.side(None)
    prefill.transport.connect(decode.endpoint)
    link = measure(prefill.transport, decode.endpoint, scratch=scratch_of(prefill))
    (writer,) = decode.transport._receiver.writers
    assert sum(link.staging_pages.values()) == writer.staging.num_bytes // mmap.PAGESIZE
    assert link.staging_pages == writer.staging.count_pages().nodes
    assert prefill.transport.staging_pages("somebody else") == {}


def test_no_more_is_written_than_the_smaller_scratch_pool_holds(local_cluster: Cluster) -> None:
    prefill, decode = local_cluster.side(1), local_cluster.side(None)
    prefill.transport.connect(decode.endpoint)
    assert measure(prefill.transport, decode.endpoint, scratch=torch.zeros(1 << 20, dtype=torch.uint8)).gb_per_s > 0


def test_tcp_inside_one_host_is_refused_with_what_to_try(local_cluster: Cluster) -> None:
    own, peer = local_cluster.side(1).endpoint, local_cluster.side(None).endpoint
    text = refusal(TCP, own, peer)
    assert peer.agent in text
    for remedy in ("UCX_TLS", "ptrace", "--transport host", "--allow-tcp"):
        assert remedy in text
    assert refusal(TCP._replace(lane="cma+tcp"), own, peer)
    assert refusal(FAST, own, peer) == ""


def test_a_lane_without_a_name_is_judged_by_its_speed(local_cluster: Cluster) -> None:
    own, peer = local_cluster.side(1).endpoint, local_cluster.side(None).endpoint
    assert refusal(FAST._replace(lane="unknown"), own, peer) == ""
    assert "as slow" in refusal(POOR._replace(lane="unknown"), own, peer)


@pytest.mark.parametrize("host", ["another", ""])
def test_tcp_to_another_host_is_no_fault(local_cluster: Cluster, host: str) -> None:
    own, peer = local_cluster.side(1).endpoint, local_cluster.side(None).endpoint
    assert refusal(TCP, own, msgspec.structs.replace(peer, host=host)) == ""


class Measured:
    """Candidates whose measurements are given. A text stands for a failure."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *outcomes: Link | str) -> None:
        sides = [cluster.side(1) for _ in outcomes]
        self.decodes = [cluster.side(None) for _ in outcomes]
        self.candidates = [
            Candidate(side.transport, side.endpoint, decode.endpoint)
            for side, decode in zip(sides, self.decodes, strict=True)
        ]
        self.outcomes = {decode.endpoint.agent: outcome for decode, outcome in zip(self.decodes, outcomes, strict=True)}
        self.measured: list[str] = []
        monkeypatch.setattr(link_test, "measure", self._measure)

    def _measure(self, transport: object, peer: Endpoint, **options: object) -> Link:
        self.measured.append(peer.agent)
        outcome = self.outcomes[peer.agent]
        if isinstance(outcome, str):
            raise TransferError(outcome)
        return outcome

    def establish(self, *, allow_tcp: bool = False) -> Link:
        return establish(self.candidates, scratch=torch.zeros(8), allow_tcp=allow_tcp, timeout_s=1.0)

    @property
    def connected(self) -> list[bool]:
        return [candidate.peer.agent in candidate.transport._peers for candidate in self.candidates]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("outcomes", "allow_tcp", "chosen", "num_measured"),
    [
        ([FAST, HOST], False, 0, 1),
        ([TCP, HOST], False, 1, 2),
        (["it is gone", HOST], False, 1, 2),
        ([POOR, HOST], False, 1, 2),
        ([POOR, HOST._replace(gb_per_s=1.2)], False, 0, 2),
        ([POOR, "no memory"], False, 0, 2),
        ([TCP], True, 0, 1),
        ([TCP, HOST], True, 1, 2),
        ([TCP, "no memory"], True, 0, 2),
    ],
)
def test_the_first_that_will_do_is_taken_else_the_best(
    local_cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Link | str],
    allow_tcp: bool,
    chosen: int,
    num_measured: int,
) -> None:
    measured = Measured(local_cluster, monkeypatch, *outcomes)
    assert measured.establish(allow_tcp=allow_tcp) == outcomes[chosen]
    assert len(measured.measured) == num_measured
    usable = [not isinstance(outcome, str) for outcome in outcomes]
    for index, is_connected in enumerate(measured.connected):
        assert is_connected == (index == chosen) or not usable[index]


def test_with_nothing_left_every_cause_is_told(local_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(local_cluster, monkeypatch, TCP, "no shared memory here")
    with pytest.raises(TransferError, match=r"travels over TCP.*; no shared memory here"):
        measured.establish()
    assert not measured.connected[0]
