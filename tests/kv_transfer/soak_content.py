"""What the soak moves: pools whose every 8-byte word names the request, group, unit and place that it belongs to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_transfer.landing import PoolAddress
from kv_transfer.layout import KVLayout, make_group

BLOCK_TOKENS = 16
NUM_BLOCKS, NUM_SLOTS = 512, 16
DEADLINE_S = 0.5
"""Of a write."""

MAX_BLOCKS = 96
"""Of one prompt: 4 MB, so that a write lasts long enough to be hit."""

LAYOUT = KVLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        make_group("csa_kv", "block", [("rows", 8, 8, "fp32", 128)]),
        make_group("csa_index", "block", [("keys", 8, 8, "fp32", 32)]),
        make_group("hca_kv", "block", [("rows", 4, 1, "fp32", 128)]),
        make_group("state", "slot", [("window", 16, 8, "fp32", 128)]),
    ),
)
FREE, GONE = 0xEEEE_EEEE_EEEE_EEEE, 0xDDDD_DDDD_DDDD_DDDD
"""What units hold that belong to nobody: at the receiver, and at the writer."""

_PLACE = np.arange(1 << 13, dtype=np.uint64)


class Pools:
    """One array [units, words] uint64 for each group of LAYOUT, and scratch."""

    def __init__(self, fill: int) -> None:
        self._arrays = {
            group.name: np.full(
                (NUM_BLOCKS if group.unit == "block" else NUM_SLOTS, group.unit_bytes // 8), fill, dtype=np.uint64
            )
            for group in LAYOUT.groups
        }
        self._scratch = np.zeros((1, 512), dtype=np.uint64)

    @property
    def addresses(self) -> list[PoolAddress]:
        arrays = self._arrays | {"scratch": self._scratch}
        return [
            PoolAddress(name=name, base=array.ctypes.data, unit_bytes=array.shape[1] * 8, num_units=array.shape[0])
            for name, array in arrays.items()
        ]

    def write(self, request: int, blocks: Sequence[int], slot: int) -> None:
        """Write what prefill computes for a request: unit i of its prompt in blocks[i]."""
        for number, (name, array) in enumerate(self._arrays.items()):
            for index, unit in enumerate(_units(name, blocks, slot)):
                array[unit] = _expected(request, number, index, array.shape[1])

    def fill(self, value: int, blocks: Sequence[int], slot: int) -> None:
        for name, array in self._arrays.items():
            array[_units(name, blocks, slot)] = value

    def faults(self, request: int, blocks: Sequence[int], slot: int) -> list[str]:
        """Return what is wrong with a request's units, one line a unit."""
        lines = []
        for number, (name, array) in enumerate(self._arrays.items()):
            for index, unit in enumerate(_units(name, blocks, slot)):
                expected = _expected(request, number, index, array.shape[1])
                if not np.array_equal(array[unit], expected):
                    wrong = np.flatnonzero(array[unit] != expected)
                    lines.append(
                        f"{name} unit {unit} of request {request}: {wrong.size} words wrong, word {wrong[0]} is "
                        f"{_name(int(array[unit, wrong[0]]))}"
                    )
        return lines

    def disturbed(self, value: int, blocks: Sequence[int], slot: int) -> list[str]:
        """Return units that belong to nobody and yet were written to since they were filled with `value`."""
        lines = []
        for name, array in self._arrays.items():
            for unit in _units(name, blocks, slot):
                if (wrong := np.flatnonzero(array[unit] != np.uint64(value))).size:
                    lines.append(f"{name} unit {unit}, free: word {wrong[0]} is {_name(int(array[unit, wrong[0]]))}")
        return lines


def _units(group: str, blocks: Sequence[int], slot: int) -> list[int]:
    return [slot] if group == "state" else list(blocks)


def _expected(request: int, group: int, index: int, words: int) -> NDArray[np.uint64]:
    return _PLACE[:words] | np.uint64(request << 36 | group << 32 | index << 16)


def _name(word: int) -> str:
    for value, name in ((FREE, "untouched"), (GONE, "of a source that was given back")):
        if word == value:
            return name
    place, index, group, request = word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32 & 0xF, word >> 36
    return f"word {place} of unit {index} in group {group} of request {request}"


def resources() -> dict[str, int]:
    """Return what this process holds: bytes of memory that no file backs, and file descriptors."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))}
    return {"bytes": sum(held.values()) * 1024, "fds": len(os.listdir("/proc/self/fd"))}
