"""AutoTransport: NIXL where it is fast, the host lane where it is not, chosen for each peer when they meet.

Both are registered; `link` measures (kv_transfer.link_test) and chooses. Everything else goes to the chosen one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import msgspec
from torch import Tensor

from kv_transfer.host_transport import HostTransport
from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.link_test import Candidate, Link, establish
from kv_transfer.locality import is_same_host
from kv_transfer.nixl_transport import NixlTransfer, NixlTransport
from kv_transfer.plan import TransferPlan
from kv_transfer.transport import KvTransport, Transfer, TransferError, TransferStatus

logger = logging.getLogger(__name__)


class AutoTransport:
    """A NixlTransport and a HostTransport under one name. metadata: the endpoints of both, the preferred one first."""

    name = "auto"

    def __init__(self, worker: str, *, memory: Literal["DRAM", "VRAM"] = "DRAM", device: int = 0) -> None:
        self._members: dict[str, KvTransport] = {
            "nixl": NixlTransport(worker, memory=memory, device=device),
            "host": HostTransport(worker, memory=memory, device=device),
        }
        self._endpoints: dict[str, Endpoint] = {}
        self._chosen: dict[str, tuple[Endpoint, str]] = {}

    def register(self, pools: list[PoolAddress], *, generation: int, rank: int) -> Endpoint:
        """Register with both; without NIXL the host lane serves alone. Raises TransferError if that does not start."""
        for name, member in list(self._members.items()):
            try:
                self._endpoints[name] = member.register(pools, generation=generation, rank=rank)
            except TransferError as error:
                if name == "host":
                    raise
                logger.warning("the host lane serves alone: %s", error)
                del self._members[name]
        metadata = msgspec.msgpack.encode(list(self._endpoints.values()))
        return msgspec.structs.replace(self._endpoints["host"], transport=self.name, metadata=metadata)

    def link(
        self,
        peer: Endpoint,
        *,
        scratch: Tensor,
        allow_tcp: bool,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Link:
        """Connect to a peer by the better of what both sides have, and return what it measured.

        Raises TransferError if nothing works. See link_test.establish.
        """
        name = peer.agent.rpartition(".g")[0]
        for agent in [agent for agent in self._chosen if agent.rpartition(".g")[0] == name]:
            del self._chosen[agent]  # this peer's, and its earlier lives'
        candidates = {name: Candidate(self._members[name], mine, its) for name, mine, its in self._common(peer)}
        link = establish(
            list(candidates.values()),
            scratch=scratch,
            allow_tcp=allow_tcp,
            timeout_s=timeout_s,
            meanwhile=meanwhile,
        )
        self._chosen[peer.agent] = (peer, link.transport)
        return link

    def connect(self, peer: Endpoint) -> None:
        """Connect a peer anew over what `link` has chosen for it: nothing may go over what was not measured."""
        known, chosen = self._chosen.get(peer.agent, (None, ""))
        if known != peer:
            raise TransferError(f"{peer.agent} is not connected: link it first")
        self._members[chosen].connect(next(its for name, _, its in self._common(peer) if name == chosen))

    def disconnect(self, agent: str) -> None:
        for member in self._members.values():
            member.disconnect(agent)

    def write(self, agent: str, plan: TransferPlan, notification: bytes = b"") -> Transfer:
        return self._member(agent).write(agent, plan, notification)

    def check(self, transfer: Transfer) -> TransferStatus:
        return self._members["nixl" if isinstance(transfer, NixlTransfer) else "host"].check(transfer)

    def notify(self, agent: str, message: bytes) -> None:
        self._member(agent).notify(agent, message)

    def poll(self) -> list[tuple[str, bytes]]:
        return [arrived for member in self._members.values() for arrived in member.poll()]

    def lane(self, agent: str) -> str:
        return self._member(agent).lane(agent) if agent in self._chosen else "unknown"

    def close(self) -> None:
        for member in self._members.values():
            member.close()

    def _member(self, agent: str) -> KvTransport:
        if agent not in self._chosen:
            raise TransferError(f"{agent} is not connected: it was never linked, or was disconnected after a failure")
        return self._members[self._chosen[agent][1]]

    def _common(self, peer: Endpoint) -> list[tuple[str, Endpoint, Endpoint]]:
        """Return name, own and peer's endpoint of each transport that can reach the peer, the preferred one first."""
        if peer.transport != self.name:
            raise TransferError(f"{peer.agent} speaks {peer.transport!r}, not {self.name!r}: use one transport")
        try:
            offered = msgspec.msgpack.decode(peer.metadata, type=list[Endpoint])
        except msgspec.DecodeError as error:
            raise TransferError(f"metadata of {peer.agent} is unusable: {error}") from error
        common = [(e.transport, self._endpoints[e.transport], e) for e in offered if e.transport in self._endpoints]
        common = [(name, mine, its) for name, mine, its in common if name != "host" or is_same_host(mine, its)]
        if not common:
            raise TransferError(
                f"{peer.agent} offers {', '.join(e.transport for e in offered)} from another host, this rank has "
                f"{', '.join(self._endpoints)}: install nixl-cu13 on both"
            )
        return common
