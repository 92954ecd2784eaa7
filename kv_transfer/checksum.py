"""Checksums of cache units, the same number on every device, so that what landed can be compared with what was sent.

    fold(x) = x ^ (x >> 32)                                            (unsigned)
    unit:   sum over its 64-bit words w[j] of fold(w[j]) * a[j]        group: sum over units u[i] of fold(u[i]) * b[i]

modulo 2**64, i being the unit's place in the prompt; a and b are odd numbers that look random (splitmix64; Steele, Lea,
Flood 2014). Neither step loses a bit, so one changed word always changes the sum; the fold brings high bits down, so
that several do not cancel each other either, but by chance. It is no defence against anybody who means harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MODULUS = 1 << 64
_WORD_BYTES = 8
_PLACES = 1 << 40  # where the factors of units begin, beyond those of words
# Units are read in portions: products of all of them at once would take as much memory as the cache itself.
_PORTION_BYTES = 32 << 20


def units_checksum(pool: Tensor, units: Sequence[int], *, first: int = 0) -> int:
    """Return the sum of `units` of a pool [num_units, unit_bytes] uint8, the first of which is number `first`.

    Sums of parts of a prompt add up, modulo MODULUS, to the sum of the whole. Waits for the device.
    Raises ValueError for units that are no whole number of words; IndexError for one outside the pool.
    """
    num_units, unit_bytes = pool.shape
    if unit_bytes % _WORD_BYTES:
        raise ValueError(f"units of {unit_bytes} bytes: must be a multiple of {_WORD_BYTES}")
    if any(not 0 <= unit < num_units for unit in units):
        raise IndexError(f"units {min(units)}..{max(units)} of a pool of {num_units}")
    words = pool.view(torch.int64)
    factors = _odd_numbers(0, words.shape[1], pool.device)
    step = max(1, _PORTION_BYTES // unit_bytes)
    total = torch.zeros((), dtype=torch.int64, device=pool.device)
    for at in range(0, len(units), step):
        part = torch.tensor(units[at : at + step], device=pool.device)
        places = _odd_numbers(_PLACES + first + at, len(part), pool.device)
        sums = _fold(words[part]).mul_(factors).sum(1)
        total += _fold(sums).mul_(places).sum()
    return int(total) % MODULUS


def _fold(words: Tensor) -> Tensor:
    """Xor the high halves of int64 words into the low ones, in place."""
    return words.bitwise_xor_((words >> 32).bitwise_and_(0xFFFFFFFF))


@lru_cache(maxsize=64)
def _odd_numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Return splitmix64 of first.. with the lowest bit set, as int64 [count]."""
    x = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)
