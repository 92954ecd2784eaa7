"""Packed weights kept on disk: the same tensors come back, of this checkpoint and part only, or none."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import engine.model.weight_cache as weight_cache
from engine.model.config import load_config
from engine.model.shard import Shard
from engine.model.weight_cache import read_weights

TESTS = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def _module(name, path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


four_bits = _module("engine_four_bits", TESTS / "engine/four_bits.py")


def read(folder, cache="", *, shard=Shard(), packs=True, dtype=torch.bfloat16):  # noqa: B008 (a Struct, frozen)
    """Return all tensors, and what was said."""
    lines = []
    parts = read_weights(
        folder, load_config(folder), dtype=dtype, device=CPU, keeps_packed=packs, shard=shard,
        progress=lines.append, cache=cache,
    )  # fmt: skip
    return {name: tensor for _, part in parts for name, tensor in part.items()}, "\n".join(lines)


def same(a, b):
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("large", [1000, 32 << 20], ids=["rows at a time", "whole"])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(1, 2, True)], ids=["whole", "inner", "expert"])
def test_what_was_kept_comes_back(edit, tmp_path, monkeypatch, shard, large):
    monkeypatch.setattr(weight_cache, "LARGE_BYTES", large)
    folder = edit("mx", lambda tensors: four_bits.to_nvfp4(tensors, r"layers\.1.*\.experts\..*\.weight"))
    wanted, _ = read(folder, shard=shard)
    first, told = read(folder, tmp_path / "cache", shard=shard)
    assert "weights: kept in the cache" in told
    again, told = read(folder, tmp_path / "cache", shard=shard)
    assert same(first, wanted)
    assert same(again, wanted)
    assert "weights: from the cache" in told
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing half-written stays


def test_other_parts_dtypes_and_checkpoints_have_caches_of_their_own(oracle, edit, tmp_path):
    changed = edit("mx", lambda tensors: tensors["norm.weight"].mul_(2))
    cache = tmp_path / "cache"
    for number, options in enumerate(
        [{}, {"shard": Shard(0, 2)}, {"shard": Shard(1, 2)}, {"dtype": torch.float32}, {"packs": False}], 1
    ):
        assert "kept" in read(oracle.folder("mx"), cache, **options)[1]
        assert len(list(cache.iterdir())) == number
    loaded, told = read(changed, cache)
    assert "kept" in told
    assert same(loaded, read(changed)[0])


@pytest.mark.parametrize("damage", ["cut", "manifest", "no manifest"])
def test_a_damaged_cache_is_made_again(oracle, tmp_path, damage):
    folder = oracle.folder("mx")
    wanted, _ = read(folder, tmp_path)
    [kept] = tmp_path.iterdir()
    if damage == "cut":
        part = kept / "part-001.safetensors"
        part.write_bytes(part.read_bytes()[:-1])
    elif damage == "manifest":
        (kept / "manifest.json").write_text(json.dumps({"checkpoint": "another"}))
    else:
        (kept / "manifest.json").unlink()
    found, told = read(folder, tmp_path)
    assert same(found, wanted)
    assert "is not used and made again" in told
    assert "kept in the cache" in told
    assert "from the cache" in read(folder, tmp_path)[1]


def test_weights_are_served_though_they_can_not_be_kept(oracle, tmp_path):
    (tmp_path / "file").write_text("")
    found, told = read(oracle.folder("mx"), tmp_path / "file" / "cache")
    assert same(found, read(oracle.folder("mx"))[0])
    assert "weights: not kept in the cache" in told


def test_what_is_not_taken_to_its_end_is_not_kept(oracle, tmp_path):
    folder = oracle.folder("mx")
    parts = read_weights(
        folder, load_config(folder), dtype=torch.bfloat16, device=CPU, keeps_packed=True, shard=Shard(), cache=tmp_path
    )
    next(parts)
    parts.close()
    assert os.listdir(tmp_path) == []
