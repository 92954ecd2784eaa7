"""config.json: what is read, what is refused, and the fingerprint of a checkpoint."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import ConfigError, load_config, model_fingerprint, parse_config, shard_paths


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
        ({"compress_ratios": [0, 4, 128]}, r"3 entries; wanted 6 \(num_hidden_layers\)"),
        (
            {"compress_ratios": [0, 4, 128, 4, 128, 0, 0, 4]},
            r"8 entries; .*zeros for drafting blocks after them: \[0, 4\]",
        ),
        ({"vision_config": {"depth": 24}}, "vision_config: a vision model .* serve DeepSeek-V4-Flash"),
        ({"architectures": "DeepseekV4ForCausalLM"}, "architectures is 'Deep"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"quantization_config": {"weight_block_size": [0, 128]}}, r"weight_block_size is \[0, 128\]"),
        ({"layer_types": ["full_attention"] * 6}, r"layer_types\[0\] is 'full_attention'; known are sliding"),
        ({"layer_types": ["sliding_attention"] * 6}, "compress_ratios is .*, but its newer fields say"),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, r"mlp_layer_types\[1\] is 'hash_moe'; served are layers"),
        ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters has sets for sliding_attention; known are"),
        ({"rope_parameters": {"compress": {}}}, "rope_parameters lacks the set 'main'"),
        (
            {"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}},
            "rope_parameters.main has rope_type 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5}},
            "rope_theta is 10000, but its newer fields say 5",
        ),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, "rope_scaling type is 'default'"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 1.3}}, "attention_factor .* is 1.3"),
        ({"compress_ratios": [0, 4, 128, 8, 128, 0, 0]}, r"compress_ratios\[3\] is 8; supported are 0, 4 and 128"),
        ({"compress_ratios": "0,4"}, "compress_ratios must be a list"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"head_dim": "big"}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size is 0; must be positive"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; must be positive"),
        ({"hc_eps": float("nan")}, "hc_eps is nan; must be positive"),
        ({"layer_types": [[]]}, r"layer_types\[0\] is \[\]; known are"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0, "original_max_position_embeddings": 9}},
            "rope_scaling.factor is 0",
        ),
        ({"compress_ratios": None}, "lacks compress_ratios"),
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


@pytest.mark.parametrize("surplus", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("drafts", [0, 1, None])
def test_drafting_blocks_are_counted_as_each_export_likes(raw, surplus, drafts):
    ratios = raw["compress_ratios"][:6]
    changed = raw | {"compress_ratios": ratios + surplus, "num_nextn_predict_layers": drafts}
    assert parse_config(changed) == parse_config(raw)


def as_transformers_writes(raw, rope):
    """The config with the names of transformers 5, its rotary embedding as `rope`."""
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    dropped = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "n_routed_experts")
    kept = {name: value for name, value in raw.items() if name not in dropped}
    if "main" in rope.get("rope_parameters", {}):
        del kept["rope_theta"], kept["compress_rope_theta"]
    return kept | {
        "layer_types": [kinds[ratio] for ratio in raw["compress_ratios"][:6]],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
        "partial_rotary_factor": raw["qk_rope_head_dim"] / raw["head_dim"],
        "num_local_experts": raw["n_routed_experts"],
        **rope,
    }


YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1, "rope_type": "yarn"}
ROPES = {
    "a set each": {
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
            "compress": {**YARN, "type": "yarn", "rope_theta": 160000, "attention_factor": 1.0},
        }
    },
    "flat": {"rope_parameters": {**YARN, "rope_theta": 10000}},
    "without theta": {"rope_parameters": YARN},
    "beside": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "compress_rope_parameters": {**YARN, "rope_theta": 160000.0},
    },
    "both names": {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": YARN},
    "rope_type": {"rope_scaling": YARN},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_renamed_fields_mean_what_they_were(raw, rope):
    assert parse_config(as_transformers_writes(raw, rope)) == parse_config(raw)


def test_experts_of_no_declared_type_are_four_bits(raw):
    quantized = raw | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for change in ({}, {"expert_dtype": None}, {"expert_dtype": "fp4"}):
        changed = {k: v for k, v in quantized.items() if k != "expert_dtype"} | change
        assert parse_config(changed).stored_experts == "mxfp4"
    assert parse_config(quantized | {"expert_dtype": "fp8"}).stored_experts == "fp8"


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


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_links_in_circles_are_refused(copy, name):
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(copy / name)
    with pytest.raises(ConfigError, match=f"{name}: can't be read .*symbolic links.*fetch it again"):
        load_config(copy)
        shard_paths(copy)


def test_what_stands_in_place_of_a_weight_file_is_told(copy):
    path = copy / "model.safetensors"
    path.unlink()
    path.symlink_to("blob")
    with pytest.raises(ConfigError, match=r"model\.safetensors \(a link to blob, which leads to no file\)"):
        shard_paths(copy)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"model\.safetensors \(a folder is in its place\)"):
        shard_paths(copy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../model.safetensors", "wanted files beside it"),
        ("", "wanted"),
        ("x" * 300, "lacks xxx"),
        ("a\0b", r"names 'a\\x00b'"),
        ("\ud800", r"names '\\ud800'"),
    ],
)
def test_an_index_that_names_no_files_of_the_folder_is_refused(copy, name, message):
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    with pytest.raises(ConfigError, match=message):
        shard_paths(copy)


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
