"""plan_push against a loop that really copies bytes; manifest and rank pairing against their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.landing import GroupManifest
from kv_transfer.layout import KVLayout, make_group
from kv_transfer.plan import Piece, destinations_of, manifest, plan_push, source_rank_for

NUM_UNITS = 12


def small_layout(block_groups: int = 2) -> KVLayout:
    names = ["csa_kv", "csa_index", "hca_kv"][:block_groups]
    groups = [make_group(name, "block", [("rows", 1, 1 + i, "fp32", 4)]) for i, name in enumerate(names)]
    return KVLayout(block_tokens=4, groups=(*groups, make_group("state", "slot", [("window", 1, 3, "fp32", 4)])))


def pools_of(layout: KVLayout, start: int) -> dict[str, bytearray]:
    counter = itertools.count(start)
    return {g.name: bytearray(next(counter) * 37 % 251 for _ in range(g.unit_bytes * NUM_UNITS)) for g in layout.groups}


ids = st.lists(st.integers(0, NUM_UNITS - 1), unique=True, max_size=NUM_UNITS)


@st.composite
def pushes(draw: st.DrawFn) -> dict[str, Any]:
    source, target = draw(ids), draw(ids)
    last = draw(st.integers(0, min(len(source), len(target))))
    slots = draw(st.one_of(st.just((None, None)), st.tuples(st.integers(0, 11), st.integers(0, 11))))
    return {
        "source_blocks": source,
        "target_blocks": target,
        "first": draw(st.integers(0, last)),
        "last": last,
        "source_slot": slots[0],
        "target_slot": slots[1],
    }


@settings(max_examples=150, deadline=None)
@given(push=pushes(), groups=st.integers(0, 3))
def test_a_plan_copies_what_a_loop_over_positions_copies(push: dict[str, Any], groups: int) -> None:
    layout = small_layout(groups)
    source, target = pools_of(layout, 1), pools_of(layout, 1000)
    expected = {name: bytearray(pool) for name, pool in target.items()}
    for group in layout.groups:
        size = group.unit_bytes
        pairs = [(push["source_slot"], push["target_slot"])] if push["source_slot"] is not None else []
        if group.unit == "block":
            pairs = [(push["source_blocks"][i], push["target_blocks"][i]) for i in range(push["first"], push["last"])]
        for s, t in pairs:
            expected[group.name][t * size : (t + 1) * size] = source[group.name][s * size : (s + 1) * size]
    for p in plan_push(layout, **push).pieces:
        target[p.pool][p.target : p.target + p.num_bytes] = source[p.pool][p.source : p.source + p.num_bytes]
    assert target == expected


@settings(max_examples=150, deadline=None)
@given(push=pushes())
def test_pieces_are_sorted_and_none_could_be_merged(push: dict[str, Any]) -> None:
    pieces = plan_push(small_layout(), **push).pieces
    for left, right in itertools.pairwise(pieces):
        if left.pool == right.pool:
            assert left.source < right.source
            touching = left.source + left.num_bytes == right.source and left.target + left.num_bytes == right.target
            assert not touching


def test_neighbours_on_one_side_only_are_not_merged() -> None:
    layout = small_layout(1)
    size = layout.groups[0].unit_bytes
    plan = plan_push(layout, source_blocks=[3, 4], target_blocks=[8, 7], first=0, last=2)
    assert plan.pieces == (Piece("csa_kv", 3 * size, 8 * size, size), Piece("csa_kv", 4 * size, 7 * size, size))


def test_a_million_tokens_in_one_run_are_one_piece_per_group() -> None:
    layout = small_layout(3)
    blocks = range(262_144)
    plan = plan_push(
        layout, source_blocks=blocks, target_blocks=blocks, first=0, last=len(blocks), source_slot=0, target_slot=0
    )
    assert len(plan.pieces) == 4
    assert plan.num_bytes == len(blocks) * layout.block_bytes + layout.slot_bytes


def test_blocks_are_paired_from_the_start_when_one_list_is_longer() -> None:
    layout = small_layout(1)
    size = layout.groups[0].unit_bytes
    plan = plan_push(layout, source_blocks=[9, 2], target_blocks=[5, 0, 11], first=0, last=2)
    assert {(p.source // size, p.target // size) for p in plan.pieces} == {(9, 5), (2, 0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last": 4}, "source_blocks has 3 blocks"),
        ({"target_blocks": [1]}, "target_blocks has 1 blocks"),
        ({"first": 3, "last": 2}, "first <= last"),
        ({"first": -1}, "first <= last"),
        ({"source_blocks": [1, -2, 3]}, "source_blocks: block id -2 is negative"),
        ({"target_blocks": [4, 5, 4]}, "target_blocks: a block id occurs twice"),
        ({"source_slot": 1}, "both or neither"),
        ({"source_slot": 1, "target_slot": -1}, "not negative"),
    ],
)
def test_impossible_pushes_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    push = {"source_blocks": [1, 2, 3], "target_blocks": [4, 5, 6], "first": 0, "last": 3} | change
    with pytest.raises(ValueError, match=message):
        plan_push(small_layout(), **push)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_manifest_counts_whole_blocks_and_one_state_record(num_tokens: int, blocks: int) -> None:
    layout = small_layout(1)
    kv, state = layout.groups
    assert manifest(layout, num_tokens) == (
        GroupManifest("csa_kv", blocks, blocks * kv.unit_bytes),
        GroupManifest("state", 1, state.unit_bytes),
    )


def test_an_empty_prompt_has_no_manifest() -> None:
    with pytest.raises(ValueError, match="at least one"):
        manifest(small_layout(), 0)


@given(num_sources=st.integers(1, 9), num_targets=st.integers(1, 9))
def test_every_decode_rank_has_exactly_one_writer(num_sources: int, num_targets: int) -> None:
    written = [
        (s, d) for s in range(num_sources) for d in destinations_of(s, num_sources=num_sources, num_targets=num_targets)
    ]
    assert sorted(d for _, d in written) == list(range(num_targets))
    assert all(source_rank_for(d, num_sources) == s for s, d in written)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill rank 2 of 2"):
        destinations_of(2, num_sources=2, num_targets=4)
