"""Pools of the soak, whose every 8-byte word names the request, group, unit and place that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from pool_memory import Memory, Words, make_pool
from soak_content import FREE, GONE, LAYOUT, NUM_BLOCKS, NUM_SLOTS

from kv_transfer.landing import PoolAddress

_PLACE = np.arange(1 << 13, dtype=np.uint64)
_PORTION = 16
"""Units looked at together: more would take memory of a size that the soak would see as growth."""


class Pools:
    """One pool for each group of LAYOUT, filled with `fill`, and scratch."""

    def __init__(self, fill: int, memory: Memory) -> None:
        self._pools = {
            group.name: make_pool(memory, NUM_BLOCKS if group.unit == "block" else NUM_SLOTS, group.unit_bytes)
            for group in LAYOUT.groups
        }
        for pool in self._pools.values():
            pool.fill(range(pool.num_units), fill)
        self._scratch = make_pool(memory, 1, 4096)

    @property
    def addresses(self) -> list[PoolAddress]:
        return [pool.address(name) for name, pool in (self._pools | {"scratch": self._scratch}).items()]

    def write(self, request: int, blocks: Sequence[int], slot: int) -> None:
        """Write what prefill computes for a request: unit i of its prompt in blocks[i]."""
        for number, (name, pool) in enumerate(self._pools.items()):
            for first, units in _portions(_units(name, blocks, slot)):
                pool.write(units, _expected(request, number, first, len(units), pool.num_words))

    def fill(self, value: int, blocks: Sequence[int], slot: int) -> None:
        for name, pool in self._pools.items():
            pool.fill(_units(name, blocks, slot), value)

    def faults(self, request: int, blocks: Sequence[int], slot: int) -> list[str]:
        """Return what is wrong with a request's units, one line a unit."""
        lines = []
        for number, (name, pool) in enumerate(self._pools.items()):
            for first, units in _portions(_units(name, blocks, slot)):
                expected = _expected(request, number, first, len(units), pool.num_words)
                for unit, row, wrong in _differences(units, pool.read(units), expected):
                    lines.append(
                        f"{name} unit {unit} of request {request}: {wrong.size} words wrong, word {wrong[0]} is "
                        f"{_name(int(row[wrong[0]]))}"
                    )
        return lines

    def disturbed(self, value: int, blocks: Sequence[int], slot: int) -> list[str]:
        """Return units that belong to nobody and yet were written to since they were filled with `value`."""
        lines = []
        for name, pool in self._pools.items():
            for _, units in _portions(_units(name, blocks, slot)):
                for unit, row, wrong in _differences(units, pool.read(units), np.uint64(value)):
                    lines.append(f"{name} unit {unit}, free: word {wrong[0]} is {_name(int(row[wrong[0]]))}")
        return lines


def _units(group: str, blocks: Sequence[int], slot: int) -> list[int]:
    return [slot] if group == "state" else list(blocks)


def _portions(units: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the units in portions, each with the place of its first."""
    for first in range(0, len(units), _PORTION):
        yield first, units[first : first + _PORTION]


def _expected(request: int, group: int, first: int, count: int, words: int) -> Words:
    """Return `count` units of a request in a group, from unit `first` of its prompt on."""
    units = np.arange(first, first + count, dtype=np.uint64) << np.uint64(16)
    return (units | np.uint64(request << 36 | group << 32))[:, None] | _PLACE[:words]


def _differences(
    units: list[int], found: Words, expected: Words | np.uint64
) -> Iterator[tuple[int, Words, NDArray[np.intp]]]:
    """Yield each unit that is not as expected: its number, its words, and the places of those that are wrong."""
    is_wrong = found != expected
    for index in np.flatnonzero(is_wrong.any(axis=1)):
        yield units[index], found[index], np.flatnonzero(is_wrong[index])


def _name(word: int) -> str:
    for value, name in ((FREE, "untouched"), (GONE, "of a source that was given back")):
        if word == value:
            return name
    place, index, group, request = word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32 & 0xF, word >> 36
    return f"word {place} of unit {index} in group {group} of request {request}"
