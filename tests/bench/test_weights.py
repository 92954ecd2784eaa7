"""`isthmus bench weights` over a real checkpoint on the CPU: what it reports, and what it makes of wrong values."""

import json
from pathlib import Path

import pytest
import torch

import engine.model.weights as weights
from bench.weights import drop_cache, main

TINY = Path(__file__).resolve().parent.parent / "oracle/tiny"


def run(tmp_path, *options, model=TINY):
    code = main(["--model", str(model), "--json", str(tmp_path / "report.json"), "--quiet", *options])
    return code, json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("shard", ["0/1", "1/2"])
def test_it_reports_what_was_read_and_that_values_are_those_of_the_files(tmp_path, capsys, shard):
    code, report = run(tmp_path, "--shard", shard, "--samples", "30")
    assert code == 0
    stored = (TINY / "model.safetensors").stat().st_size
    assert 0 < report["read_bytes"] <= stored
    assert report["samples"]["compared"] == 30
    assert report["samples"]["faults"] == []
    assert report["load"]["in_flight_bytes"] >= report["read_bytes"] / 2
    assert (report["copy_bytes_per_s"], report["peak_over_in_flight"]) == (None, None)
    assert "30 samples" in capsys.readouterr().out


def test_values_that_are_not_the_files_are_named(tmp_path, monkeypatch, capsys):
    read = weights.read_values
    monkeypatch.setattr(
        weights, "read_values", lambda name, *args: read(name, *args) * (1.01 if name == "embed.weight" else 1)
    )
    code, report = run(tmp_path, "--samples", "1000")
    assert code == 1
    assert len(report["samples"]["faults"]) == 1
    assert report["samples"]["faults"][0].startswith("embed.weight: off by")
    assert "embed.weight: off by" in capsys.readouterr().out


def test_a_folder_that_is_refused_is_said_so(tmp_path, capsys):
    assert main(["--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_what_the_page_cache_still_has_of_a_file_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert 0 <= drop_cache([path]) <= 1
    assert torch.equal(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), torch.zeros(1 << 20).byte())
