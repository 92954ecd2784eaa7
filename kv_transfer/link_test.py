"""Link test: what a pair of ranks is linked by, measured when they meet and before anybody's cache depends on it.

The lane as the transport names it, the time of a small write, and the bandwidth of a large one beside a copy of the
same bytes in this rank's own memory. A lane that fell to TCP between processes of one host is a fault, no success.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kv_transfer.landing import Endpoint
from kv_transfer.locality import is_same_host
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import KvTransport, TransferError, TransferStatus
from kv_transfer.warm import SCRATCH_BYTES, SCRATCH_POOL, warm

logger = logging.getLogger(__name__)

LINK_WORD = b"link"
"""A notification that means: writes come now, look often. It says nothing of any request."""

_NAP_S = 0.00005
_LATENCY_WRITES = 5
_BANDWIDTH_WRITES = 3


# NIXL needs one copy where the host lane needs two. It must fall below both bounds to be given up.
_POOR_SHARE = 0.25
_CLEARLY_BETTER = 1.5


class Candidate(NamedTuple):
    """A transport that could link two ranks, with both endpoints."""

    transport: KvTransport
    own: Endpoint
    peer: Endpoint


class Link(NamedTuple):
    """transport, lane: what carries bulk data.   warmup_us: the first write, which sets the connection up.

    latency_us: median of writes of 4 KiB, from post to end.   gb_per_s: best of writes of the whole scratch pool;
    copy_gb_per_s: the same bytes copied within this rank's memory.   staging_pages: pages of the receiver's staging
    memory by NUMA node, where the transport has one.
    """

    transport: str
    lane: str
    warmup_us: float
    latency_us: float
    gb_per_s: float
    copy_gb_per_s: float
    staging_pages: dict[int, int] = {}  # noqa: RUF012 (a field of a tuple; nobody changes it)


@runtime_checkable
class HasStaging(Protocol):
    """A transport that goes through memory of the receiver's which both processes map."""

    def staging_pages(self, agent: str) -> dict[int, int]:
        """Return how many pages of a peer's staging memory lie on which NUMA node; {} if that can't be told."""


@runtime_checkable
class LinksItself(Protocol):
    """A transport made of several, which calls `establish` with them by itself."""

    def link(
        self,
        peer: Endpoint,
        *,
        scratch: Tensor,
        allow_tcp: bool,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Link: ...


def establish(
    candidates: list[Candidate],
    *,
    scratch: Tensor,
    allow_tcp: bool,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Link:
    """Connect by the first candidate that will do, else by the best, and return what it measured.

    One will do if it is no TCP lane inside a host and reaches a fair share of a plain copy. Of the others, which are
    disconnected again, a TCP lane is taken only if allow_tcp. timeout_s: for all of them together, though each gets a
    second.   meanwhile: called while it waits. Raises TransferError, with every cause, if none is left.
    """
    until = time.monotonic() + timeout_s
    links: list[tuple[Link, Candidate]] = []
    causes: list[str] = []
    for candidate in candidates:
        transport, own, peer = candidate
        try:
            transport.connect(peer)
            left = max(1.0, until - time.monotonic())
            link = measure(transport, peer, scratch=scratch, timeout_s=left, meanwhile=meanwhile)
        except (TransferError, MemoryError, torch.OutOfMemoryError) as error:
            causes.append(str(error))
            continue
        problem = refusal(link, own, peer)
        if problem:
            causes.append(problem)
        if problem and not allow_tcp:
            transport.disconnect(peer.agent)
            continue
        links.append((link, candidate))
        if not problem and link.gb_per_s >= _POOR_SHARE * link.copy_gb_per_s:
            break
    if not links:
        raise TransferError("; ".join(causes))
    best, kept = links[0]
    for link, candidate in links[1:]:
        if link.gb_per_s >= _CLEARLY_BETTER * best.gb_per_s:
            best, kept = link, candidate
    for _, candidate in links:
        if candidate is not kept:
            candidate.transport.disconnect(candidate.peer.agent)
    for cause in causes:
        logger.warning("%s is linked over %s instead: %s", kept.peer.agent, best.transport, cause)
    return best


def measure(
    transport: KvTransport,
    peer: Endpoint,
    *,
    scratch: Tensor,
    timeout_s: float = 10.0,
    meanwhile: Callable[[], None] = lambda: None,
) -> Link:
    """Warm the connection to `peer`, which must be connected, and measure it; blocks for some milliseconds.

    scratch: this rank's own scratch pool, of which as much is written as fits into the peer's. The peer must poll
    meanwhile. timeout_s: in all.   meanwhile: called while it waits.
    Raises TransferError on failure or time-out; the peer is disconnected then.
    """

    def nap(seconds: float) -> None:
        meanwhile()
        time.sleep(seconds)

    def write(size: int) -> float:
        return _write(transport, agent, size, until=until, nap=nap)

    agent, until = peer.agent, time.monotonic() + timeout_s
    warmth = warm(transport, agent, timeout_s=timeout_s, sleep=nap)
    transport.notify(agent, LINK_WORD)
    there = peer.pool(SCRATCH_POOL)
    size = min(scratch.numel(), there.unit_bytes * there.num_units)
    small = sorted(write(SCRATCH_BYTES) for _ in range(_LATENCY_WRITES))
    large = min(write(size) for _ in range(_BANDWIDTH_WRITES))
    copy = min(_copy(scratch.view(-1)[:size]) for _ in range(_BANDWIDTH_WRITES))
    return Link(
        transport=transport.name,
        lane=warmth.lane,
        warmup_us=warmth.microseconds,
        latency_us=small[len(small) // 2] * 1e6,
        gb_per_s=size / large / 1e9,
        copy_gb_per_s=size / copy / 1e9,
        staging_pages=transport.staging_pages(agent) if isinstance(transport, HasStaging) else {},
    )


def refusal(link: Link, own: Endpoint, peer: Endpoint) -> str:
    """Return why a link must not serve unless the user allows it, "" if it may.

    A lane that the transport can't name (UCX says it once, and only if the user has left its log alone) is taken for
    TCP if it is as slow.
    """
    is_slow = link.gb_per_s < _POOR_SHARE * link.copy_gb_per_s
    is_tcp = "tcp" in link.lane.split("+") or (link.lane == "unknown" and is_slow)
    if not is_tcp or not is_same_host(own, peer):
        return ""
    return (
        f"{link.transport} to {peer.agent} travels over TCP (or what is as slow) although both are on this host, at a "
        "fraction of the speed. Unset UCX_TLS; run both as one user who may use "
        "process_vm_writev (kernel.yama.ptrace_scope 0; in containers one pid and ipc namespace and SYS_PTRACE); or "
        "take --transport host, which needs none of this, or auto; or allow it with --allow-tcp"
    )


def _write(transport: KvTransport, agent: str, size: int, *, until: float, nap: Callable[[float], None]) -> float:
    """Write `size` bytes into the peer's scratch pool; return the seconds until the write has ended."""
    started = time.perf_counter()
    transfer = transport.write(agent, TransferPlan((Piece(SCRATCH_POOL, 0, 0, size),)))
    while (status := transport.check(transfer)) is TransferStatus.PENDING:
        if time.monotonic() > until:
            transport.disconnect(agent)
            raise TransferError(f"{agent} did not take {size} bytes of the link test in time: is its process running?")
        nap(_NAP_S)
    if status is TransferStatus.FAILED:
        raise TransferError(f"test write to {agent} failed: {transfer.error}")
    return time.perf_counter() - started


def _copy(source: Tensor) -> float:
    target = torch.empty_like(source)
    target.zero_()  # else the first copy would pay for the pages
    _synchronize(source)
    started = time.perf_counter()
    target.copy_(source)
    _synchronize(source)
    return time.perf_counter() - started


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
