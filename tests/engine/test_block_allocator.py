"""Blocks and slots: promises are kept, runs are adjacent, books balance."""

import random

import pytest

from engine.block_allocator import BlockAllocator, SlotAllocator
from engine.errors import NoCapacity


def test_blocks_of_one_request_are_adjacent_when_the_pool_allows_it() -> None:
    blocks = BlockAllocator(16)
    first = blocks.admit(4)
    second = blocks.admit(4)
    blocks.release(first)
    assert blocks.admit(6) == list(range(8, 14))
    assert second == [4, 5, 6, 7]


def test_scattered_blocks_are_used_when_no_run_is_left() -> None:
    blocks = BlockAllocator(8)
    held = [blocks.admit(1)[0] for _ in range(8)]
    blocks.release(held[::2])
    assert sorted(blocks.admit(4)) == [0, 2, 4, 6]


def test_promised_blocks_are_not_given_to_others() -> None:
    blocks = BlockAllocator(10)
    blocks.admit(4, later=4)
    with pytest.raises(NoCapacity, match="2 of 10 are free"):
        blocks.admit(3)
    assert blocks.available == 2
    assert len(blocks.grow(4)) == 4
    assert blocks.available == 2


def test_refused_admission_takes_nothing() -> None:
    blocks = BlockAllocator(4)
    with pytest.raises(NoCapacity):
        blocks.admit(3, later=2)
    assert (blocks.num_free, blocks.num_promised) == (4, 0)


def test_block_released_twice_is_caught() -> None:
    blocks = BlockAllocator(4)
    held = blocks.admit(2)
    blocks.release(held)
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release(held)


def test_books_balance_over_random_traffic() -> None:
    rng, blocks = random.Random(7), BlockAllocator(64)
    live: list[tuple[list[int], int]] = []
    for _ in range(5000):
        if live and rng.random() < 0.5:
            held, promise = live.pop(rng.randrange(len(live)))
            if promise and rng.random() < 0.5:
                held, promise = held + blocks.grow(1), promise - 1
                live.append((held, promise))
            else:
                blocks.release(held, unused_promise=promise)
        else:
            now, later = rng.randrange(1, 9), rng.randrange(0, 4)
            try:
                live.append((blocks.admit(now, later=later), later))
            except NoCapacity:
                assert now + later > blocks.available
        owned = [b for held, _ in live for b in held]
        assert len(owned) == len(set(owned)) == 64 - blocks.num_free
        assert blocks.num_promised == sum(p for _, p in live) <= blocks.num_free


def test_slots_run_out_with_a_remedy() -> None:
    slots = SlotAllocator(2)
    assert [slots.take(), slots.take()] == [0, 1]
    with pytest.raises(NoCapacity, match="max_num_seqs"):
        slots.take()
    slots.release(0)
    assert slots.take() == 0
