"""Packed weights kept on disk: the same tensors come back, of this checkpoint and part only, or none."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import engine.model.weight_cache as weight_cache
from engine.model.checkpoint import WeightsError
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


@contextlib.contextmanager
def limit(seconds=30.0):
    """Fail where the body waits for what never comes."""
    woken = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"took more than {seconds:g} s"))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, woken)


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


@pytest.mark.parametrize(
    "damage",
    ["cut", "manifest", "sums", "no sums", "no list", "no manifest", "no object", "lost", "header", "one more", "pipe"],
)
def test_a_damaged_cache_is_made_again(oracle, tmp_path, damage):
    folder = oracle.folder("mx")
    wanted, _ = read(folder, tmp_path)
    [kept] = tmp_path.iterdir()
    if damage == "cut":
        part = kept / "part-001.safetensors"
        part.write_bytes(part.read_bytes()[:-1])
    elif damage == "manifest":
        (kept / "manifest.json").write_text(json.dumps({"checkpoint": "another"}))
    elif damage == "sums":
        manifest = json.loads((kept / "manifest.json").read_text())
        manifest["sums"]["embed.weight"].append(0)
        (kept / "manifest.json").write_text(json.dumps(manifest))
    elif damage in ("no sums", "no list"):
        manifest = json.loads((kept / "manifest.json").read_text())
        manifest["sums"] = 5 if damage == "no sums" else manifest["sums"] | {"embed.weight": 5}
        (kept / "manifest.json").write_text(json.dumps(manifest))
    elif damage == "pipe":
        (kept / "manifest.json").unlink()
        os.mkfifo(kept / "manifest.json")
    elif damage == "no object":
        (kept / "manifest.json").write_text("[]")
    elif damage == "lost":
        (kept / "part-002.safetensors").unlink()
    elif damage == "header":
        part = kept / "part-001.safetensors"
        part.write_bytes(part.read_bytes().replace(b"layers.1.attn.wq_a", b"layers.1.attn.wq_A", 1))
    elif damage == "one more":
        shutil.copy(kept / "part-001.safetensors", kept / "part-009.safetensors")
    else:
        (kept / "manifest.json").unlink()
    with limit():
        found, told = read(folder, tmp_path)
    assert same(found, wanted)
    assert "is not used and made again" in told
    assert "kept in the cache" in told
    assert "from the cache" in read(folder, tmp_path)[1]


@pytest.mark.parametrize("large", [1000, 32 << 20], ids=["rows at a time", "whole"])
def test_values_that_are_not_those_that_were_written_are_refused_and_made_again(oracle, tmp_path, monkeypatch, large):
    monkeypatch.setattr(weight_cache, "LARGE_BYTES", large)
    folder = oracle.folder("mx")
    wanted, _ = read(folder, tmp_path)
    (part,) = tmp_path.glob("*/part-ends.safetensors")
    begin = int.from_bytes(part.read_bytes()[:8], "little") + 8
    _, last = json.loads(part.read_bytes()[8:begin])["embed.weight"]["data_offsets"]
    with part.open("r+b") as file:
        file.seek(begin + last - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WeightsError, match=r"removed; start again: part-ends\.safetensors: embed\.weight is not what"):
        read(folder, tmp_path)
    found, told = read(folder, tmp_path)
    assert same(found, wanted)
    assert "kept in the cache" in told


@pytest.mark.parametrize("name", ["file/cache", 300 * "x"])
def test_weights_are_served_though_they_can_not_be_kept(oracle, tmp_path, name):
    (tmp_path / "file").write_text("")
    found, told = read(oracle.folder("mx"), tmp_path / name)
    assert same(found, read(oracle.folder("mx"))[0])
    assert "weights: not kept in the cache" in told


def test_a_damaged_cache_that_can_not_be_removed_is_to_be_deleted(oracle, tmp_path, monkeypatch):
    read(oracle.folder("mx"), tmp_path)
    (part,) = tmp_path.glob("*/part-ends.safetensors")
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    monkeypatch.setattr(weight_cache.shutil, "rmtree", lambda *_, **options: None)
    with pytest.raises(WeightsError, match=r"damaged, delete it: part-ends\.safetensors: "):
        read(oracle.folder("mx"), tmp_path)


def test_what_is_not_taken_to_its_end_is_not_kept(oracle, tmp_path):
    folder = oracle.folder("mx")
    parts = read_weights(
        folder, load_config(folder), dtype=torch.bfloat16, device=CPU, keeps_packed=True, shard=Shard(), cache=tmp_path
    )
    next(parts)
    parts.close()
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_that_was_written_anew_is_another_one(edit, tmp_path):
    """Even where model_fingerprint sees no difference: of large files it looks at samples."""
    folder = edit("mx", lambda tensors: None)
    cache = tmp_path / "cache"
    read(folder, cache)
    path = folder / "model.safetensors"
    before = path.stat().st_mtime_ns
    os.utime(path, ns=(before, before + 1))
    assert "kept in the cache" in read(folder, cache)[1]


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_kept(edit, tmp_path):
    folder, lines = edit("mx", lambda tensors: None), []
    parts = read_weights(
        folder, load_config(folder), dtype=torch.bfloat16, device=CPU, keeps_packed=True, shard=Shard(),
        progress=lines.append, cache=tmp_path / "cache",
    )  # fmt: skip
    next(parts)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    for _ in parts:
        pass
    assert any("not kept in the cache" in line and "changed while it was loaded" in line for line in lines)
    assert os.listdir(tmp_path / "cache") == []


def test_what_a_dead_process_left_half_written_is_removed_and_what_one_writes_is_not(oracle, tmp_path):
    folder = oracle.folder("mx")
    read(folder, tmp_path)
    [kept] = tmp_path.iterdir()
    shutil.rmtree(kept)
    dead, alive = (tmp_path / f".{kept.name}.{which}" for which in ("dead", "alive"))
    for left in (dead, alive):
        left.mkdir()
        (left / "part-000.safetensors").write_bytes(bytes(10))
    with weight_cache._locked(alive):
        assert "kept in the cache" in read(folder, tmp_path)[1]
    assert sorted(tmp_path.iterdir()) == sorted([alive, kept])


def test_a_full_disk_is_given_back_at_once(oracle, tmp_path, monkeypatch):
    def write(folder, part, tensors):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "part").write_bytes(bytes(10))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_cache, "_write_part", write)
    folder, lines = oracle.folder("mx"), []
    parts = read_weights(
        folder, load_config(folder), dtype=torch.bfloat16, device=CPU, keeps_packed=True, shard=Shard(),
        progress=lines.append, cache=tmp_path,
    )  # fmt: skip
    next(parts)
    assert os.listdir(tmp_path) == []
    assert len(list(parts)) == load_config(folder).num_hidden_layers
    assert sum("not kept in the cache" in line for line in lines) == 1
