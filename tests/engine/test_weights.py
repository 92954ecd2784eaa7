"""Loading checkpoints: every stored form, several shards, and a list of names for whatever is wrong."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import load_config
from engine.model.shard_files import read_headers
from engine.model.tensor_specs import tensor_specs
from engine.model.weights import WeightsError, load_weights


def read(folder, **options):
    return load_weights(folder, load_config(folder), **{"dtype": torch.float32, **options})


@pytest.mark.parametrize("name", ["tiny", "mx"])
def test_dequantised_weights_equal_the_oracle_s_bit_for_bit(oracle, name):
    loaded, wanted = read(oracle.folder(name)).tensors, oracle.weights(name)
    config = load_config(oracle.folder(name))
    for key in tensor_specs(config):
        prefix, found, rest = key.partition(".experts.")
        if not found:
            assert torch.equal(loaded[key].double(), wanted[key].double()), key
            continue
        expert, matrix, _ = rest.split(".")
        stack = loaded[f"{prefix}.experts.{'w2' if matrix == 'w2' else 'w13'}"][int(expert)]
        inter = config.moe_intermediate_size
        part = {"w1": stack[:inter], "w2": stack, "w3": stack[inter:]}[matrix]
        assert torch.equal(part, wanted[key].float()), key


def test_bfloat16_keeps_what_must_stay_float32(oracle):
    loaded = read(oracle.folder("mx"), dtype=torch.bfloat16).tensors
    kept = {k for k, v in loaded.items() if v.dtype == torch.float32}
    assert loaded["layers.1.attn.wq_b.weight"].dtype == loaded["layers.0.ffn.experts.w13"].dtype == torch.bfloat16
    for part in ("hc_attn_fn", "attn.compressor.wkv.weight", "attn.attn_sink", "ffn.gate.weight", "attn_norm.weight"):
        assert f"layers.1.{part}" in kept
    assert "head.weight" in kept


def test_draft_tensors_are_read_past_and_reported(oracle):
    lines = []
    loaded = read(oracle.folder("tiny"), progress=lines.append)
    assert loaded.skipped
    assert all(name.startswith("mtp.") for name in loaded.skipped)
    assert not any(name.startswith("mtp.") for name in loaded.tensors)
    assert any(f"{len(loaded.skipped)} tensors of mtp" in line for line in lines)
    assert loaded.num_bytes == sum(t.numel() * t.element_size() for t in loaded.tensors.values())


def test_shards_are_found_through_the_index_scales_in_another_one(oracle, tmp_path):
    tensors = load_file(oracle.folder("mx") / "model.safetensors")
    parts = {
        "model-00001-of-00002.safetensors": {k: v for k, v in tensors.items() if not k.endswith(".scale")},
        "model-00002-of-00002.safetensors": {k: v for k, v in tensors.items() if k.endswith(".scale")},
    }
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(oracle.config("mx")))
    whole, sharded = read(oracle.folder("mx")).tensors, read(tmp_path).tensors
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[k], sharded[k]) for k in whole)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-00002-of-00002"):
        read(tmp_path)


def test_float32_scales_are_read_by_value(oracle, edit):
    def change(tensors):
        for key in [k for k in tensors if k.endswith(".scale")]:
            tensors[key] = tensors[key].float()

    whole, edited = read(oracle.folder("mx")).tensors, read(edit("mx", change)).tensors
    assert all(torch.equal(whole[k], edited[k]) for k in whole)


W2 = "layers.1.ffn.experts.2.w2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{W2}.weight"), rf"{W2}\.weight: missing"),
        (lambda t: t.pop(f"{W2}.scale"), rf"{W2}\.scale: missing, its weight is quantised"),
        (lambda t: t.update({"layers.9.attn.wkv.weight": torch.zeros(1)}), "layers.9.attn.wkv.weight: not part"),
        (lambda t: t.update({"layers.1.attn.kv_norm.scale": torch.zeros(1)}), "kv_norm.scale: not part"),
        (lambda t: t.update({"norm.weight": torch.ones(64)}), r"norm.weight: shape \[64\].*wanted \[128\]"),
        (lambda t: t.update({"norm.weight": torch.ones(128, dtype=torch.int32)}), "norm.weight: stored as I32"),
        (
            lambda t: t.update({"layers.1.attn.wkv.scale": torch.ones(2, 1)}),
            r"wkv.scale: shape \[2, 1\], wanted \[1, 1\]",
        ),
        (lambda t: t["norm.weight"].__setitem__(3, float("nan")), "norm.weight: 1 of 128 values"),
        (lambda t: t["layers.1.hc_ffn_fn"].__setitem__((0, 0), float("inf")), "hc_ffn_fn: 1 of"),
        (lambda t: t[f"{W2}.scale"].view(torch.uint8).__setitem__((0, 0), 255), rf"{W2}.weight: 32 of"),
        (lambda t: t.update({"layers.1.attn.wkv.scale": torch.zeros(1, 1)}), "wkv.weight: .*unusable scale"),
        (lambda t: t.update({"layers.1.attn.wkv.scale": torch.full((1, 1), 1e-39)}), "wkv.weight: .*unusable scale"),
        (lambda t: t["layers.0.ffn.gate.tid2eid"].__setitem__((5, 1), 4), r"tid2eid: expert ids 0\.\.4, wanted 0\.\.3"),
    ],
)
def test_faulty_checkpoints_are_refused_by_tensor_name(edit, change, message):
    with pytest.raises(WeightsError, match=message):
        read(edit("mx", change))


def test_all_faults_are_listed_at_once_up_to_a_limit(edit):
    def change(tensors):
        for key in [k for k in tensors if k.startswith("layers.2.")]:
            del tensors[key]

    with pytest.raises(WeightsError) as caught:
        read(edit("mx", change))
    text = str(caught.value)
    assert len(re.findall(r"layers\.2\.\S+: missing", text)) == 20
    assert "more" in text


def test_a_file_that_is_no_safetensors_is_refused(tmp_path, oracle):
    (tmp_path / "config.json").write_text(json.dumps(oracle.config("mx")))
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"this is no json!")
    with pytest.raises(WeightsError, match=r"model\.safetensors: can't be opened"):
        read(tmp_path)


SOUND = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (json.dumps({"a": SOUND | {"shape": [2.0]}}), "nothing sound of a .*2.0"),
        (json.dumps({"a": SOUND | {"shape": [True, 2]}}), "nothing sound of a .*True"),
        (json.dumps({"a": SOUND | {"shape": [-1, -2]}}), "nothing sound of a .*-1"),
        (json.dumps({"a": SOUND | {"data_offsets": [0.0, 8.0]}}), "nothing sound of a .*0.0"),
        (json.dumps({"a": SOUND | {"data_offsets": [0, 4, 8]}}), "nothing sound of a "),
        (json.dumps({"a": "no object"}), "nothing sound of a "),
        (json.dumps({"a": SOUND | {"dtype": "F6"}}), "nothing sound of a .*F6"),
        (json.dumps({"a": SOUND | {"shape": [3]}}), "a takes 8 bytes, not the 12 of"),
        ('{"\\ud800": 1}', r"calls a tensor '\\ud800'"),
        (json.dumps({"a\n\x1b[2J": SOUND}), r"calls a tensor 'a\\n\\x1b\[2J'"),
        ('{"a":' * 50_000, "is not JSON: maximum recursion depth"),
    ],
)
def test_a_header_that_is_damaged_is_said_to_be(tmp_path, header, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    [problem] = read_headers(tmp_path).problems
    assert re.match(rf"model\.safetensors: can't be opened \(.*{message}.*\); fetch it again", problem), problem


def test_empty_tensors_lie_anywhere(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, path := tmp_path / "model.safetensors")
    raw = path.read_bytes()
    header = json.loads(raw[8 : (first := 8 + int.from_bytes(raw[:8], "little"))])
    header |= {f"empty{at}": {"dtype": "F32", "shape": [0, 5], "data_offsets": [at, at]} for at in (0, 8, 20)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[first:])
    assert read_headers(tmp_path).problems == []
