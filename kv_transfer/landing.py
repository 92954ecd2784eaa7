"""What decode hands to prefill so that it can write: the landing, the endpoints, and the words sent with the bytes.

All of it is msgpack; the router carries landings and endpoints as opaque bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PoolAddress(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A registered pool: `num_units` units of `unit_bytes` from address `base`. name: cache group, or "scratch"."""

    name: str
    base: int
    unit_bytes: int
    num_units: int


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one rank's pools. metadata is the transport's own (a NIXL agent's metadata).

    generation is that of the worker group: a restarted group has another, and its old endpoints are void.
    The pool named "scratch" is memory that a peer may overwrite at any time, to warm and to measure a lane.
    host: see locality.host_id; "" if unknown.
    """

    transport: str
    agent: str
    generation: int
    rank: int
    metadata: bytes
    pools: tuple[PoolAddress, ...]
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0
    host: str = ""

    def pool(self, name: str) -> PoolAddress:
        return next(p for p in self.pools if p.name == name)


class Landing(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks and a slot at decode that belong to one writer until it has said drained.

    key: number of the reservation in that decode group's life; (generation, key) names it for ever.
    block_ids: for the prompt's `num_tokens` tokens, in order. leader_url: where drained is said when a
    notification can't be delivered.
    """

    request_id: str
    key: int
    generation: int
    num_tokens: int
    block_ids: tuple[int, ...]
    slot: int
    layout: str
    agents: tuple[str, ...]
    leader_url: str


class GroupManifest(msgspec.Struct, frozen=True, array_like=True):
    """What must have arrived of one cache group. checksum: of its units (kv_transfer.checksum), if one was taken."""

    name: str
    num_units: int
    num_bytes: int
    checksum: int | None = None


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by a writer rank to a decode rank, for landing (generation, key).

    kind "last": rides on the final write; all earlier ones have completed. Carries the first token and
    the manifest. It also means drained.   kind "drained": nothing more will be written, the landing is void.
    sent_at: time.monotonic() when the final write was posted, on the host `sent_by` (locality.host_id).
    """

    kind: Literal["last", "drained"]
    key: int
    generation: int
    writer_rank: int
    writer_generation: int
    first_token: int = -1
    num_tokens: int = 0
    manifest: tuple[GroupManifest, ...] = ()
    sent_at: float = 0.0
    sent_by: str = ""


def encode(message: Landing | Endpoint | Notification) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_landing(data: bytes) -> Landing:
    """Raises msgspec.ValidationError or DecodeError for anything else than a landing."""
    return msgspec.msgpack.decode(data, type=Landing)


def decode_endpoint(data: bytes) -> Endpoint:
    return msgspec.msgpack.decode(data, type=Endpoint)


def decode_notification(data: bytes) -> Notification:
    return msgspec.msgpack.decode(data, type=Notification)
