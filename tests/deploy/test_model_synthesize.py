"""`isthmus model synthesize`: official names, forms and shapes, values that compute, one seed one checkpoint."""

from __future__ import annotations

import collections
import hashlib
import json
import math
from pathlib import Path

import pytest
import torch

from deploy import cli, model_synthesize
from deploy.model_synthesize import plan_shards, synthesize
from deploy.synthetic_checkpoint import draw, make_config, tensors_of
from engine.flags import ConfigError
from engine.model.config import load_config, parse_config
from engine.model.shard_files import DTYPE_BITS, ShardFiles, StoredTensor, read_headers
from engine.model.stored_forms import check_forms, form_of
from engine.model.tensor_specs import tensor_specs
from engine.model.weights import load_weights

# Of layers that are hashed, of each kind, and of the drafting block; as published.
PUBLISHED = {
    "embed.weight": ("BF16", (129280, 4096)),
    "hc_head_fn": ("F32", (4, 16384)),
    "layers.0.attn.wq_b.weight": ("F8_E4M3", (32768, 1024)),
    "layers.0.attn.wq_b.scale": ("F8_E8M0", (256, 8)),
    "layers.0.attn.wo_a.weight": ("F8_E4M3", (8192, 4096)),
    "layers.0.attn.wo_b.scale": ("F8_E8M0", (32, 64)),
    "layers.0.attn.attn_sink": ("F32", (64,)),
    "layers.0.ffn.gate.tid2eid": ("I64", (129280, 6)),
    "layers.0.ffn.experts.255.w2.weight": ("I8", (4096, 1024)),
    "layers.0.ffn.experts.255.w2.scale": ("F8_E8M0", (4096, 64)),
    "layers.0.ffn.shared_experts.w1.scale": ("F8_E8M0", (16, 32)),
    "layers.2.attn.compressor.ape": ("F32", (4, 1024)),
    "layers.2.attn.indexer.wq_b.scale": ("F8_E8M0", (64, 8)),
    "layers.2.attn.indexer.weights_proj.weight": ("BF16", (64, 4096)),
    "layers.2.attn.indexer.compressor.wkv.weight": ("BF16", (256, 4096)),
    "layers.3.attn.compressor.ape": ("F32", (128, 512)),
    "layers.3.ffn.gate.bias": ("F32", (256,)),
    "layers.3.hc_ffn_base": ("F32", (24,)),
    "mtp.0.e_proj.weight": ("F8_E4M3", (4096, 4096)),
    "mtp.0.e_proj.scale": ("F8_E8M0", (32, 32)),
    "mtp.0.ffn.experts.0.w1.weight": ("I8", (2048, 2048)),
    "mtp.0.enorm.weight": ("BF16", (4096,)),
}
NVFP4 = {
    "layers.0.ffn.experts.255.w2.weight": ("U8", (4096, 1024)),
    "layers.0.ffn.experts.255.w2.weight_scale": ("F8_E4M3", (4096, 128)),
    "layers.0.ffn.experts.255.w2.weight_scale_2": ("F32", ()),
    "layers.0.ffn.experts.255.w2.input_scale": ("F32", ()),
}


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
def test_names_forms_and_shapes_are_the_published_ones(experts):
    raw = make_config("v4-flash", layers=4, experts=experts, has_mtp=True)
    shards = plan_shards(tensors_of(raw, experts), 5 * 10**9)
    drawn = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    for name, published in (PUBLISHED | (NVFP4 if experts == "nvfp4" else {})).items():
        if experts == "mxfp4" or not name.startswith("layers.0.ffn.experts.") or name in NVFP4:
            assert (drawn[name].dtype, drawn[name].shape) == published
    stored = {
        tensor.name: StoredTensor(shard.name, tensor.dtype, tensor.shape, start, tensor.num_bytes)
        for shard in shards
        for tensor, start in zip(shard.tensors, shard.starts, strict=True)
    }
    config = parse_config(raw)
    assert check_forms(ShardFiles(Path(), {}, stored, []), tensor_specs(config), config) == []
    assert config.stored_experts == experts
    assert all(start % (DTYPE_BITS[drawn[name].dtype] // 8) == 0 for name, (_, _, _, start, _) in stored.items())
    assert all(shard.num_bytes < 5.01e9 for shard in shards)


def small(folder: Path, experts: str = "mxfp4", *, seed: int = 0, shard_bytes: int = 1_000_000) -> Path:
    raw = make_config("tiny", layers=0, experts=experts, has_mtp=True) | {"vocab_size": 512}
    synthesize(folder, raw, experts, seed=seed, shard_bytes=shard_bytes, say=lambda _: None)
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = read_headers(folder)
    return {
        name: hashlib.sha256((folder / file).read_bytes()[start : start + size]).hexdigest()
        for name, (file, _, _, start, size) in files.tensors.items()
    }


def test_the_seed_decides_the_bytes_and_no_two_tensors_are_alike(tmp_path, monkeypatch):
    first = digests(small(tmp_path / "a"))
    assert digests(small(tmp_path / "b", shard_bytes=300_000)) == first
    other = digests(small(tmp_path / "c", seed=1))
    long = [name for name in first if ".experts." in name or name.endswith("wq_b.weight")]
    assert all(first[name] != other[name] for name in long)
    codes = [first[name] for name in long if name.endswith("weight")]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
def test_what_is_written_loads_and_has_sane_values(tmp_path, experts):
    folder = small(tmp_path / "model", experts)
    loaded = load_weights(folder, load_config(folder), dtype=torch.float32).tensors
    for name, tensor in loaded.items():
        assert bool(tensor.isfinite().all()), name
        if name.endswith(("w13", "w2", "wq_b.weight", "wo_b.weight", "wkv.weight", "gate.weight")):
            spread = float(tensor.std()) * math.sqrt(tensor.shape[-1])
            assert 0.4 < spread < 2.5, (name, spread)
    ids = loaded["layers.0.ffn.gate.tid2eid"]
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert set(ids.flatten().tolist()) == set(range(8))


def test_scalars_of_nvfp4_differ_by_expert_and_drafts_stay_mxfp4(tmp_path):
    folder = small(tmp_path / "model", "nvfp4")
    found, tensors = digests(folder), read_headers(folder).tensors
    for suffix in ("weight_scale_2", "input_scale"):
        by_expert = {e: [found[f"layers.1.ffn.experts.{e}.{w}.{suffix}"] for w in ("w1", "w3", "w2")] for e in range(8)}
        assert all(w1 == w3 != w2 for w1, w3, w2 in by_expert.values())
        assert len({w1 for w1, _, _ in by_expert.values()}) == 8
    forms = collections.Counter(
        (name.split(".")[0], form_of(tensors, name))
        for name in tensors
        if ".experts." in name and name.endswith(".weight") and "shared" not in name
    )
    assert forms == {("layers", "nvfp4"): 6 * 24, ("mtp", "mxfp4"): 24}


def test_pieces_join_to_the_whole_tensor():
    raw = make_config("tiny", layers=1, experts="mxfp4", has_mtp=False) | {"vocab_size": 512}
    ids = next(tensor for tensor in tensors_of(raw, "mxfp4") if tensor.law.kind == "ids")
    assert ids.row_elements == 2
    assert draw(ids, 0, 0, 64).shape == (32, 2)
    assert draw(ids, 0, 0, 64).tolist() != draw(ids, 0, 64, 64).tolist()


def test_the_command_says_what_it_needs_and_that_there_is_no_tokenizer(tmp_path, capsys):
    out = tmp_path / "deep" / "model"
    assert cli.main(["model", "synthesize", str(out), "--like", "tiny", "--layers", "1"]) == 0
    told = capsys.readouterr().out
    assert "GB are needed" in told
    assert "GB/s" in told
    assert "no tokenizer is made up" in told
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_progress_tells_speed_and_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(model_synthesize, "_TELL_EVERY_S", 0.0)
    said: list[str] = []
    raw = make_config("tiny", layers=1, experts="mxfp4", has_mtp=False)
    synthesize(tmp_path / "model", raw, "mxfp4", say=said.append)
    assert said[-1].startswith("written 0.0 of 0.0 GB, ")
    assert said[-1].endswith(" GB/s, 0 s left")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "44", "--like", "v4-flash"], "--layers 44: v4-flash has 43; lower it"),
        (["--layers", "-1", "--like", "tiny"], "--layers -1"),
        (["--shard-gb", "0", "--like", "tiny"], "--shard-gb 0: wanted"),
        (["--like", "tiny", "--layer", "3"], "--layer: no such flag; did you mean --layers"),
    ],
)
def test_wrong_usage_is_told_by_name(tmp_path, capsys, words, message):
    assert cli.main(["model", "synthesize", str(tmp_path / "model"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_folder_with_something_in_it_or_too_little_room_is_refused(tmp_path, monkeypatch):
    (tmp_path / "note").touch()
    raw = make_config("tiny", layers=1, experts="mxfp4", has_mtp=False)
    for out in (tmp_path, tmp_path / "note"):
        with pytest.raises(ConfigError, match="there is something already; name a new folder"):
            synthesize(out, raw, "mxfp4")
    usage = collections.namedtuple("usage", "total used free")(0, 0, 1_000_000)
    monkeypatch.setattr(model_synthesize.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"0\.04 GB are needed, 0\.00 GB are free; make room"):
        synthesize(tmp_path / "model", raw, "mxfp4")
    assert not (tmp_path / "model").exists()
