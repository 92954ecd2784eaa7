"""The interface of a transport: one-sided writes from registered pools into a peer's, with a word at the end.

One thread owns a transport; none of its methods may be called from another. Pools are registered once and live
as long as the process: a late write must always find memory. A transport knows bytes and addresses only, nothing of
requests.
"""

from __future__ import annotations

import enum
from typing import Protocol

from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.plan import TransferPlan


class TransferError(Exception):
    """A write or notification did not happen, or its peer is gone. The text names peer and cause."""


class TransferStatus(enum.Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Transfer(Protocol):
    """A write under way. Keep it until it is no longer PENDING; never drop one in flight."""

    @property
    def error(self) -> str:
        """Cause of a failure, else ""."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_pieces(self) -> int:
        """Pieces after merging neighbours."""


class KvTransport(Protocol):
    """What a rank asks of its transport."""

    name: str

    def register(self, pools: list[PoolAddress], *, generation: int, rank: int) -> Endpoint:
        """Make pools reachable and return how. Called once, before anything else."""

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer. Known already with the same metadata: nothing happens. Raises TransferError."""

    def disconnect(self, agent: str) -> None:
        """Forget a peer; writes to it fail from now on, those under way may still end. Unknown: nothing happens."""

    def write(self, agent: str, plan: TransferPlan, notification: bytes = b"") -> Transfer:
        """Start copying the plan's ranges from own pools to the peer's; then the peer gets `notification`.

        May block while the copy runs (shared memory lanes do). Raises TransferError if it can't start.
        """

    def check(self, transfer: Transfer) -> TransferStatus:
        """Return the state of a write, driving progress. Never raises. The receiver must poll for it to end."""

    def notify(self, agent: str, message: bytes) -> None:
        """Send a word without data. Raises TransferError if the peer is gone, or not written to since `connect`."""

    def poll(self) -> list[tuple[str, bytes]]:
        """Drive progress and return (agent, message) of each notification that came in."""

    def lane(self, agent: str) -> str:
        """Return what carries bulk data to this peer ("cma", "tcp", "cuda_ipc", ...), "unknown" before use."""

    def close(self) -> None:
        """Let go of peers and registrations. Own transfers must have ended."""
