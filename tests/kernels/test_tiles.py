"""The table of tiles, and which column and path a device takes."""

from __future__ import annotations

import pytest
import torch

from kernels import tiles, triton_env
from kernels.tiles import TILES, Tile, tile_for, tiles_of


@pytest.fixture
def table(monkeypatch):
    few, many, any_size = (
        Tile({"N": 1}, 4, upto={"tokens": 8}),
        Tile({"N": 2}, 4, upto={"tokens": 64}),
        Tile({"N": 3}, 8),
    )
    monkeypatch.setattr(tiles, "TILES", {"op": {"sm_120": (few, many, any_size), "sm_90": (few,)}})


@pytest.mark.parametrize(("tokens", "n"), [(1, 1), (8, 1), (9, 2), (64, 2), (65, 3)])
def test_the_first_tile_that_is_large_enough_is_taken(table, tokens, n):
    assert tile_for("op", "sm_120", tokens=tokens).constants["N"] == n


def test_a_shape_beyond_every_tile_is_refused(table):
    with pytest.raises(LookupError, match="op on sm_90: no tile"):
        tile_for("op", "sm_90", tokens=9)


def test_a_limit_on_a_shape_that_was_not_given_is_refused(table):
    with pytest.raises(LookupError, match="depends on tokens; given were \\['heads'\\]"):
        tile_for("op", "sm_120", heads=16)


@pytest.mark.parametrize("place", [("other", "sm_120"), ("op", "sm_80")])
def test_an_unknown_operation_or_target_is_refused(table, place):
    with pytest.raises(LookupError, match="no entry for"):
        tiles_of(*place)


@pytest.mark.parametrize("op", sorted(TILES))
def test_every_operation_has_a_tile_for_any_shape_on_every_target(op):
    assert set(TILES[op]) == set(triton_env.ARCHES)
    assert all(not found[-1].upto for found in TILES[op].values())


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((12, 0), "sm_120"), ((12, 1), "sm_120"), ((9, 0), "sm_90"), ((10, 0), "sm_90"), ((8, 9), "sm_120")],
)
def test_a_device_takes_the_tiles_that_fit_it(monkeypatch, capability, arch):
    monkeypatch.setattr(triton_env, "_capability", lambda device: capability)
    assert triton_env.arch_of(torch.device("cuda", 0)) == arch


@pytest.mark.parametrize(("capability", "expected"), [((12, 0), True), ((9, 0), True), ((8, 9), False)])
def test_dependent_launch_begins_with_capability_9(monkeypatch, capability, expected):
    monkeypatch.setattr(triton_env, "_capability", lambda device: capability)
    assert triton_env.HAS_PDL(torch.device("cuda", 0)) is expected


def test_cpu_tensors_take_the_reference_and_no_dependent_launch():
    assert not triton_env.uses_triton(torch.zeros(1))
    assert not triton_env.HAS_PDL(torch.device("cpu"))
