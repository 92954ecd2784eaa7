"""The checksum of units: what it is, that parts add up, and that no single change escapes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import checksum
from kv_transfer.checksum import MODULUS, units_checksum

WORDS, UNITS = 6, 9


def make_pool(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (UNITS, 8 * WORDS), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plain(pool: torch.Tensor, units: list[int], first: int = 0) -> int:
    total = 0
    for place, unit in enumerate(units, first):
        data = pool[unit].numpy().tobytes()
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
        total += fold(sum(fold(word) * odd(j) for j, word in enumerate(words)) % MODULUS) * odd((1 << 40) + place)
    return total % MODULUS


def fold(x: int) -> int:
    return x ^ (x >> 32)


def odd(n: int) -> int:
    x = (n + 1) * 0x9E3779B97F4A7C15 % MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31) | 1


@given(st.integers(0, 1000), st.permutations(range(UNITS)), st.integers(0, UNITS), st.integers(0, 1 << 20))
@settings(max_examples=50, deadline=None)
def test_it_is_the_sum_of_its_definition_and_parts_add_up(seed: int, order: list[int], cut: int, first: int) -> None:
    pool = make_pool(seed)
    whole = units_checksum(pool, order, first=first)
    assert whole == plain(pool, order, first)
    parts = units_checksum(pool, order[:cut], first=first) + units_checksum(pool, order[cut:], first=first + cut)
    assert parts % MODULUS == whole


def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, order = make_pool(1), [4, 0, 8, 2, 7]
    monkeypatch.setattr(checksum, "_PORTION_BYTES", 16 * WORDS)
    assert units_checksum(pool, order) == plain(pool, order)


def test_every_changed_bit_and_every_exchange_of_units_is_seen() -> None:
    pool, order = make_pool(2), [5, 1, 3]
    right = units_checksum(pool, order)
    draw = random.Random(3)
    for _ in range(200):
        wrong = pool.clone()
        wrong[draw.choice(order), draw.randrange(8 * WORDS)] ^= 1 << draw.randrange(8)
        assert units_checksum(wrong, order) != right
    assert units_checksum(pool, [1, 5, 3]) != right
    for _ in range(200):  # two wrong signs, which a plain sum would not see
        wrong, places = pool.clone(), [(unit, 8 * word + 7) for unit in order for word in range(WORDS)]
        for unit, byte in draw.sample(places, 2):
            wrong[unit, byte] ^= 0x80
        assert units_checksum(wrong, order) != right
    swapped = pool.clone().view(torch.int64)
    swapped[5, 1], swapped[1, 0] = swapped[1, 0].clone(), swapped[5, 1].clone()  # word 1 of the first, 0 of the second
    assert units_checksum(swapped.view(torch.uint8), order) != right
    pool[0] ^= 0xFF  # not among the units
    assert units_checksum(pool, order) == right


def test_what_is_no_unit_is_refused() -> None:
    with pytest.raises(IndexError, match=r"units -1\.\.2 of a pool of 9"):
        units_checksum(make_pool(0), [2, -1])
    with pytest.raises(ValueError, match="units of 12 bytes"):
        units_checksum(torch.zeros(2, 12, dtype=torch.uint8), [0])
