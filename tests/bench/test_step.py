"""`isthmus bench step` and `isthmus profile` with a model of random weights on the CPU."""

import importlib.util
import json
from pathlib import Path

import pytest

import bench.profile
import bench.step
from bench.step_plot import draw
from engine.flags import ConfigError

TINY = Path(__file__).parents[1] / "oracle" / "tiny"
ENGINE = [
    "--model",
    str(TINY),
    "--load-format",
    "synthetic",
    "--kv-cache-dtype",
    "bf16",
    "--block-size",
    "128",
    "--quiet",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the report of a short sweep."""
    path = tmp_path_factory.mktemp("step") / "step.json"
    sweep = ["--batch", "1,2,3,4", "--context", "64,96", "--steps", "3", "--num-layers", "2", "--json", str(path)]
    assert bench.step.main([*sweep, *ENGINE, "--simulate-rank", "0/2"]) == 0
    return path


def test_every_batch_at_every_context_is_measured_beside_its_floor(measured):
    report = json.loads(measured.read_text())
    runs = report["runs"]
    assert [(run["batch"], run["context"]) for run in runs] == [(b, c) for c in (64, 96) for b in (1, 2, 3, 4)]
    for run in runs:
        assert 0 < run["p10_ms"] <= run["step_ms"] <= run["p90_ms"]
        assert run["over_floor"] == pytest.approx(run["step_ms"] / run["floor_ms"])
        assert run["tokens_per_s"] == pytest.approx(1000 * run["batch"] / run["step_ms"])
        assert (run["device_ms"], run["gap"], run["nodes"]) == (None, None, None)  # a CPU has no graphs
    floors = [run["floor_ms"] for run in runs[:4]]
    assert floors == sorted(floors)
    assert report["step_law"]["experts"]["total"] == 8
    assert set(report["step_laws"]) == {"64", "96"}
    conditions = report["conditions"]
    assert (conditions["shard"], conditions["layers"], conditions["steps"]) == ("0/2", 2, 3)
    assert conditions["commit"] and conditions["torch"] and conditions["config"]["block_size"] == 128


def test_a_stored_report_is_shown_without_measuring(measured, capsys, monkeypatch):
    monkeypatch.setattr(bench.step, "measure", None)
    assert bench.step.main(["--from", str(measured)]) == 0
    out = capsys.readouterr().out
    assert "rank 0/2, 2 layers" in out
    assert "a + b N" in out or "too few" in out


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib is not installed"):
        bench.step.main(["--png", "x.png", *ENGINE])


def test_a_plot_is_drawn(measured, tmp_path):
    pytest.importorskip("matplotlib")
    draw(json.loads(measured.read_text()), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--batch", "1,0"], ["--batch", "two"], ["--steps", "0"]])
def test_numbers_that_are_none_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        bench.step.main([*words, *ENGINE])
    assert "wanted whole numbers of at least 1" in capsys.readouterr().err


def test_one_batch_has_no_law_and_says_what_would(capsys):
    assert bench.step.main(["--batch", "1", "--context", "64", "--steps", "1", "--num-layers", "1", *ENGINE]) == 0
    assert "two batches far apart are needed" in capsys.readouterr().out


def test_a_profile_bills_every_operation_and_keeps_its_trace(tmp_path, capsys):
    trace, found = tmp_path / "trace.json", tmp_path / "bill.json"
    words = ["--batch", "2", "--context", "64", "--steps", "2", "--num-layers", "2", "--trace", str(trace)]
    assert bench.profile.main([*words, "--json", str(found), *ENGINE]) == 0
    report = json.loads(found.read_text())
    lines = report["bill"]["lines"]
    assert sum(line["us"] for line in lines) == pytest.approx(report["bill"]["step_us"])
    assert sum(line["share"] for line in lines) == pytest.approx(1)
    assert json.loads(trace.read_text())["traceEvents"]
    assert "aten::mm" in capsys.readouterr().out


def test_a_worker_that_is_not_there_is_no_traceback(capsys):
    assert bench.profile.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "isthmus profile:" in capsys.readouterr().err


def test_a_group_of_ranks_sweeps_in_step_and_its_floor_has_the_sums(tmp_path):
    path = tmp_path / "step.json"
    sweep = ["--batch", "1", "--context", "64", "--steps", "3", "--num-layers", "2", "--json", str(path)]
    assert bench.step.main([*sweep, *ENGINE, "--ranks", "2"]) == 0
    report = json.loads(path.read_text())
    assert report["conditions"]["shard"] == "0/2" and report["conditions"]["exchange"]["backend"] == "gloo"
    (run,) = report["runs"]
    assert run["sums"]["calls"] == 4 and run["sums"]["ms"] == pytest.approx(4 * run["sums"]["us"] / 1000)
    assert run["floor_with_sums_ms"] == pytest.approx(run["floor_ms"] + run["sums"]["ms"])
