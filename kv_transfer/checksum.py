"""Checksums of cache units, the same number on every device, so that what landed can be compared with what was sent.

    unit:   sum over its 64-bit words w[j] of w[j] * (2 j + 1)        group: sum over units u[i] of u[i] * (2 i + 1)

modulo 2**64, i being the unit's place in the prompt. Odd factors lose no bit: one changed word, or two units that
changed places, always change the sum. It costs one read of the bytes; it is no defence against anybody who means harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

MODULUS = 1 << 64
_WORD_BYTES = 8
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
    factors = _odd_numbers(words.shape[1], pool.device)
    step = max(1, _PORTION_BYTES // unit_bytes)
    total = torch.zeros((), dtype=torch.int64, device=pool.device)
    for at in range(0, len(units), step):
        part = torch.tensor(units[at : at + step], device=pool.device)
        places = 2 * torch.arange(first + at, first + at + len(part), device=pool.device) + 1
        total += ((words[part] * factors).sum(1) * places).sum()
    return int(total) % MODULUS


@lru_cache(maxsize=16)
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    return 2 * torch.arange(count, dtype=torch.int64, device=device) + 1
