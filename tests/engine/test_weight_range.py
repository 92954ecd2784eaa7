"""Values that float32 holds and bfloat16 does not are listed like those that are no numbers, each matrix once."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import engine.model.weights as weights
from engine.model.config import load_config
from engine.model.weights import WeightsError, load_weights

NEAR = 3.4e38  # between the greatest of bfloat16 and that of float32
WKV, EXPERT = "layers.1.attn.wkv", "layers.1.ffn.experts.2.w2"
BEYOND = r"are beyond the greatest of bfloat16, 3\.39e\+38; export the checkpoint again"


def _module(name, path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


four_bits = _module("engine_four_bits", Path(__file__).resolve().parent / "four_bits.py")


def embedding(tensors):
    tensors["embed.weight"] = tensors["embed.weight"].float()
    tensors["embed.weight"][5, 5] = NEAR


def fp8(tensors):
    tensors[f"{WKV}.weight"][0, :2] = 448.0
    tensors[f"{WKV}.scale"] = torch.full(tensors[f"{WKV}.scale"].shape, NEAR / 448)
    tensors[f"{WKV}.weight"].view(torch.uint8)[0, 2:] &= 0xF7
    tensors[f"{WKV}.weight"].view(torch.uint8)[1:] &= 0xF7


def mxfp4(tensors):
    scale = tensors.pop(f"{EXPERT}.scale").view(torch.uint8)
    tensors[f"{EXPERT}.scale"] = torch.ones(scale.shape)
    tensors[f"{EXPERT}.scale"][0, 0] = NEAR / 6
    tensors[f"{EXPERT}.weight"].view(torch.uint8)[0, :2] = 0x7F


def nvfp4(tensors):
    four_bits.to_nvfp4(tensors, re.escape(f"{EXPERT}.weight"))
    tensors[f"{EXPERT}.weight_scale"][0, 0] = 448.0
    tensors[f"{EXPERT}.weight_scale"].view(torch.uint8)[1:] = 1
    tensors[f"{EXPERT}.weight"].view(torch.uint8)[0, :2] = 0x7F
    tensors[f"{EXPERT}.weight_scale_2"] = torch.tensor(NEAR / 6 / 448)


CASES = {
    "float32": (embedding, r"embed\.weight: 1 of \d+ values"),
    "e4m3": (fp8, rf"{WKV}\.weight: 2 of \d+ values"),
    "mxfp4, float32 scales": (mxfp4, rf"{EXPERT}\.weight: 4 of \d+ values"),
    "nvfp4": (nvfp4, rf"{EXPERT}\.weight: 4 of \d+ values"),
}


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("change", "named"), CASES.values(), ids=CASES)
def test_what_bfloat16_does_not_hold_is_listed_by_name(edit, change, named, packs):
    folder = edit("mx", change)
    config = load_config(folder)
    with pytest.raises(WeightsError, match=rf"{named} {BEYOND}"):
        load_weights(folder, config, dtype=torch.bfloat16, keeps_packed=packs)
    loaded = load_weights(folder, config, dtype=torch.float32, keeps_packed=packs).tensors
    assert all(bool(tensor.float().isfinite().all()) for tensor in loaded.values())


@pytest.mark.parametrize(("bad", "why"), [(float("nan"), "are NaN or infinite"), (NEAR, BEYOND)])
def test_a_matrix_that_is_read_some_rows_at_a_time_is_listed_once(edit, monkeypatch, bad, why):
    def change(tensors):
        tensors["embed.weight"] = tensors["embed.weight"].float()
        tensors["embed.weight"][::10, 1] = bad

    monkeypatch.setattr(weights, "LARGE_BYTES", 1500)
    folder = edit("mx", change)
    config = load_config(folder)
    rows, columns = config.vocab_size, config.hidden_size
    with pytest.raises(WeightsError) as refused:
        load_weights(folder, config, dtype=torch.bfloat16)
    (line,) = re.findall(r"embed\.weight:.*", str(refused.value))
    assert re.match(rf"embed\.weight: {-(-rows // 10)} of {rows * columns} values {why}", line)
