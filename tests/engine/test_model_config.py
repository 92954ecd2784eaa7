"""config.json: what is read, what is refused, and the fingerprint of a checkpoint."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import ConfigError, load_config, model_fingerprint, parse_config


@pytest.fixture
def raw(oracle):
    return oracle.config("tiny")


def test_sizes_come_from_the_file_and_draft_entries_are_cut_off(oracle):
    config = load_config(oracle.folder("tiny"))
    assert config.compress_ratios == (0, 4, 128, 4, 128, 0)
    assert [config.kind(i) for i in range(6)] == ["window", "csa", "hca", "csa", "hca", "window"]
    assert config.layers_of(4) == (1, 3)
    assert [config.is_hash_layer(i) for i in range(3)] == [True, True, False]
    assert config.rope_scaling.factor == 16
    assert config.eos_token_ids == (1,)


def test_published_schedules_are_understood(raw):
    flash = raw | {
        "num_hidden_layers": 43,
        "num_hash_layers": 3,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "swiglu_limit": 10.0,
    }
    assert len(parse_config(flash).layers_of(4)) == 21
    dspark = flash | {"compress_ratios": [*flash["compress_ratios"], 0, 0], "dspark_block_size": 5}
    assert parse_config(dspark).compress_ratios == parse_config(flash).compress_ratios
    pro = flash | {"num_hidden_layers": 61, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]}
    config = parse_config(pro)
    assert config.kind(0) == config.kind(1) == "hca"
    assert not config.layers_of(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41"}, "deepseek_v41.*another architecture"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"compress_ratios": [0, 4, 128]}, "3 entries; wanted 6 .* or 7"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 0, 0, 0]}, "8 entries"),
        ({"compress_ratios": [0, 4, 128, 8, 128, 0, 0]}, r"compress_ratios\[3\] is 8; supported are 0, 4 and 128"),
        ({"compress_ratios": "0,4"}, "compress_ratios must be a list"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"head_dim": "big"}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size is 0; must be positive"),
        ({"o_groups": 3}, "o_groups 3 does not divide num_attention_heads 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds n_routed_experts 8"),
        ({"num_hash_layers": 7}, "num_hash_layers 7"),
        ({"eos_token_id": 384}, "token id 384"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"index_head_dim": 32}, "index_head_dim 32"),
        ({"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "W4A8"}}, "moe_quant_algo 'W4A8'"),
        ({"quantization_config": {"quant_method": "modelopt", "moe_quant_algo": "NVFP4"}}, "'modelopt'"),
        ({"quantization_config": {"moe_quant_algo": "NVFP4", "group_size": 32}}, "group_size 32 for NVFP4"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(raw, change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(raw | change)


def test_the_published_nvfp4_variant_is_accepted(raw):
    added = {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": ["mtp.*"]}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], **added}
    assert parse_config(raw | {"quantization_config": quantization}).weight_block_size == (128, 128)


def test_experts_may_be_declared_mxfp4(raw):
    quantization = {"quant_method": "fp8", "moe_quant_algo": "MXFP4", "group_size": 32}
    assert parse_config(raw | {"quantization_config": quantization}).stored_experts == "mxfp4"


@pytest.mark.parametrize("field", ["hidden_size", "compress_ratios", "index_topk", "swiglu_limit", "rope_scaling"])
def test_missing_fields_are_named(raw, field):
    del raw[field]
    with pytest.raises(ConfigError, match=f"lacks {field}"):
        parse_config(raw)


def test_end_ids_of_both_files_count(raw):
    assert parse_config(raw | {"eos_token_id": [1, 5]}, {"eos_token_id": 7}).eos_token_ids == (1, 5, 7)
    assert parse_config(raw | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no such file"), ("{", "not JSON"), ("[]", "wanted a JSON object")]
)
def test_unreadable_config_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


@pytest.fixture
def copy(oracle, tmp_path):
    """A copy of the tiny checkpoint."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(oracle.folder("tiny") / name, tmp_path / name)
    return tmp_path


def change_one_value(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.3.ffn.experts.5.w2.weight"][3, 7] += 1
    save_file(tensors, folder / "model.safetensors")


def test_fingerprint_is_the_same_for_a_copy_and_ignores_other_files(oracle, copy):
    (copy / "golden.safetensors").write_bytes(b"not ours")
    assert model_fingerprint(copy) == model_fingerprint(oracle.folder("tiny"))


def test_fingerprint_sees_one_changed_weight_in_a_small_checkpoint(oracle, copy):
    change_one_value(copy)
    assert model_fingerprint(copy) != model_fingerprint(oracle.folder("tiny"))


def test_fingerprint_sees_a_changed_config(oracle, copy, raw):
    (copy / "config.json").write_text(json.dumps(raw | {"index_topk": 8}))
    assert model_fingerprint(copy) != model_fingerprint(oracle.folder("tiny"))


def test_fingerprint_tells_two_large_weight_sets_apart(copy):
    def write(seed):
        x = torch.randn(5 << 20, generator=torch.Generator().manual_seed(seed))
        save_file({"x": x}, copy / "model.safetensors")
        return model_fingerprint(copy)

    assert write(0) == write(0) != write(1)


def test_missing_or_cut_weight_files_are_refused(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cut short"):
        model_fingerprint(copy)
    path.unlink()
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        model_fingerprint(copy)


def test_leaders_can_import_config_and_layout_without_torch():
    code = "import sys, engine.model.config, engine.model.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
