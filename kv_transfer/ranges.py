"""Ranges: the addresses behind a TransferPlan, checked against the pools of both sides.

Both transports use these checks, so that what one refuses the other refuses too, before a byte moves.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.plan import TransferPlan
from kv_transfer.transport import TransferError


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """source, target: [N] uint64 absolute addresses.  sizes: [N] uint64 bytes."""

    source: NDArray[np.uint64]
    target: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


def pool_bytes(pool: PoolAddress) -> int:
    return pool.unit_bytes * pool.num_units


def resolve(plan: TransferPlan, own: Endpoint, peer: Endpoint) -> Ranges:
    """Return the plan's addresses. Raises TransferError if a piece leaves its pool on either side."""
    here = {pool.name: pool for pool in own.pools}
    there = {pool.name: pool for pool in peer.pools}
    rows: list[tuple[int, int, int]] = []
    for piece in plan.pieces:
        source = _address(here, piece.pool, piece.source, piece.num_bytes, own.agent)
        target = _address(there, piece.pool, piece.target, piece.num_bytes, peer.agent)
        rows.append((source, target, piece.num_bytes))
    table = np.array(rows, dtype=np.uint64).reshape(len(rows), 3)
    return Ranges(table[:, 0], table[:, 1], table[:, 2])


def check_pools(own: Endpoint, peer: Endpoint) -> None:
    """Raise TransferError if a pool of the same name has units of another size at the peer: layouts differ."""
    here = {pool.name: pool for pool in own.pools}
    for pool in peer.pools:
        mine = here.get(pool.name)
        if mine is not None and mine.unit_bytes != pool.unit_bytes:
            raise TransferError(
                f"pool {pool.name!r} has units of {mine.unit_bytes} bytes at {own.agent} and {pool.unit_bytes} at "
                f"{peer.agent}: start both with the same model, kv_cache_dtype and block size"
            )


def _address(pools: dict[str, PoolAddress], name: str, offset: int, size: int, agent: str) -> int:
    pool = pools.get(name)
    if pool is None:
        raise TransferError(f"{agent} has no pool {name!r}, only {sorted(pools)}")
    if size <= 0 or offset < 0 or offset + size > pool_bytes(pool):
        raise TransferError(
            f"bytes {offset}..{offset + size} of pool {name!r} at {agent}: the pool has {pool_bytes(pool)} bytes"
        )
    return pool.base + offset
