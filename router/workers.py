"""Worker and Pair: what the router knows of one worker, and of a prefill worker linked to a decode worker.

Changed by the registry alone, except `inboxes`, `prefills` and `owed`, which attempts fill.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from router.client import WorkerClient
from router.inbox import Inbox
from router.policy import DecodeSnapshot, PrefillSnapshot
from router.protocol import AbortRequest, Fingerprints, LinkReply, WorkerInfo, WorkerRole, WorkerStats

PairState = Literal["waiting", "linking", "warming", "ready", "draining", "failed"]


class Worker:
    """One worker as the router knows it. generation 0: never seen."""

    def __init__(self, url: str, role: WorkerRole, *, router: str = "") -> None:
        self.url = url
        self.role = role
        self.client = WorkerClient(url, router=router)
        self.info: WorkerInfo | None = None
        self.state: str = "unreachable"
        self.reason = "not contacted yet"
        self.generation = 0
        self.stats = WorkerStats()
        self.is_connected = False
        self.is_lost = True
        self.is_refused = False
        # It gets nothing new, and what it has goes on.
        self.is_draining = False
        self.next_frame = 0
        self.inboxes: dict[str, Inbox] = {}
        self.prefills: dict[str, int] = {}
        self.unreachable_since: float | None = None
        self.dead_generation = 0
        # Aborts of this generation that could not be told: requests that are over here and may still run there.
        self.owed: dict[str, AbortRequest] = {}

    @property
    def is_linkable(self) -> bool:
        """Whether it is loaded and reachable, so that it can be connected to its peers."""
        return (
            self.is_connected
            and not self.is_refused
            and self.state in ("linking", "warming", "ready")
            and self.info is not None
            and self.info.fingerprints is not None
            and self.info.limits is not None
            and (self.role == "prefill" or bool(self.info.endpoints))
        )

    @property
    def shown_state(self) -> str:
        """Its state as people are told."""
        return "draining" if self.is_draining and self.state == "ready" else self.state

    @property
    def num_requests(self) -> int:
        """Requests of this router that depend on it: at prefill until their cache has landed."""
        return len(self.inboxes.keys() | self.prefills.keys())

    def prefill_snapshot(self) -> PrefillSnapshot:
        assert self.info is not None and self.info.limits is not None
        limits = self.info.limits
        return PrefillSnapshot(
            url=self.url,
            prompts=tuple(self.prefills.values()),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )

    def decode_snapshot(self) -> DecodeSnapshot:
        assert self.info is not None and self.info.limits is not None
        limits = self.info.limits
        return DecodeSnapshot(
            url=self.url,
            requests=len(self.inboxes),
            free_blocks=self.stats.free_blocks,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            block_tokens=limits.block_tokens,
        )

    def describe(self) -> dict[str, Any]:
        """Return its entry in /topology."""
        info = self.info
        return {
            "id": info.id if info else self.url,
            "role": self.role,
            "url": self.url,
            "state": self.shown_state,
            "reason": self.reason,
            "num_requests": self.num_requests,
            "generation": self.generation,
            "leader_pid": info.leader_pid if info else None,
            "ranks": _all_fields(info.ranks) if info else [],
            "fingerprints": _all_fields(info.fingerprints) if info else None,
            "limits": _all_fields(info.limits) if info else None,
            "memory": _all_fields(info.memory) if info else None,
            "transport": info.transport if info else "",
            "stats": _all_fields(self.stats),
        }


class Pair:
    """A prefill worker linked to a decode worker. `linked` and `warmed` name the generations that were."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill = prefill
        self.decode = decode
        self.linked = self.warmed = (0, 0)
        self.transport = self.lane = ""
        self.link: dict[str, float] = {}  # what the link test has measured
        self.staging_pages: dict[int, int] = {}
        self.reason = ""
        self.task: asyncio.Task[None] | None = None

    @property
    def generations(self) -> tuple[int, int]:
        return self.prefill.generation, self.decode.generation

    @property
    def mismatch(self) -> str:
        """What keeps the two from working together for good, with both values; "" if nothing does."""
        a, b = self.prefill.info, self.decode.info
        if a is None or b is None or a.fingerprints is None or b.fingerprints is None:
            return ""
        for field in Fingerprints.__struct_fields__:
            left, right = getattr(a.fingerprints, field), getattr(b.fingerprints, field)
            if left != right:
                return (
                    f"{field} fingerprint differs: {left} at prefill {a.id} ({a.url}), {right} at decode {b.id} "
                    f"({b.url}); start both with the same model and cache settings"
                )
        return ""

    @property
    def state(self) -> PairState:
        if self.prefill.is_draining or self.decode.is_draining:
            return "draining"
        if not (self.prefill.is_linkable and self.decode.is_linkable):
            return "waiting"
        if self.mismatch:
            return "failed"
        if self.linked != self.generations:
            return "linking"
        if self.warmed != self.generations or self.prefill.state != "ready" or self.decode.state != "ready":
            return "warming"
        return "ready"

    def learn(self, reply: LinkReply) -> None:
        """Take in what the prefill worker says of its link to the decode worker."""
        self.transport, self.lane = reply.transport, reply.lane
        names = ("warmup_us", "latency_us", "gb_per_s", "copy_gb_per_s")
        self.link = {name: round(getattr(reply, name), 2) for name in names}
        self.staging_pages = reply.staging_pages

    def describe(self) -> dict[str, Any]:
        """Return its entry in /topology."""
        name = [w.info.id if w.info else w.url for w in (self.prefill, self.decode)]
        reason = self.mismatch or (self.reason if self.state != "ready" else "")
        return {
            "prefill": name[0],
            "decode": name[1],
            "state": self.state,
            "transport": self.transport,
            "lane": self.lane,
            "link": self.link,
            "staging_pages": self.staging_pages,
            "reason": reason,
        }


def _all_fields(value: Any) -> Any:
    """Return a message as plain values, fields at their default included: people read it."""
    if isinstance(value, msgspec.Struct):
        return {field: _all_fields(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _all_fields(v) for key, v in value.items()}
    return [_all_fields(v) for v in value] if isinstance(value, list | tuple) else value
