"""warm: the first write to a peer, which sets the connection up and shows the lane."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import KvTransport, TransferError, TransferStatus

SCRATCH_POOL = "scratch"
SCRATCH_BYTES = 4096
_NAP_S = 0.0002


class Warmth(NamedTuple):
    """lane: what carries bulk data.  microseconds: from posting the first write to its end."""

    lane: str
    microseconds: float


def warm(
    transport: KvTransport,
    agent: str,
    *,
    timeout_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Warmth:
    """Write 4 KiB into the peer's scratch pool and return lane and time. The peer has to poll meanwhile.

    Blocks for up to `timeout_s`; takes no notifications out of the transport. Raises TransferError on failure or
    time-out; the peer is disconnected then.
    """
    plan = TransferPlan((Piece(SCRATCH_POOL, 0, 0, SCRATCH_BYTES),))
    started = clock()
    transfer = transport.write(agent, plan)
    while (status := transport.check(transfer)) is TransferStatus.PENDING:
        if clock() - started > timeout_s:
            transport.disconnect(agent)
            raise TransferError(f"{agent} did not take a first write within {timeout_s} s: is its process running?")
        sleep(_NAP_S)
    if status is TransferStatus.FAILED:
        transport.disconnect(agent)
        raise TransferError(f"first write to {agent} failed: {transfer.error}")
    return Warmth(transport.lane(agent), (clock() - started) * 1e6)
