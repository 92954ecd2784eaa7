"""`isthmus bench weights` over a real checkpoint on the CPU: what it reports, and what it makes of wrong values."""

import json
from pathlib import Path

import pytest

import engine.model.weight_cache as weight_cache
import engine.model.weights as weights
from bench.page_cache import cached_share, drop_cache
from bench.weights import main

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
    out = capsys.readouterr().out
    assert "30 samples" in out
    assert "GB in 1 file\n" in out


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


def test_a_warm_page_cache_and_a_weight_cache_are_measured_too_and_nothing_stays(tmp_path, capsys):
    disk = tmp_path / "disk"
    code, report = run(tmp_path, "--warm", "--weight-cache", str(disk), "--samples", "30")
    warm, cache = report["warm"], report["cache"]
    assert code == 0
    assert warm["bytes_per_s"] == pytest.approx(report["read_bytes"] / warm["seconds"])
    assert cache["extra_seconds"] == pytest.approx(cache["keeping"]["seconds"] - report["load"]["seconds"])
    assert cache["read_bytes"] >= cache["written_bytes"] > 0
    rate = cache["read_bytes"] / cache["load"]["seconds"]
    assert cache["of_bound"] == pytest.approx(rate / cache["disk"]["bytes_per_s"])
    assert (cache["samples"]["compared"], cache["samples"]["faults"]) == (30, [])
    assert list(disk.iterdir()) == []
    table = capsys.readouterr().out
    assert all(row in table for row in ("load, page cache warm", "load from the weight cache", "weight cache: "))


def test_what_is_wrong_in_the_weight_cache_is_named_and_what_can_not_be_kept_is_said(tmp_path, monkeypatch, capsys):
    write = weight_cache._write_part

    def write_wrong(folder, part, tensors):
        return write(
            folder, part, {name: tensor * 2 if name == "embed.weight" else tensor for name, tensor in tensors.items()}
        )

    monkeypatch.setattr(weight_cache, "_write_part", write_wrong)
    code, report = run(tmp_path, "--weight-cache", str(tmp_path), "--samples", "1000")
    assert (code, report["samples"]["faults"]) == (1, [])
    assert report["cache"]["samples"]["faults"][0].startswith("embed.weight: off by")

    def fail(folder, part, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_cache, "_write_part", fail)
    assert main(["--model", str(TINY), "--weight-cache", str(tmp_path), "--quiet"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_a_folder_that_is_refused_is_said_so(tmp_path, capsys):
    assert main(["--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_what_the_page_cache_has_of_a_file_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    dropped = drop_cache([path])
    assert path.read_bytes() == bytes(1 << 20)
    assert 0 <= dropped <= cached_share([path]) <= 1


@pytest.mark.parametrize(("flags", "named"), [(["--samples", "-3"], "--samples -3"), (["--device", "cuda"], "no GPU")])
def test_what_can_not_be_measured_is_refused_before_anything_is_read(monkeypatch, capsys, flags, named):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("bench.weights._read_only", lambda *_: pytest.fail("read"))
    assert main(["--model", str(TINY), "--quiet", *flags]) == 2
    assert named in capsys.readouterr().err
