"""`isthmus model check`: variants, forms, drafting blocks, ranks, tokenizer and encoding, from headers alone."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from deploy import cli, model_check, model_facts, tiny_model
from deploy.model_facts import read_facts
from deploy.model_synthesize import plan_shards
from deploy.synthetic_checkpoint import Drawn, Law, make_config, tensors_of
from engine.model.config import WEIGHT_INDEX

DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
}
PRO = {
    "num_hidden_layers": 2,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "index_topk": 1024,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128],
}


def write(folder: Path, raw: dict[str, Any], experts: Any = "mxfp4", *, extra: tuple[Drawn, ...] = ()) -> Path:
    """Write a checkpoint of headers and holes: as long as a real one, and empty."""
    folder.mkdir(exist_ok=True)
    shards = plan_shards([*tensors_of(raw, experts), *extra], 3_500_000_000)
    for shard in shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.num_bytes)
    index = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    (folder / WEIGHT_INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def config(layers: int = 1, experts: Any = "mxfp4", **fields: Any) -> dict[str, Any]:
    return make_config("v4-flash", layers=layers, experts=experts, has_mtp=False) | fields


def check(folder: Path, capsys: Any, *flags: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["model", "check", str(folder), "--json", *flags]) == code
    return json.loads(capsys.readouterr().out)


def seen(document: dict[str, Any], topic: str) -> str:
    return " ".join(f"{each['level']}: {each['seen']}" for each in document["findings"] if each["topic"] == topic)


def test_the_published_model_is_read_in_seconds(tmp_path, capsys):
    folder = write(tmp_path / "flash", make_config("v4-flash", layers=0, experts="mxfp4", has_mtp=True))
    start = time.process_time()  # of this machine's two cores others may have their share
    found = check(folder, capsys, "--gpu-memory-gib", "94.9")
    assert time.process_time() - start < 5
    assert found["variant"] == "DeepSeek-V4-Flash"
    assert (found["num_files"], found["num_tensors"]) == (46, 69187)
    forms = {(each["group"], each["form"]): each["tensors"] for each in found["stored"]}
    assert forms["routed experts", "mxfp4"] == 43 * 256 * 3
    assert forms["attention", "e4m3"] == 43 * 5
    assert forms["gate", "int64"] == 3
    assert sum(each["num_bytes"] for each in [*found["stored"], *found["drafting"]]) == found["num_bytes"]
    assert [each["group"] for each in found["drafting"]] == ["mtp.0"]
    one, two, four, eight = found["ranks"]
    assert one["cache_tokens"] == {"prefill": -1, "decode": -1}
    assert min(two["cache_tokens"].values()) > 1_000_000
    assert one["weights"] > two["weights"] > four["weights"] > eight["weights"]
    assert four["needed"]["decode"] > four["weights"]
    assert "fits GPUs of 94.90 GiB with 2 or more ranks" in seen(found, "memory")


@pytest.mark.parametrize(
    ("raw", "experts", "variant"),
    [
        (config(), "mxfp4", "DeepSeek-V4-Flash's shapes, 1 layer of 43"),
        (config(experts="nvfp4"), "nvfp4", "DeepSeek-V4-Flash-NVFP4's shapes, 1 layer of 43"),
        (config(**DSPARK, compress_ratios=[0, 0, 0, 0]), "mxfp4", "DeepSeek-V4-Flash-0731's shapes"),
        (config(**PRO), "mxfp4", "DeepSeek-V4-Pro's shapes, 2 layers of 61"),
        (config(hidden_size=2048), "mxfp4", "no published variant: 1 layer of hidden size 2048"),
    ],
)
def test_variants_are_known_by_sizes_and_forms(tmp_path, capsys, raw, experts, variant):
    assert check(write(tmp_path, raw, experts), capsys)["variant"].startswith(variant)


def test_stages_of_a_drafter_are_told_apart_from_an_mtp_block(tmp_path, capsys):
    stages = tuple(
        Drawn(name, "BF16", (4, 4), Law("bytes"), name)
        for name in ("mtp.0.main_proj.weight", "mtp.1.attn.wq_a.weight", "mtp.2.markov_head.weight")
    )
    found = check(write(tmp_path, config(compress_ratios=[0] * 4), extra=stages), capsys)
    assert [(each["group"], each["form"]) for each in found["drafting"]] == [
        (f"mtp.{stage}", "DSpark stage") for stage in range(3)
    ]
    assert "-0731" in found["variant"]
    assert "read past" in seen(found, "drafting")


def test_experts_are_what_their_headers_say(tmp_path, capsys):
    found = check(write(tmp_path, config(), "nvfp4"), capsys)
    assert found["declared"] == "mxfp4"
    assert found["config"]["stored_experts"] == "nvfp4"
    assert "warning: expert_dtype and quantization_config say that routed experts are mxfp4" in seen(
        found, "config.json"
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("model.layers.0.self_attn.q_a_proj.weight", "transformers' own"), ("vision.patch.weight", "a vision model")],
)
def test_names_of_other_exports_are_explained(tmp_path, capsys, name, remedy):
    found = check(write(tmp_path, config(), extra=(Drawn(name, "BF16", (4,), Law("bytes"), name),)), capsys, code=1)
    (problem,) = [each for each in found["findings"] if each["level"] == "problem"]
    assert problem["seen"] == f"{name}: not part of this model"
    assert remedy in problem["remedy"]


def test_what_does_not_fit_or_can_not_be_cut_is_a_problem_if_it_was_asked_for(tmp_path, capsys):
    folder = write(tmp_path, config(layers=2))
    assert "problem: does not fit GPUs of 4.00 GiB with 1 rank:" in seen(
        check(folder, capsys, "--ranks", "1", "--gpu-memory-gib", "4", code=1), "memory"
    )
    cut = seen(check(folder, capsys, "--ranks", "3", code=1), "memory")
    assert "problem: num_attention_heads 64 of the model can't be cut into 3 equal parts" in cut


def test_without_a_gpu_it_says_what_one_would_need(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model_check, "driver_memory", lambda: None)
    found = check(write(tmp_path, config()), capsys, "--ranks", "2")
    assert "with 2 ranks each needs" in seen(found, "memory")
    assert found["ranks"][0]["cache_tokens"] is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / tiny_model.NAME
    tiny_model.write_tiny_model(folder)
    return folder


def test_the_tiny_model_lacks_nothing_and_is_shown_as_a_table(tiny, capsys):
    assert cli.main(["model", "check", str(tiny)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "129,280 tokens, those of chats among them" in out
    assert "encoding/encoding_dsv4.py: 7 texts, as of V4-Flash" in out
    assert "can be served: 0 problems, 0 warnings" in out


def test_tokenizer_and_encoding_of_another_model_are_told(tiny, tmp_path):
    folder = write(tmp_path / "model", config(**DSPARK, compress_ratios=[0] * 4, vocab_size=1024))
    shutil.copy(tiny / "tokenizer.json", folder)
    shutil.copytree(tiny / "encoding", folder / "encoding")
    (folder / "tokenizer_config.json").write_text("{")
    found = {each.topic: each for each in read_facts(folder).findings}
    assert found["tokenizer"].level == "problem"
    assert "has 129280 tokens, the model 1024" in found["tokenizer"].seen
    assert found["encoding"].level == "warning"
    assert "is of V4-Flash, the weights are of -0731" in found["encoding"].seen
    assert found["tokenizer_config.json"].level == "warning"
    (folder / "encoding" / "encoding_dsv4.py").write_text("TOOLS_TEMPLATE = make()\nOTHER = make()\n")
    (text,) = (each.seen for each in model_facts.read_facts(folder).findings if each.topic == "encoding")
    assert "can't be read as constants: TOOLS_TEMPLATE; requests" in text
    (folder / "encoding" / "encoding_dsv4.py").write_text("def broken(")
    assert {each.topic: each.level for each in read_facts(folder).findings}["encoding"] == "problem"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        ([".", "--ranks", "0"], "--ranks 0: wanted 1 or more"),
        ([".", "--gpu-memory-gib", "-1"], "--gpu-memory-gib -1"),
    ],
)
def test_wrong_usage_is_told_by_name(capsys, words, message):
    assert cli.main(["model", "check", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_anything_has_everything_wrong_told(tmp_path, capsys):
    found = check(tmp_path, capsys, code=1)
    topics = {each["topic"] for each in found["findings"] if each["level"] == "problem"}
    assert topics == {"config.json", "weight files"}
    assert found["variant"] == "not known"
    assert cli.main(["model", "check", str(tmp_path)]) == 1
    assert "can't be served: 2 problem" in " ".join(capsys.readouterr().out.split())


def test_the_command_without_a_verb_says_how_it_is_called(capsys):
    assert cli.main(["model"]) == 2
    assert "usage: isthmus model check DIR" in capsys.readouterr().err
