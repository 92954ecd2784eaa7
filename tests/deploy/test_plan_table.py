"""`isthmus plan`: what it prints of a machine that is elsewhere, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import cli

EIGHT = str(Path(__file__).resolve().parent.parent.parent / "deploy" / "rtx-pro-6000-x8.yaml")


def test_eight_cards_are_planned_without_a_gpu_or_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", EIGHT]) == 0
    text = capsys.readouterr().out
    assert "/models/DeepSeek-V4-Flash is not here: planned with the published config of DeepSeek-V4-Flash" in text
    assert "64 sequences, in graph" in text
    assert "131,072 tokens for each of 64" in text


def test_json_has_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", EIGHT, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    prefill, decode = document["groups"]
    assert (document["published"], prefill["role"], decode["role"]) == ("DeepSeek-V4-Flash", "prefill", "decode")
    memory = decode["memory"]
    assert sum(part["num_bytes"] for part in memory["parts"]) + memory["left_bytes"] == memory["device_bytes"]
    assert memory["graph_sizes"][-1] == memory["max_num_seqs"] == 64


def test_the_impossible_is_one_message_with_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", EIGHT, "--gpu-memory-gib", "30"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("isthmus plan: prefill-0: ") and err.count("\n") == 1
    assert "but a GPU has 30.00 GiB" in err and "ranks 8" in err


def test_leaders_that_are_given_one_port_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", EIGHT, "--prefill-port", "9001", "--decode-port", "9001"]) == 2
    assert "port 9001: given to prefill-0 and to decode-0; give each its own" in capsys.readouterr().err
    assert cli.main(["plan", EIGHT, "--decode-port", "8000"]) == 2
    assert "port 8000: given to router and to decode-0" in capsys.readouterr().err


def test_a_published_name_is_no_checkpoint_to_start_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--model", "/models/DeepSeek-V4-Flash"]) == 1
    assert "/models/DeepSeek-V4-Flash/config.json: no such file" in capsys.readouterr().out
