"""`isthmus bench prefill` and `isthmus profile --prompt` with a model of random weights on the CPU."""

import json
from pathlib import Path

import pytest

import bench.prefill
import bench.profile
import bench.step

TINY = Path(__file__).parents[1] / "oracle" / "tiny"
ENGINE = [
    "--model", str(TINY), "--load-format", "synthetic", "--kv-cache-dtype", "bf16", "--block-size", "128",
    "--num-layers", "3", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the report of two short prompts."""
    path = tmp_path_factory.mktemp("prefill") / "prefill.json"
    words = ["--prompt", "150,40", "--chunk-tokens", "64", "--json", str(path), "--simulate-rank", "0/2"]
    assert bench.prefill.main([*words, *ENGINE]) == 0
    return path


def test_every_prompt_is_measured_chunk_by_chunk_beside_its_floor(measured):
    report = json.loads(measured.read_text())
    assert [(run["prompt"], run["chunks"], len(run["chunk_ms"])) for run in report["runs"]] == [(40, 1, 1), (150, 3, 3)]
    for run in report["runs"]:
        assert run["ttft_ms"] == pytest.approx(sum(run["chunk_ms"]))
        assert run["tokens_per_s"] == pytest.approx(1000 * run["prompt"] / run["ttft_ms"])
        assert run["over_floor"] == pytest.approx(run["ttft_ms"] / run["floor_ms"])
        assert run["floor_ms"] == pytest.approx(sum(part["us"] for part in run["floor_parts"].values()) / 1000)
        assert (run["workspace_bytes"], run["planned_workspace_bytes"]) == (None, None)  # not counted on a CPU
    assert report["runs"][1]["last_ms"] == report["runs"][1]["chunk_ms"][1]  # the last one of full length
    conditions = report["conditions"]
    assert (conditions["shard"], conditions["layers"], conditions["chunk_tokens"]) == ("0/2", 3, 64)
    assert conditions["config"]["role"] == "prefill"


def test_a_stored_report_is_shown_without_measuring(measured, capsys, monkeypatch):
    monkeypatch.setattr(bench.prefill, "measure", None)
    assert bench.prefill.main(["--from", str(measured)]) == 0
    assert "rank 0/2, 3 layers" in capsys.readouterr().out


@pytest.mark.parametrize("command", [bench.prefill, bench.step], ids=["prefill", "step"])
@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (None, "No such file"),
        ("{", "no JSON"),
        ("{}", "was not written by `isthmus bench "),
        ('{"conditions": {}, "runs": [{"batch": 1}]}', "was not written by `isthmus bench "),
    ],
    ids=["missing", "broken", "empty", "of_another_command"],
)
def test_a_file_that_is_no_stored_report_is_refused(command, stored, error, tmp_path, capsys):
    path = tmp_path / "report.json"
    if stored is not None:
        path.write_text(stored)
    assert command.main(["--from", str(path)]) == 2
    assert f"--from {path}: {error}" in capsys.readouterr().err


def test_a_prompt_is_not_asked_of_a_running_worker(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.profile.main(["--url", "http://127.0.0.1:1", "--prompt", "8"])
    assert "--prompt runs in an engine in this process" in capsys.readouterr().err


def test_a_prompt_that_the_model_does_not_hold_is_refused(capsys):
    assert bench.prefill.main(["--prompt", "4000000", *ENGINE]) == 2
    assert "isthmus bench prefill:" in capsys.readouterr().err


def test_a_profile_of_a_prompt_bills_its_last_chunk(tmp_path, capsys):
    found = tmp_path / "bill.json"
    words = ["--prompt", "100", "--chunk-tokens", "64", "--json", str(found)]
    assert bench.profile.main([*words, *ENGINE]) == 0
    report = json.loads(found.read_text())
    assert (report["chunk_tokens"], report["context"]) == (36, 100)
    assert sum(line["us"] for line in report["bill"]["lines"]) == pytest.approx(report["bill"]["step_us"])
    assert "the last 36 tokens of a prompt of 100 tokens" in capsys.readouterr().out
