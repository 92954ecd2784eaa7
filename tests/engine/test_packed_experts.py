"""Routed experts kept in four bits: what the loader reads, keeps and refuses, and what steps make of it."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.model.model
import engine.model.moe
import engine.model.weights
import engine.runner
from engine.model.config import load_config
from engine.model.moe import MixtureOfExperts
from engine.model.shard import Shard
from engine.model.weights import WeightsError, load_weights, scale_name
from kernels.expert_weights import LANES, ExpertWeights, dequantize_experts
from kernels.quant import dequantize_block_fp8, dequantize_e2m1

TESTS = Path(__file__).resolve().parent.parent
HANDED = {
    case["id"]: case
    for case in map(json.loads, (TESTS / "cases/handed.jsonl").read_text(encoding="utf-8").splitlines())
}
STACKS = [f"layers.{layer}.ffn.experts.{name}" for layer in range(3) for name in ("w13", "w2")]
EXPERT = "layers.1.ffn.experts.2"


def _module(name, path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


four_bits = _module("engine_four_bits", TESTS / "engine/four_bits.py")
geo = _module("gpu_geo", TESTS / "gpu/geo.py")
geo_experts = _module("gpu_geo_experts", TESTS / "gpu/geo_experts.py")


def read(folder, **options):
    return load_weights(folder, load_config(folder), **{"dtype": torch.float32, "keeps_packed": True, **options})


def whole(loaded, stack):
    """Return a stack's values, packed or not."""
    if stack in loaded.tensors:
        return loaded.tensors[stack]
    codes, scales, factors = (loaded.tensors[f"{stack}.{field}"] for field in ("codes", "scales", "factors"))
    assert scales.shape[3] == LANES[loaded.packed[stack]]
    return dequantize_experts(ExpertWeights(loaded.packed[stack], codes, scales, factors))


def wanted(oracle, stack, *, start=0, stop=128):
    """Return the oracle's own values of a stack of mx, inner channels start to stop."""
    weights, prefix = oracle.weights("mx"), stack.rpartition(".")[0]
    if stack.endswith("w2"):
        return torch.stack([weights[f"{prefix}.{e}.w2.weight"][:, start:stop] for e in range(4)])
    return torch.stack(
        [torch.cat([weights[f"{prefix}.{e}.{w}.weight"][start:stop] for w in ("w1", "w3")]) for e in range(4)]
    )


# ---------------------------------------------------------------- what is kept


def test_mxfp4_experts_stay_packed_with_the_oracle_s_values(oracle):
    loaded = read(oracle.folder("mx"))
    assert loaded.packed == dict.fromkeys(STACKS, "mxfp4")
    assert loaded.dequantized == {}
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack)) for stack in STACKS)


def test_other_matrices_of_e4m3_stay_as_they_are_stored(oracle):
    loaded, plain = read(oracle.folder("mx")), read(oracle.folder("mx"), keeps_packed=False)
    kept = [name for name, tensor in loaded.tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    assert {"layers.0.attn.wq_b.weight", "layers.2.ffn.shared_experts.w2.weight"} <= set(kept)
    assert not any(scale_name(name) in plain.tensors for name in kept)
    for name in kept:
        whole_matrix = dequantize_block_fp8(loaded.tensors[name], loaded.tensors[scale_name(name)])
        assert torch.equal(whole_matrix, plain.tensors[name]), name
    others = set(plain.tensors) & set(loaded.tensors) - set(kept)
    assert all(torch.equal(loaded.tensors[name], plain.tensors[name]) for name in others)


def test_nvfp4_experts_stay_packed_with_the_oracle_s_values(oracle, edit):
    loaded = read(edit("mx", four_bits.to_nvfp4))
    assert loaded.packed == dict.fromkeys(STACKS, "nvfp4")
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack)) for stack in STACKS)


def test_nvfp4_experts_are_read_where_they_are_not_packed(oracle, edit):
    loaded = read(edit("mx", four_bits.to_nvfp4), keeps_packed=False)
    assert (loaded.packed, loaded.dequantized) == ({}, {})
    assert all(torch.equal(loaded.tensors[stack], wanted(oracle, stack)) for stack in STACKS)


def test_nvfp4_values_are_code_times_scale_times_the_matrix_s_own_factor(oracle, edit):
    """With scales that are no powers of two, as real exports have them."""
    draw = torch.Generator().manual_seed(0)
    values = {}

    def change(tensors):
        four_bits.to_nvfp4(tensors)
        for number, name in enumerate(n for n in list(tensors) if n.endswith(".weight_scale") and "mtp" not in n):
            base = name.removesuffix(".weight_scale")
            byte = torch.randint(1, 0x7F, tensors[name].shape, generator=draw, dtype=torch.uint8)
            tensors[name] = byte.view(torch.float8_e4m3fn)
            tensors[f"{base}.weight_scale_2"] = torch.tensor(0.01 + 0.003 * number)
            values[base] = (
                dequantize_e2m1(tensors[f"{base}.weight"], tensors[name].float(), 16)
                * tensors[f"{base}.weight_scale_2"]
            )

    folder = edit("mx", change)
    packed, plain = read(folder), read(folder, keeps_packed=False)
    for expert in range(4):
        prefix = f"layers.2.ffn.experts.{expert}"
        first = torch.cat([values[f"{prefix}.w1"], values[f"{prefix}.w3"]])
        assert torch.equal(whole(packed, "layers.2.ffn.experts.w13")[expert], first)
        assert torch.equal(whole(packed, "layers.2.ffn.experts.w2")[expert], values[f"{prefix}.w2"])
    assert all(torch.equal(whole(packed, stack), plain.tensors[stack]) for stack in STACKS)


def test_formats_may_differ_between_layers_and_between_matrices_of_a_layer(oracle, edit):
    some = r"layers\.(0\..*\.experts\..*\.w\d|1\..*\.experts\..*\.w2)\.weight"
    loaded = read(edit("mx", lambda tensors: four_bits.to_nvfp4(tensors, some)))
    assert [loaded.packed[stack] for stack in STACKS] == ["nvfp4", "nvfp4", "mxfp4", "nvfp4", "mxfp4", "mxfp4"]
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack)) for stack in STACKS)


@pytest.mark.parametrize(
    "pattern", [r"layers\.1.*\.experts\.2\.w3\.weight", r"layers\.1.*\.experts\.[013]\.w1\.weight"]
)
def test_mxfp4_beside_nvfp4_in_one_matrix_becomes_nvfp4(oracle, edit, pattern):
    loaded = read(edit("mx", lambda tensors: four_bits.to_nvfp4(tensors, pattern)))
    assert [loaded.packed[stack] for stack in STACKS[2:4]] == ["nvfp4", "mxfp4"]
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack)) for stack in STACKS)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("change", [lambda tensors: None, four_bits.to_nvfp4], ids=["mxfp4", "nvfp4"])
def test_each_rank_reads_its_slice_of_the_inner_dimension(oracle, edit, change, packs):
    folder = edit("mx", change)
    for index in range(2):
        loaded = read(folder, shard=Shard(index, 2), keeps_packed=packs)
        assert len(loaded.packed) == (6 if packs else 0)
        for stack in STACKS:
            part = wanted(oracle, stack, start=64 * index, stop=64 * index + 64)
            assert torch.equal(whole(loaded, stack), part), stack


def test_scales_may_lie_in_another_shard_and_experts_in_any_order(oracle, tmp_path):
    tensors = load_file(oracle.folder("mx") / "model.safetensors")
    shards = {
        "model-1.safetensors": {k: v for k, v in tensors.items() if k.endswith(".scale") or ".w3." in k},
        "model-2.safetensors": {k: v for k, v in tensors.items() if not (k.endswith(".scale") or ".w3." in k)},
    }
    for file, part in shards.items():
        save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(oracle.config("mx")))
    loaded = read(tmp_path)
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack)) for stack in STACKS)


@pytest.mark.parametrize("change", [lambda tensors: None, four_bits.to_nvfp4], ids=["mxfp4", "nvfp4"])
def test_experts_are_packed_together_and_one_by_one_alike(edit, monkeypatch, change):
    folder = edit("mx", change)
    together = read(folder)
    with monkeypatch.context() as patched:
        patched.setattr(engine.model.weights, "read_four_bits", None)  # nobody asks for it
        assert read(folder).packed == together.packed
    monkeypatch.setattr(engine.model.weights, "read_sound_four_bits", lambda *args: None)
    alone = read(folder)
    assert alone.packed == together.packed
    assert all(torch.equal(alone.tensors[name], together.tensors[name]) for name in together.tensors)


def test_one_expert_that_is_not_sound_does_not_change_the_others(oracle, edit):
    """Its scales of zeros are fine where its codes are zero: it is looked at closely, and so are those beside it."""

    def change(tensors):
        four_bits.to_nvfp4(tensors)
        for suffix in ("weight", "weight_scale"):
            tensors[f"{EXPERT}.w2.{suffix}"].view(torch.uint8).zero_()

    loaded = read(edit("mx", change))
    found, values = whole(loaded, STACKS[3]), wanted(oracle, STACKS[3])
    assert not found[2].any()
    assert all(torch.equal(found[e], values[e]) for e in (0, 1, 3))


def test_what_is_loaded_is_told(edit):
    lines = []
    read(
        edit("mx", lambda tensors: four_bits.to_nvfp4(tensors, r"layers\.1.*\.experts\..*\.weight")),
        progress=lines.append,
    )
    assert "weights: 4 matrices of experts stay in four bits (mxfp4)" in lines
    assert "weights: 2 matrices of experts stay in four bits (nvfp4)" in lines


# ---------------------------------------------------------------- what can't be packed


def test_sizes_that_the_kernels_do_not_read_are_dequantised_and_told(oracle):
    """A quarter of mx has 32 inner channels: w2 has half a step, w13 is fine."""
    lines = []
    loaded = read(oracle.folder("mx"), shard=Shard(1, 4), progress=lines.append)
    assert set(loaded.packed) == {stack for stack in STACKS if stack.endswith("w13")}
    reason = "128 rows of 32 channels are no multiples of 16 and 64, which the kernels read"
    assert loaded.dequantized == {stack: reason for stack in STACKS if stack.endswith("w2")}
    assert any(f"no decode kernels for {STACKS[1]} (and 2 more)" in line and reason in line for line in lines)
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack, start=32, stop=64)) for stack in STACKS)


def test_experts_that_are_not_in_four_bits_are_kept_as_they_were(oracle):
    loaded, plain = read(oracle.folder("tiny")), read(oracle.folder("tiny"), keeps_packed=False)
    assert loaded.packed == {}
    assert loaded.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], plain.tensors[name]) for name in plain.tensors)


def test_one_expert_in_eight_bits_dequantises_its_matrix_alone(oracle, edit):
    def change(tensors):
        scale = tensors.pop(f"{EXPERT}.w2.scale").float()
        values = dequantize_e2m1(tensors[f"{EXPERT}.w2.weight"], scale, 32)
        tensors[f"{EXPERT}.w2.weight"] = values.bfloat16()

    loaded = read(edit("mx", change))
    assert loaded.dequantized == {STACKS[3]: f"{EXPERT}.w2.weight is stored as BF16, not in four bits"}
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack)) for stack in STACKS)


def test_float32_scales_are_dequantised(oracle, edit):
    def change(tensors):
        tensors[f"{EXPERT}.w1.scale"] = tensors[f"{EXPERT}.w1.scale"].float()

    loaded = read(edit("mx", change))
    assert loaded.dequantized == {STACKS[2]: f"{EXPERT}.w1.scale is stored as F32, which the kernels don't read"}
    assert all(torch.equal(whole(loaded, stack), wanted(oracle, stack)) for stack in STACKS)


@pytest.mark.parametrize("expert", [0, 2, 3])
@pytest.mark.parametrize(("matrix", "stack"), [("w3", STACKS[2]), ("w2", STACKS[3])])
def test_scales_too_far_apart_dequantise_their_matrix_whichever_expert_has_them(oracle, edit, expert, matrix, stack):
    name = f"layers.1.ffn.experts.{expert}.{matrix}"

    def change(tensors):
        tensors[f"{name}.scale"].view(torch.uint8)[3, 1] = 70
        tensors[f"{name}.weight"][3, 16:32] = 0x11

    folder = edit("mx", change)
    loaded, plain = read(folder), read(folder, keeps_packed=False)
    assert set(loaded.packed) == set(STACKS) - {stack}
    label = f"layers.1.ffn.experts.{expert}.{stack.rpartition('.')[2]}"
    assert loaded.dequantized[stack].startswith(f"{label} has mxfp4 scales from 2^-57")
    assert loaded.tensors.keys() >= {stack}
    assert all(torch.equal(whole(loaded, each), plain.tensors[each]) for each in STACKS)


def test_mxfp4_that_can_not_become_nvfp4_beside_it_dequantises_the_matrix(edit):
    def change(tensors):
        four_bits.to_nvfp4(tensors, r"layers\.1.*\.experts\.0\.w2\.weight")
        tensors[f"{EXPERT}.w2.scale"].view(torch.uint8)[3, 1] = 100
        tensors[f"{EXPERT}.w2.weight"][3, 16:32] = 0x11

    folder = edit("mx", change)
    loaded, plain = read(folder), read(folder, keeps_packed=False)
    assert "nvfp4 holds 17 without loss" in loaded.dequantized[STACKS[3]]
    assert all(torch.equal(whole(loaded, stack), plain.tensors[stack]) for stack in STACKS)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("case", HANDED["NU-04"]["input"]["loader_inputs"], ids=lambda case: case["name"])
def test_handed_checkpoints_with_holes(edit, case, packs):
    """NU-04, where experts are of layer 1 as there, number 2 instead of 5 (mx has four)."""
    name = f"{EXPERT}.w1"

    def change(tensors):
        four_bits.to_nvfp4(tensors, input_scale=None if case["name"] == "weight_only_checkpoint" else 0.01)
        if case["name"] == "input_scale_missing":
            assert case["drop"] == "layers.1.experts.5.w1.input_scale"
            del tensors[f"{name}.input_scale"]
        elif case["name"] == "weight_scale_2_missing":
            del tensors[f"{name}.weight_scale_2"]
        elif "set" in case:
            tensors[f"{name}.input_scale"] = torch.tensor(float(case["set"]))
        elif case["name"] == "gate_up_scales_differ":
            assert tensors[f"{name}.weight_scale_2"] != tensors[f"{EXPERT}.w3.weight_scale_2"].mul_(4)

    folder = edit("mx", change)
    if case["name"] in ("weight_only_checkpoint", "gate_up_scales_differ"):
        plain = read(folder, keeps_packed=False).tensors
        assert all(torch.equal(whole(read(folder, keeps_packed=packs), stack), plain[stack]) for stack in STACKS)
        return
    with pytest.raises(WeightsError) as caught:
        read(folder, keeps_packed=packs)
    tensor = f"{name}.weight_scale_2" if case["name"].startswith("weight") else f"{name}.input_scale"
    wrong = f"is {float(case['set']):g}" if "set" in case else "missing"
    assert f"{tensor}: {wrong}" in str(caught.value)
    assert "export the checkpoint again" in str(caught.value)


def _set_byte(name, value):
    return lambda tensors: tensors[f"{EXPERT}.{name}"].view(torch.uint8).__setitem__((5, 1), value)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("is_nvfp4", "change", "message"),
    [
        (False, _set_byte("w2.scale", 255), r"2\.w2\.weight: 32 of 16384 values are NaN or infinite"),
        (False, _set_byte("w3.scale", 0), r"2\.w3\.weight: 32 of 16384 .* unusable scale"),
        (False, lambda t: t.pop(f"{EXPERT}.w2.scale"), r"2\.w2\.scale: missing, its weight is quantised"),
        (
            False,
            lambda t: t[f"{EXPERT}.w2.scale"].view(torch.uint8).fill_(254),
            r"2\.w2\.weight: \d+ of 16384 values are NaN or infinite",
        ),
        (
            True,
            lambda t: t[f"{EXPERT}.w2.weight_scale_2"].fill_(3e38),
            r"2\.w2\.weight: \d+ of 16384 values are NaN or infinite",
        ),
        (True, _set_byte("w2.weight_scale", 0x7F), r"2\.w2\.weight_scale: 1 of 1024 scales are NaN or negative"),
        (True, _set_byte("w1.weight_scale", 0xFF), r"2\.w1\.weight_scale: 1 of 1024"),
        (True, _set_byte("w1.weight_scale", 0x81), r"2\.w1\.weight_scale: 1 of 1024"),
        (
            True,
            lambda t: t[f"{EXPERT}.w1.weight_scale"].view(torch.uint8).zero_(),
            r"w1\.weight_scale: all scales are 0",
        ),
        (True, lambda t: t[f"{EXPERT}.w1.weight_scale_2"].zero_(), r"w1\.weight_scale_2: is 0, wanted a positive"),
        (True, lambda t: t[f"{EXPERT}.w1.weight_scale_2"].fill_(math.inf), r"w1\.weight_scale_2: is inf"),
        (True, lambda t: t[f"{EXPERT}.w1.weight_scale_2"].neg_(), r"w1\.weight_scale_2: is -"),
        (True, lambda t: t.pop(f"{EXPERT}.w1.weight_scale"), r"w1\.weight_scale: missing"),
        (
            True,
            lambda t: t.update({f"{EXPERT}.w1.scale": torch.ones(128, 4)}),
            r"layers\.1\.ffn\.experts\.2\.w1\.scale: not part",
        ),
        (
            True,
            lambda t: t.update({f"{EXPERT}.w1.weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn)}),
            r"w1\.weight_scale: shape \[128, 4\], wanted \[128, 8\]",
        ),
        (
            True,
            lambda t: t.update({f"{EXPERT}.w1.weight_scale": torch.ones(128, 8)}),
            r"w1\.weight_scale: stored as F32, wanted one of F8_E4M3",
        ),
        (
            True,
            lambda t: t.update({f"{EXPERT}.w1.weight_scale_2": torch.ones(2)}),
            r"w1\.weight_scale_2: shape \[2\], wanted \[\]",
        ),
    ],
)
def test_faulty_experts_are_refused_by_tensor_name(edit, is_nvfp4, change, message, packs):
    def both(tensors):
        if is_nvfp4:
            four_bits.to_nvfp4(tensors)
        change(tensors)

    with pytest.raises(WeightsError, match=message):
        read(edit("mx", both), keeps_packed=packs)


@pytest.mark.parametrize("packs", [True, False])
def test_a_rank_s_slice_may_have_nothing_but_scales_of_zero(edit, packs):
    def change(tensors):
        four_bits.to_nvfp4(tensors)
        tensors[f"{EXPERT}.w2.weight_scale"].view(torch.uint8)[:, :4] = 0

    loaded = read(edit("mx", change), shard=Shard(0, 2), keeps_packed=packs)
    assert not whole(loaded, STACKS[3])[2].any()


def test_values_that_float32_just_holds_stay_packed(oracle, edit):
    def change(tensors):
        tensors[f"{EXPERT}.w2.scale"].view(torch.uint8).fill_(252)

    loaded = read(edit("mx", change))
    assert loaded.packed == dict.fromkeys(STACKS, "mxfp4")
    assert whole(loaded, STACKS[3])[2].abs().max() == 6 * 2.0**125


def test_a_factor_that_the_kernels_do_not_hold_dequantises_its_matrix(edit):
    def change(tensors):
        four_bits.to_nvfp4(tensors)
        tensors[f"{EXPERT}.w2.weight_scale"].view(torch.uint8).fill_(1)
        tensors[f"{EXPERT}.w2.weight_scale_2"].fill_(2.0**122)

    folder = edit("mx", change)
    loaded = read(folder)
    assert "the kernels hold factors up to 2^120" in loaded.dequantized[STACKS[3]]
    assert torch.equal(whole(loaded, STACKS[3]), read(folder, keeps_packed=False).tensors[STACKS[3]])


def test_an_expert_of_zeros_may_have_scales_of_zero(edit):
    def change(tensors):
        four_bits.to_nvfp4(tensors)
        tensors[f"{EXPERT}.w2.weight"].fill_(0x80)
        tensors[f"{EXPERT}.w2.weight_scale"].view(torch.uint8).zero_()

    assert not bool(whole(read(edit("mx", change)), STACKS[3])[2].any())


@pytest.mark.parametrize("part", [(0, 3), (2, 2), (-1, 2), (0, 0)])
def test_a_slice_that_does_not_exist_is_refused(oracle, part):
    with pytest.raises(WeightsError, match=f"part {part[0]} of {part[1]} of the experts' 128 inner channels"):
        read(oracle.folder("mx"), shard=Shard(*part))


# ---------------------------------------------------------------- what steps make of it


@pytest.fixture
def packs(monkeypatch):
    """Experts stay packed on the CPU, too."""
    monkeypatch.setattr(engine.runner, "keeps_packed", lambda device: True)


@pytest.mark.parametrize("change", [lambda tensors: None, four_bits.to_nvfp4], ids=["mxfp4", "nvfp4"])
def test_steps_of_any_shape_give_the_same_bits_as_dequantised_experts(oracle, edit, harness, packs, make_pair, change):
    golden = oracle.golden("mx")
    served = make_pair("mx").serve(golden["prompt_130"], golden["gen_130"], chunk=64)
    folder = edit("mx", change)
    pair = harness.Pair(*(harness.make_runner(folder, role=role) for role in ("prefill", "decode")))
    assert isinstance(pair.decode.runner._model.layers[0].experts.w13, ExpertWeights)
    again = pair.serve(golden["prompt_130"], golden["gen_130"], chunk=64)
    assert torch.equal(again.logits, served.logits)


@pytest.mark.parametrize("formats", ["mxfp4", "nvfp4", "both"])
def test_decode_steps_through_geo_s_layers_stay_close_to_float_experts(tmp_path, formats):
    layers = geo_experts.Layers(tmp_path, formats, device="cpu", dtype="float32")
    faults = [(layer, tokens, layers.fault(layer, tokens)) for layer in geo_experts.LAYERS for tokens in (1, 7, 40)]
    assert [fault for fault in faults if fault[2]] == []


def test_decode_steps_in_bfloat16_stay_close_to_float_experts(tmp_path):
    layers = geo_experts.Layers(tmp_path, "both", device="cpu", dtype="bfloat16")
    assert [layers.fault(layer, 7) for layer in geo_experts.LAYERS] == [""] * 5


@pytest.mark.parametrize("formats", ["mxfp4", "nvfp4"])
def test_decode_steps_of_the_whole_model_choose_as_golden(tmp_path, formats):
    """geo.py patches the model on a CPU, so that its decode steps take the references of the decode kernels."""
    checkpoint = geo.write_checkpoint(tmp_path, nvfp4=geo.EXPERTS[formats])
    steps = geo.run(checkpoint, device="cpu", dtype="float32", index="fp4", lengths=(130,), steps=3)
    assert [(step.step, step.fault) for step in steps] == [(0, ""), (1, ""), (2, "")]
    assert geo.median_fault(steps) == ""
    assert min(step.reference for step in steps) > 0


def test_more_experts_than_are_dequantised_at_once_give_the_same_bits(tmp_path):
    folder = geo.write_checkpoint(tmp_path, nvfp4=geo.EXPERTS["both"])
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    packed, plain = _layer(folder), _layer(folder, keeps_packed=False)
    ids = torch.zeros(40, dtype=torch.int64)
    assert packed.w13.experts == 16
    assert torch.equal(packed(x, ids), plain(x, ids))


@pytest.fixture
def normal_rows():
    return lambda tokens: torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens))


def _layer(folder, *, keeps_packed=True, shard=None):
    loaded = read(folder, keeps_packed=keeps_packed, shard=shard)
    return MixtureOfExperts(loaded.tensors, 1, load_config(folder))


def _batch(tokens, padding=0):
    return geo_experts.decode_step(tokens, padding, "cpu")


def test_a_step_of_more_tokens_than_the_kernels_take_is_taken_in_parts(oracle, normal_rows):
    layer, x = _layer(oracle.folder("mx")), normal_rows(520)
    ids = torch.zeros(520, dtype=torch.int64)
    out = layer(x, ids, _batch(300, padding=220))
    parts = [layer(x[:256], ids[:256], _batch(256)), layer(x[256:512], ids[256:512], _batch(44, padding=212))]
    parts.append(layer(x[512:], ids[512:], _batch(0, padding=8)))
    assert torch.allclose(out, torch.cat(parts), rtol=1e-5, atol=1e-6 * float(out.abs().max()))
    assert (out[:300] - layer(x, ids)[:300]).abs().max() < 1e-3 * out.abs().max()


@pytest.mark.parametrize("tokens", [5, 300])
def test_prompts_read_packed_experts_with_kernels_where_there_are_any(oracle, normal_rows, monkeypatch, tokens):
    layer, x = _layer(oracle.folder("mx")), normal_rows(tokens)
    ids = torch.zeros(tokens, dtype=torch.int64)
    step, plain = layer(x, ids, _batch(tokens)), layer(x, ids)
    assert not torch.equal(step, plain)
    monkeypatch.setattr(engine.model.moe, "uses_triton", lambda x: True)
    assert torch.equal(layer(x, ids), step)


def test_no_tokens_at_all(oracle, normal_rows):
    layer = _layer(oracle.folder("mx"))
    assert layer(normal_rows(0), torch.zeros(0, dtype=torch.int64), _batch(0)).shape == (0, 128)


def test_a_layer_with_one_dequantised_matrix_runs_the_operations_for_any_step(oracle, normal_rows):
    """A quarter of mx: see above."""
    layer, x = _layer(oracle.folder("mx"), shard=Shard(0, 4)), normal_rows(3)
    plain = _layer(oracle.folder("mx"), shard=Shard(0, 4), keeps_packed=False)
    ids = torch.zeros(3, dtype=torch.int64)
    assert isinstance(layer.w13, ExpertWeights) and isinstance(layer.w2, torch.Tensor)
    assert torch.equal(layer(x, ids, _batch(3)), plain(x, ids))


def test_padding_tokens_of_a_decode_step_take_no_expert(oracle, normal_rows):
    layer, x = _layer(oracle.folder("mx")), normal_rows(5)
    ids = torch.zeros(5, dtype=torch.int64)
    out, shared = layer(x, ids, _batch(3, padding=2)), layer(x, ids, _batch(0, padding=5))
    assert torch.equal(out[3:], shared[3:])
    assert bool((out[:3] != shared[:3]).any(1).all())


def test_a_sum_over_ranks_is_what_one_computes(oracle, normal_rows):
    x, ids, step = normal_rows(9), torch.zeros(9, dtype=torch.int64), _batch(9)
    halves = [_layer(oracle.folder("mx"), shard=Shard(index, 2)) for index in range(2)]
    one = _layer(oracle.folder("mx"))(x, ids, step)
    together = halves[0](x, ids, step) + halves[1](x, ids, step)
    assert (together - one).abs().max() < 1e-3 * one.abs().max()
