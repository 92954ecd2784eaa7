"""NixlTransport: KvTransport over a NIXL agent with the UCX backend.

No progress thread: it would burn a core, idle. The owner drives progress by `check` and `poll`; a *receiver* must poll
too, or the writer's transfers stay PENDING, on every lane.

Traps, measured with NIXL 1.5.1, but for cuda_ipc, which is read from its sources:
- failure is mostly an exception out of `transfer` or `check_xfer_state`, rarely the state "ERR";
- a stopped peer keeps a transfer PENDING for ever: deadlines are the caller's;
- releasing a handle or removing its peer does not stop the bytes, it only makes their state unknowable. So a handle
  is released only when its transfer has ended;
- a write fails as soon as its connection does, while its copies still wait in UCX: over cma the next progress, whatever
  it was meant for, makes them all; over cuda_ipc it only starts them. So progress is driven, and the device waited for,
  before a failure is told;
- `remove_remote_agent` leaves the connection to a living peer open, a descriptor on both sides for ever. So a peer that
  is disconnected stays known to NIXL, to be used again, until its connection has broken or a successor has come;
- a connection is set up by progress on both sides: a word sent before would stay here while the owner is idle;
- after a failure the connection is unusable even if the peer lives: it is dropped, and `connect` makes a new one;
- `add_remote_agent` returns bytes; a name can be taken again only after `remove_remote_agent`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.locality import host_id
from kv_transfer.plan import TransferPlan
from kv_transfer.ranges import check_pools, pool_bytes, resolve
from kv_transfer.transport import Transfer, TransferError, TransferStatus
from kv_transfer.ucx_log import WriteTable, process_log

logger = logging.getLogger(__name__)

_ROUNDS_AFTER_FAILURE = 4
"""One was enough in every case that was seen."""

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")


def load_nixl() -> Any:
    """Return NIXL's API module. Raises TransferError naming the package to install."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != package:
                raise
    raise TransferError("transport nixl needs the package nixl-cu13 (or nixl-cu12): pip install 'nixl-cu13==1.5.1'")


@dataclasses.dataclass(slots=True)
class _Peer:
    endpoint: Endpoint
    lane: str = "unknown"
    lane_mark: int = 0
    has_written: bool = False
    is_open: bool = True
    is_broken: bool = False
    transfers: list[NixlTransfer] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class NixlTransfer:
    """A write under way. handle is None once it has ended: a released handle gives meaningless answers."""

    peer: _Peer
    num_bytes: int
    num_pieces: int
    handle: Any = None
    status: TransferStatus = TransferStatus.PENDING
    error: str = ""


class NixlTransport:
    """One NIXL agent, made by `register`. worker: name of the worker group, part of the agent's name."""

    name = "nixl"

    def __init__(self, worker: str, *, memory: Literal["DRAM", "VRAM"] = "DRAM", device: int = 0) -> None:
        self._worker = worker
        self._memory: Literal["DRAM", "VRAM"] = memory
        self._device = device
        self._agent: Any = None
        self._registration: Any = None
        self._endpoint: Endpoint | None = None
        self._peers: dict[str, _Peer] = {}
        self._arrived: list[tuple[str, bytes]] = []

    def register(self, pools: list[PoolAddress], *, generation: int, rank: int) -> Endpoint:
        """Create the agent, register `pools` and return the endpoint. The memory must outlive this process' peers.

        Raises TransferError if NIXL is missing or its UCX backend does not start.
        """
        if self._endpoint is not None:
            raise TransferError(f"{self._endpoint.agent} has registered its pools already")
        name = f"{self._worker}.r{rank}.g{generation:x}"
        with process_log.environment(), _quiet_nixl():
            api = load_nixl()
            try:
                if self._memory == "VRAM":
                    _enter_device(self._device)
                agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
                # A plugin that can't be found is only logged by the constructor; here it raises.
                agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
                rows = [(pool.base, pool_bytes(pool), self._device, pool.name) for pool in pools]
                self._registration = agent.register_memory(rows, self._memory) if rows else None
                metadata = agent.get_agent_metadata()
            except Exception as error:
                raise TransferError(
                    f"NIXL agent {name} could not start over UCX: {_cause(error)}; if UCX_TLS is set "
                    f"({os.environ.get('UCX_TLS', 'it is not')}), it must contain tcp; NIXL_LOG_LEVEL=INFO tells more"
                ) from error
        self._agent = agent
        self._endpoint = Endpoint(
            transport=self.name,
            agent=name,
            generation=generation,
            rank=rank,
            metadata=metadata,
            pools=tuple(pools),
            host=host_id(),
            memory=self._memory,
            device=self._device,
        )
        return self._endpoint

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer, its new metadata after it restarted under the same name, or anew after a failure.

        Raises TransferError for metadata that NIXL can't read, pools of another geometry, or while writes over the
        connection that this one replaces are still under way.
        """
        own = self._own()
        if peer.transport != self.name:
            raise TransferError(f"{peer.agent} speaks {peer.transport!r}, not {self.name!r}: use one transport")
        check_pools(own, peer)
        known = self._peers.get(peer.agent)
        if known is not None and known.endpoint == peer and not known.is_broken:
            known.is_open = True
            return
        self._check_all()
        if known is not None:
            if known.transfers:
                raise TransferError(
                    f"{peer.agent} can't be connected anew while {len(known.transfers)} writes over its previous "
                    "connection are under way: try again when they have ended, or end the process they go to"
                )
            self._remove(known)
        self._remove_predecessors(peer)
        mark = len(self._tables())
        try:
            named = self._agent.add_remote_agent(peer.metadata).decode()
        except Exception as error:
            raise TransferError(
                f"metadata of {peer.agent} is unusable, or its process is gone: {_cause(error)}"
            ) from error
        if named != peer.agent:
            self._agent.remove_remote_agent(named)
            raise TransferError(f"endpoint {peer.agent} carries the metadata of {named}")
        self._peers[peer.agent] = _Peer(peer, lane_mark=mark)

    def disconnect(self, agent: str) -> None:
        """Refuse writes to a peer from now on; those under way may still end."""
        peer = self._peers.get(agent)
        if peer is not None:
            peer.is_open = False
            if peer.is_broken and not peer.transfers:
                self._remove(peer)

    def write(self, agent: str, plan: TransferPlan, notification: bytes = b"") -> Transfer:
        """Start the plan's copies; over shared memory the call itself copies. See KvTransport."""
        peer = self._peer(agent)
        transfer = NixlTransfer(peer, plan.num_bytes, len(plan.pieces))
        if not plan.pieces:
            if notification:
                self.notify(agent, notification)
            transfer.status = TransferStatus.DONE
            return transfer
        ranges = resolve(plan, self._own(), peer.endpoint)
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._descriptors(ranges.source, ranges.sizes, self._device, self._memory),
                self._descriptors(ranges.target, ranges.sizes, peer.endpoint.device, peer.endpoint.memory),
                agent,
                notification,
            )
        except Exception as error:
            raise TransferError(f"write of {plan.num_bytes} bytes to {agent} refused: {_cause(error)}") from error
        transfer.handle = handle
        peer.transfers.append(transfer)
        self._settle(transfer, self._agent.transfer)
        return transfer

    def check(self, transfer: Transfer) -> TransferStatus:
        """Return the state of a write, driving progress. Never raises."""
        assert isinstance(transfer, NixlTransfer)
        if transfer.status is TransferStatus.PENDING:
            self._settle(transfer, self._agent.check_xfer_state)
        return transfer.status

    def notify(self, agent: str, message: bytes) -> None:
        """Send a word. Refused before a first write has ended: until then it would wait here, unnoticed."""
        peer = self._peer(agent)
        if not peer.has_written:
            raise TransferError(f"{agent} can't be notified: its connection is not set up; write to it first (warm)")
        try:
            self._agent.send_notif(agent, message)
        except Exception as error:
            self._break(peer)
            raise TransferError(f"{agent} can't be notified: {_cause(error)}") from error

    def poll(self) -> list[tuple[str, bytes]]:
        if self._agent is None:
            return []
        self._progress()
        arrived, self._arrived = self._arrived, []
        return arrived

    def lane(self, agent: str) -> str:
        peer = self._peers.get(agent)
        return "unknown" if peer is None else peer.lane

    def close(self) -> None:
        """Forget peers and let the agent go. With a write still under way everything is left to the process' end.

        Deregistering memory that bytes are read from would end this process with a segmentation fault.
        """
        num_pending = self._check_all()
        if num_pending:
            logger.warning("%s closes with %d writes under way", self._own().agent, num_pending)
            return
        for peer in list(self._peers.values()):
            self._remove(peer)
        if self._registration is not None:
            self._agent.deregister_memory(self._registration)
            self._registration = None
        self._agent = None

    # ------------------------------------------------------------ below: helpers

    def _check_all(self) -> int:
        """Take in the ends of all writes, those that nobody waits for any more included; return how many go on."""
        transfers = [transfer for peer in self._peers.values() for transfer in peer.transfers]
        return sum(self.check(transfer) is TransferStatus.PENDING for transfer in transfers)

    def _own(self) -> Endpoint:
        if self._endpoint is None:
            raise TransferError("register the pools first")
        return self._endpoint

    def _peer(self, agent: str) -> _Peer:
        peer = self._peers.get(agent)
        if peer is None or not peer.is_open:
            raise TransferError(f"{agent} is not connected: it was never linked, or was disconnected after a failure")
        return peer

    def _descriptors(self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], device: int, memory: str) -> Any:
        rows = np.stack((addresses, sizes, np.full_like(sizes, device)), axis=1)
        return self._agent.get_xfer_descs(rows, memory)

    def _settle(self, transfer: NixlTransfer, step: Any) -> None:
        """Post or ask once; on an end release the handle, learn the lane, and remove a peer that waits for this."""
        try:
            state = step(transfer.handle)
        except Exception as error:
            state, transfer.error = "ERR", f"write to {transfer.peer.endpoint.agent} failed: {_cause(error)}"
        if state == "PROC":
            return
        if state != "DONE":
            self._make_copies()
        transfer.status = TransferStatus.DONE if state == "DONE" else TransferStatus.FAILED
        if state != "DONE" and not transfer.error:
            transfer.error = f"write to {transfer.peer.endpoint.agent} failed: NIXL reports {state}"
        try:
            transfer.handle.release()
        except Exception as error:
            logger.warning("handle of an ended write not released: %s", _cause(error))
        transfer.handle = None
        peer = transfer.peer
        peer.transfers.remove(transfer)
        if transfer.status is TransferStatus.DONE and not peer.has_written:
            peer.has_written = True
            peer.lane = self._find_lane(peer)
        if transfer.status is TransferStatus.FAILED:
            self._break(peer)
        elif peer.is_broken and not peer.transfers:
            self._remove(peer)

    def _progress(self) -> None:
        """Let UCX work until nothing moves, and keep the notifications that came."""
        arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        self._arrived += [(agent, message) for agent, messages in arrived.items() for message in messages]

    def _make_copies(self) -> None:
        """Have UCX make the copies that a failed write has left with it: once the failure is told, none may follow."""
        try:
            for _ in range(_ROUNDS_AFTER_FAILURE):
                try:
                    self._progress()
                finally:
                    self._await_device()
        except Exception as error:
            logger.warning("no progress after a failed write: %s", _cause(error))

    def _await_device(self) -> None:
        """Wait until a GPU has made every copy that this process has started on it."""
        if self._memory == "VRAM":
            import torch

            torch.cuda.synchronize(self._device)

    def _break(self, peer: _Peer) -> None:
        peer.is_broken = True
        self.disconnect(peer.endpoint.agent)

    def _find_lane(self, peer: _Peer) -> str:
        """Return the lane of the tables printed since `connect`, else the only one this agent has ever used."""
        tables = self._tables()
        if fresh := tables[peer.lane_mark :]:
            return fresh[-1].lane
        lanes = {table.lane for table in tables}
        if len(lanes) > 1:
            logger.info("the lane to %s is one of %s", peer.endpoint.agent, sorted(lanes))
        return lanes.pop() if len(lanes) == 1 else "unknown"

    def _tables(self) -> list[WriteTable]:
        return process_log.tables(self._own().agent, is_device=self._memory == "VRAM")

    def _remove_predecessors(self, peer: Endpoint) -> None:
        """Forget earlier lives of a peer: their processes have ended, and with them their connections."""
        name = peer.agent.rpartition(".g")[0]
        for known in list(self._peers.values()):
            if known.endpoint.agent.rpartition(".g")[0] == name and not known.is_open and not known.transfers:
                self._remove(known)

    def _remove(self, peer: _Peer) -> None:
        agent = peer.endpoint.agent
        if self._peers.get(agent) is not peer:
            return
        del self._peers[agent]
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:
            logger.info("NIXL no longer knew %s: %s", agent, _cause(error))


def _enter_device(device: int) -> None:
    """Make a CUDA device's context this thread's: UCX looks for it when it starts."""
    import torch

    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).synchronize()


def _cause(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


@contextlib.contextmanager
def _quiet_nixl() -> Iterator[None]:
    """Keep NIXL's own lines off the terminal unless the user chose a level: errors come as exceptions."""
    if "NIXL_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["NIXL_LOG_LEVEL"] = "FATAL"
    try:
        yield
    finally:
        del os.environ["NIXL_LOG_LEVEL"]
