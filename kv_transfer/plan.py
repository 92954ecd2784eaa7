"""TransferPlan: which byte ranges of which pools go where.

Pure arithmetic over `KVLayout`. Blocks of the two sides are paired by their position in the prompt, counted from its
start: counting from the end pairs wrong blocks as soon as one side holds one block more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.landing import GroupManifest
from kv_transfer.layout import KVLayout


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` from `source` bytes into the own pool to `target` bytes into the peer's pool of the same name."""

    pool: str
    source: int
    target: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TransferPlan:
    """Pieces sorted by pool and address, neighbours merged."""

    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def plan_push(
    layout: KVLayout,
    *,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    first: int,
    last: int,
    source_slot: int | None = None,
    target_slot: int | None = None,
) -> TransferPlan:
    """Return the plan that copies blocks `first`..`last`-1 of a prompt, and its state record if slots are given.

    Entry i of either block list is the unit that holds tokens i * block_tokens onwards; the lists may differ in
    length as long as both reach `last`. Every block group moves whole units; pieces that are adjacent on both sides
    are one piece.
    Raises ValueError for a range outside either list, a negative or repeated id, or one slot without the other.
    """
    if not 0 <= first <= last:
        raise ValueError(f"blocks {first}..{last - 1}: need 0 <= first <= last")
    source = _ids("source_blocks", source_blocks, first, last)
    target = _ids("target_blocks", target_blocks, first, last)
    if (source_slot is None) != (target_slot is None):
        raise ValueError(f"source_slot {source_slot}, target_slot {target_slot}: give both or neither")
    if source_slot is not None and target_slot is not None and min(source_slot, target_slot) < 0:
        raise ValueError(f"source_slot {source_slot}, target_slot {target_slot}: a slot is not negative")

    runs = _runs(source, target)
    pieces: list[Piece] = []
    for group in layout.groups:
        size = group.unit_bytes
        if group.unit == "block":
            pieces += [Piece(group.name, s * size, t * size, n * size) for s, t, n in runs]
        elif source_slot is not None and target_slot is not None:
            pieces.append(Piece(group.name, source_slot * size, target_slot * size, size))
    return TransferPlan(tuple(pieces))


def manifest(layout: KVLayout, num_tokens: int) -> tuple[GroupManifest, ...]:
    """Return what must have arrived for a prompt of `num_tokens` tokens, in the layout's order.

    Raises ValueError for an empty prompt.
    """
    if num_tokens < 1:
        raise ValueError(f"manifest of {num_tokens} tokens: a prompt has at least one")
    blocks = layout.num_blocks_for(num_tokens)
    counts = [(group, blocks if group.unit == "block" else 1) for group in layout.groups]
    return tuple(GroupManifest(group.name, n, n * group.unit_bytes) for group, n in counts)


def source_rank_for(target_rank: int, num_source_ranks: int) -> int:
    """Return the prefill rank that writes to decode rank `target_rank`: the cache is equal on every rank."""
    if num_source_ranks < 1 or target_rank < 0:
        raise ValueError(f"decode rank {target_rank} of {num_source_ranks} prefill ranks: no such rank")
    return target_rank % num_source_ranks


def destinations_of(source_rank: int, *, num_sources: int, num_targets: int) -> tuple[int, ...]:
    """Return the decode ranks that prefill rank `source_rank` writes to: none for ranks beyond `num_targets`.

    Raises ValueError for a rank outside its group.
    """
    if not 0 <= source_rank < num_sources:
        raise ValueError(f"prefill rank {source_rank} of {num_sources}: no such rank")
    return tuple(range(source_rank, num_targets, num_sources))


def _ids(name: str, blocks: Sequence[int], first: int, last: int) -> NDArray[np.int64]:
    if last > len(blocks):
        raise ValueError(f"{name} has {len(blocks)} blocks: blocks {first}..{last - 1} are wanted")
    ids = np.asarray(blocks[first:last], dtype=np.int64)
    if ids.size and int(ids.min()) < 0:
        raise ValueError(f"{name}: block id {int(ids.min())} is negative")
    if np.unique(ids).size != ids.size:
        raise ValueError(f"{name}: a block id occurs twice in blocks {first}..{last - 1}")
    return ids


def _runs(source: NDArray[np.int64], target: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return (source unit, target unit, count) of each run that is adjacent on both sides, by source unit."""
    if not source.size:
        return []
    order = np.argsort(source)
    source, target = source[order], target[order]
    breaks = (np.diff(source) != 1) | (np.diff(target) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(np.concatenate((starts, [source.size])))
    return list(zip(source[starts].tolist(), target[starts].tolist(), counts.tolist(), strict=True))
