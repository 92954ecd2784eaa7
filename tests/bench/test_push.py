"""Places of prompts whose pushes are measured. The measurement itself runs in the dry run of two_gpus.sh transfer."""

import random
from types import SimpleNamespace

import pytest

from bench.push import ORDERS, _places

NUM_BLOCKS = 9


@pytest.fixture
def engine():
    layout = SimpleNamespace(num_blocks_for=lambda tokens: -(-tokens // 256))
    return SimpleNamespace(runner=SimpleNamespace(cache=SimpleNamespace(num_blocks=NUM_BLOCKS, layout=layout)))


@pytest.mark.parametrize("order", ORDERS)
def test_two_prompts_under_way_share_no_block_and_no_slot(engine, order):
    places = _places(engine, 1000, order, random.Random(1))
    assert [place.slot for place in places] == [0, 1]
    for side in ("source", "target"):
        blocks = [block for place in places for block in getattr(place, side)]
        assert len(blocks) == len(set(blocks)) == 8 and set(blocks) <= set(range(NUM_BLOCKS))


def test_blocks_are_neighbours_or_in_other_orders_on_both_sides(engine):
    merged = _places(engine, 1000, "merged", random.Random(1))
    assert merged[1].source == merged[1].target == [4, 5, 6, 7]
    fragmented = _places(engine, 1000, "fragmented", random.Random(1))
    assert fragmented[0].source != fragmented[0].target != [0, 1, 2, 3]
