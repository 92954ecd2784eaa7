"""Damaged checkpoints: refused by name and with a remedy, by `isthmus model check` and by all that start one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import decode_worker.__main__ as decode_worker
from deploy import cli
from deploy.model_synthesize import synthesize
from deploy.preflight import plan_group
from deploy.synthetic_checkpoint import make_config
from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.model.config import WEIGHT_INDEX, load_config
from engine.model.weights import load_weights
from router.__main__ import main as run_router

ROOT = Path(__file__).resolve().parents[2]
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
EXPERT = "layers.3.ffn.experts.5.w2"
LIMIT_S = 5.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of two files, small enough to be copied for each test."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    config = make_config("tiny", layers=0, experts="mxfp4", has_mtp=True) | {"vocab_size": 512}
    synthesize(folder, config, "mxfp4", shard_bytes=1_200_000, say=lambda _: None)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [FIRST, SECOND]
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """A copy to be damaged; who waits for what never comes from it is woken."""
    woken = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"took more than {LIMIT_S:g} s"))
    signal.setitimer(signal.ITIMER_REAL, 4 * LIMIT_S)
    yield Path(shutil.copytree(whole, tmp_path / "model"))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, woken)


def edit_json(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_header(path: Path, change: Any, *, data: Any = None) -> None:
    """Rewrite a weight file with another header; data: changes its bytes, given them and the header as it was."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header, content = json.loads(raw[8:begin]), bytearray(raw[begin:])
    if data is not None:
        data(content, header)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / WEIGHT_INDEX).read_text())["weight_map"][name]


def cut_short(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-1000])


def change_dtype(folder: Path) -> None:
    edit_header(file_of(folder, "norm.weight"), lambda header: header["norm.weight"].update(dtype="I16"))


def lose_scale(folder: Path) -> None:
    edit_header(file_of(folder, f"{EXPERT}.scale"), lambda header: header.pop(f"{EXPERT}.scale"))
    edit_json(folder / WEIGHT_INDEX, lambda index: index["weight_map"].pop(f"{EXPERT}.scale"))


def swap_shape(folder: Path) -> None:
    name = "layers.2.attn.wq_a.weight"
    edit_header(file_of(folder, name), lambda header: header[name]["shape"].reverse())


def add_tensor(folder: Path) -> None:
    def change(header: Any) -> None:
        end = max(about["data_offsets"][1] for name, about in header.items() if name != "__metadata__")
        header["layers.9.attn.extra"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}

    edit_header(folder / SECOND, change, data=lambda content, _: content.extend(bytes(4)))


def point_nowhere(folder: Path) -> None:
    name = "model-00003-of-00002.safetensors"
    edit_json(folder / WEIGHT_INDEX, lambda index: index["weight_map"].update({"norm.weight": name}))


def point_wrong(folder: Path) -> None:
    edit_json(folder / WEIGHT_INDEX, lambda index: index["weight_map"].update({"embed.weight": SECOND}))


def spoil_index(folder: Path) -> None:
    (folder / WEIGHT_INDEX).write_text('{"weight_map": ')


def spoil_header(folder: Path) -> None:
    (folder / FIRST).write_bytes((8).to_bytes(8, "little") + b"[1,2,3] ")


def name_twice(folder: Path) -> None:
    shutil.copy(folder / FIRST, folder / SECOND)


def make_loop(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / SECOND)


def make_folder(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).mkdir()


def replace_by_pipe(name: str) -> Any:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def be_device(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to("/dev/zero")


def be_another(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(model_type="llama", architectures=["LlamaForCausalLM"]))


def see(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(vision_config={"depth": 24}))


# How each is damaged, what names it, and what `isthmus model check` says to do.
DAMAGES = {
    "truncated shard": (cut_short, rf"{SECOND}: can't be opened \(cut short", "fetch it again"),
    "wrong dtype": (change_dtype, r"norm\.weight: stored as I16", "take config.json and weights of one revision"),
    "missing scale": (lose_scale, rf"{EXPERT}\.scale: missing, its weight is quantised", "export the checkpoint again"),
    "swapped shape": (swap_shape, r"wq_a\.weight: shape \[64, 16\] as F8_E4M3, wanted \[16, 64\]", "one revision"),
    "extra tensor": (add_tensor, r"layers\.9\.attn\.extra: not part of this model", "one revision"),
    "index names no file": (point_nowhere, r"lacks model-00003-of-00002\.safetensors", "fetch what is missing"),
    "index names another file": (point_wrong, rf"embed\.weight: lies in {FIRST}, .* says {SECOND}", "one revision"),
    "index cut short": (spoil_index, r"model\.safetensors\.index\.json: not JSON", "fetch it again"),
    "header no object": (spoil_header, rf"{FIRST}: can't be opened \(its header is no JSON object\)", "fetch it again"),
    "duplicate name": (name_twice, rf"tid2eid: stored in both {FIRST} and {SECOND}", "fetch both again"),
    "symlink loop": (make_loop, rf"lacks {SECOND} \(a link to .*leads to no file", "fetch what is missing"),
    "unreadable file": (make_folder, rf"lacks {SECOND} \(a folder is in its place\)", "fetch what is missing"),
    "config.json a pipe": (replace_by_pipe("config.json"), r"config\.json: is not a regular file", "fetch it again"),
    "index a pipe": (replace_by_pipe(WEIGHT_INDEX), r"index\.json: is not a regular file", "fetch it again"),
    "shard a pipe": (replace_by_pipe(SECOND), rf"lacks {SECOND} \(.* not a regular file\)", "fetch what is missing"),
    "shard a device": (be_device, rf"lacks {FIRST} \(.* not a regular file\)", "fetch what is missing"),
    "wrong architecture": (be_another, r"model_type 'llama'.*wanted 'deepseek_v4'", "serve a DeepSeek-V4 checkpoint"),
    "vision model": (see, r"vision_config: a vision model", "serve DeepSeek-V4-Flash or -0731"),
}


@pytest.mark.parametrize(("damage", "named", "remedy"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoints_are_refused_everywhere(copy, capsys, damage, named, remedy):
    damage(copy)
    start = time.monotonic()
    assert cli.main(["model", "check", str(copy), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    problems = [each for each in findings if each["level"] == "problem"]
    assert any(re.search(named, each["seen"]) and remedy in each["remedy"] for each in problems), problems
    group = EngineConfig(model=str(copy), role="decode", worker_id="decode-0", max_model_len=512)
    with pytest.raises(ConfigError, match=f"(?s)decode-0: .*{named}") as refused:
        plan_group(group)
    assert remedy in str(refused.value) or "files of one revision" in str(refused.value)
    assert decode_worker.main(["--model", str(copy), "--max-model-len", "512"]) == 2
    assert re.search(named, capsys.readouterr().err)
    with pytest.raises(ValueError, match=named):
        load_weights(copy, load_config(copy), dtype=torch.float32)
    assert time.monotonic() - start < LIMIT_S


def test_a_checkpoint_that_is_whole_is_checked_planned_and_loaded(copy, capsys):
    assert cli.main(["model", "check", str(copy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["problem"] == 0
    plan_group(EngineConfig(model=str(copy), role="decode", worker_id="decode-0", max_model_len=512))
    loaded = load_weights(copy, load_config(copy), dtype=torch.float32)
    assert all(bool(tensor.isfinite().all()) for tensor in loaded.tensors.values())
    assert len(loaded.skipped) == found["drafting"][0]["tensors"]


def put_nan(folder: Path) -> None:
    def change(content: bytearray, header: Any) -> None:
        begin = header["norm.weight"]["data_offsets"][0]
        content[begin : begin + 2] = b"\xc0\x7f"

    edit_header(file_of(folder, "norm.weight"), lambda _: None, data=change)


def test_what_is_no_number_is_found_by_loading(copy, capsys):
    put_nan(copy)
    assert cli.main(["model", "check", str(copy)]) == 0
    start = time.monotonic()
    with pytest.raises(
        ValueError, match=r"1 tensor or file doesn't fit .* of one revision:\n  norm\.weight: 1 of 64 values"
    ):
        load_weights(copy, load_config(copy), dtype=torch.float32)
    assert time.monotonic() - start < LIMIT_S


def test_a_worker_that_finds_no_number_says_so_and_no_more(copy):
    put_nan(copy)
    command = [sys.executable, "-m", "decode_worker", "--model", str(copy), "--max-model-len", "512"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("norm.weight: 1 of 64 values") == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.write_text('{"version": '), "not a tokenizer"),
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is not a regular file"),
    ],
    ids=["corrupt", "a pipe", "a folder"],
)
def test_a_tokenizer_that_can_not_be_read_is_refused_by_check_and_router(copy, capsys, damage, named):
    damage(copy / "tokenizer.json")
    assert cli.main(["model", "check", str(copy), "--json"]) == 1
    (problem,) = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["level"] == "problem"]
    assert f"tokenizer.json: {named}" in problem["seen"]
    assert "fetch it again" in problem["remedy"]
    start = time.monotonic()
    workers = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:10"]
    assert run_router(["--model", str(copy), "--port", "0", *workers]) == 1
    assert time.monotonic() - start < LIMIT_S
    assert f"tokenizer.json: {named}" in capsys.readouterr().err


def test_a_missing_tokenizer_and_a_file_without_index_are_reported_not_refused(tmp_path, capsys):
    config = make_config("tiny", layers=2, experts="mxfp4", has_mtp=False) | {"vocab_size": 512}
    synthesize(tmp_path / "model", config, "mxfp4", say=lambda _: None)
    folder = tmp_path / "model"
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / WEIGHT_INDEX).unlink()
    assert cli.main(["model", "check", str(folder)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "one file, no index" in out
    assert "no tokenizer.json: only prompts of token ids" in out
    assert "can be served: 0 problems, 2 warnings" in out
