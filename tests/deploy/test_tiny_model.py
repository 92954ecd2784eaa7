"""deploy/tiny_model.py: complete, the same everywhere, and never half there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from deploy import tiny_model
from engine.flags import ConfigError
from router.chat import ChatMessage, encode_chat
from router.encoding import EncodingTexts

SHA256_OF_WEIGHTS = "8d56d0f216525a3cde3b4b6d585d14b81d8fc7f26a62734408f371dc81fd46e3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.ensure_tiny_model({"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))})


def test_folder_has_every_file_and_the_models_name(folder: Path) -> None:
    assert folder.name == "dsv4-tiny"
    files = (path for path in folder.rglob("*") if path.is_file())
    assert {path.relative_to(folder).as_posix() for path in files} == set(tiny_model.FILES)


def test_weights_are_the_same_on_every_machine(folder: Path) -> None:
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == SHA256_OF_WEIGHTS


def test_files_stay_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 48 << 20


def test_router_finds_every_prompt_text(folder: Path) -> None:
    texts = EncodingTexts.from_folder(folder)
    assert texts is not None and not texts.unreadable
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    prompt = encode_chat(
        [ChatMessage(role="user", content="hi", task="action")],
        texts=texts,
        tools=[tool],
        response_format={"type": "json_object"},
        effort="max",
        thinking=True,
    )
    assert prompt.startswith("<｜begin▁of▁sentence｜>Effort:") and '{"name": "look", "parameters"' in prompt
    assert '{"type": "object"}<｜User｜>hi<｜Assistant｜><think><｜action｜>' in prompt


def test_prompt_texts_are_no_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    from engine.model.config import model_fingerprint

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    assert model_fingerprint(tmp_path) == model_fingerprint(folder)


def test_engine_reads_its_config(folder: Path) -> None:
    from engine.model.config import load_config

    model = load_config(folder)
    assert model.vocab_size == 129280


def test_has_every_kind_of_layer() -> None:
    ratios, num_hash = tiny_model.CONFIG["compress_ratios"][:-1], tiny_model.CONFIG["num_hash_layers"]
    kinds = {(ratio, layer < num_hash) for layer, ratio in enumerate(ratios)}
    assert kinds == {(0, True), (4, True), (128, False), (4, False), (0, False)}


def test_expert_tables_name_distinct_existing_experts(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "np") as file:
        table = file.get_tensor("layers.0.ffn.gate.tid2eid")
    assert table.shape == (129280, 2)
    assert table.min() >= 0 and table.max() < tiny_model.CONFIG["n_routed_experts"]
    assert (table[:, 0] != table[:, 1]).all()


def test_tokenizer_covers_the_vocabulary(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == tiny_model.CONFIG["vocab_size"]
    assert tokenizer.token_to_id("<｜User｜>") == 128803
    assert tokenizer.decode(tokenizer.encode("Isthmus — 地峡").ids) == "Isthmus — 地峡"


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    values[:4] = [1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0]  # two ties, to even both ways
    ours = torch.from_numpy(tiny_model.to_bfloat16(values).astype(np.int32).astype(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).bfloat16())


def test_second_call_finds_it_and_writes_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = tiny_model.ensure_tiny_model({"XDG_CACHE_HOME": str(folder.parents[3])})
    assert again == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_interrupted_write_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "_write_tensors", fail)
    with pytest.raises(KeyboardInterrupt):
        tiny_model.write_tiny_model(tmp_path / "models" / "dsv4-tiny")
    assert list((tmp_path / "models").iterdir()) == []


def test_folder_with_a_missing_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "_write_tensors", lambda path: path.write_bytes(b"weights"))
    folder = tiny_model.ensure_tiny_model({"XDG_CACHE_HOME": str(tmp_path)})
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text("{}")
    assert tiny_model.ensure_tiny_model({"XDG_CACHE_HOME": str(tmp_path)}) == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "deepseek_v4"


def test_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/isthmus.*Not a directory.*XDG_CACHE_HOME"):
        tiny_model.ensure_tiny_model({"XDG_CACHE_HOME": str(tmp_path / "file")})
