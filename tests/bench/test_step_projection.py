"""`isthmus bench step --project` of a stored report: what is written, shown and refused."""

import json

import msgspec
import pytest

import bench.step
from engine.flags import ConfigError
from engine.model.published import published_config
from engine.step_floor import Formats

NO_LAW = {"a_ms": None, "problem": "too few batches"}


def run(batch, step_ms):
    unknown = ("device_ms", "gap_ms", "gap", "nodes")
    known = {"batch": batch, "context": 8192, "steps": 200, "step_ms": step_ms, "p10_ms": step_ms, "p90_ms": step_ms}
    return known | {"tokens_per_s": 1000 * batch / step_ms, "floor_ms": 1.0, "over_floor": 1.0} | dict.fromkeys(unknown)


@pytest.fixture
def report():
    """Return a report as of one rank of four of V4-Flash, three batches."""
    formats = Formats()
    conditions = {
        "date": "2026-11-30",
        "commit": "0123456",
        "device": "NVIDIA H200",
        "ceilings": {"bytes_per_s": 4.3e12, "flops_per_s": 788e12, "source": "a test"},
        "model": msgspec.to_builtins(published_config("DeepSeek-V4-Flash-NVFP4")),
        "formats": {name: getattr(formats, name) for name in formats.__slots__},
        "shard": "0/4",
        "layers": 43,
    }
    runs = [run(1, 3.0), run(64, 14.0), run(128, 20.0)]
    return {"conditions": conditions, "runs": runs, "step_law": NO_LAW, "step_laws": {"8192": NO_LAW}}


def project(report, folder):
    given, written = folder / "given.json", folder / "written.json"
    given.write_text(json.dumps(report))
    assert bench.step.main(["--from", str(given), "--project", "--json", str(written)]) == 0
    return json.loads(written.read_text())


def test_a_projection_is_written_beside_what_was_measured_from_which_it_can_be_added_up(report, tmp_path):
    written = project(report, tmp_path)
    assert written["runs"] == report["runs"]
    found = written["projection"]
    assert (found["what"], found["cards"], found["left_out"]) == ("a projection, not measured", 4, [128])
    assert [one["batch"] for one in found["runs"]] == [1, 64]
    for one in found["runs"]:
        for chip, total in (("measured_on", "measured_sum_ms"), ("projected", "sum_ms")):
            bounds = [part[chip] for part in one["parts"].values()]
            assert sum(max(b["bytes_us"], b["issue_us"]) for b in bounds) == pytest.approx(1000 * one[total])
        assert one["fixed_ms"] == pytest.approx(one["measured_ms"] - one["measured_sum_ms"])
        assert one["step_ms"] == pytest.approx(one["sum_ms"] + one["fixed_ms"] + one["all_reduce_ms"])
    assert found["runs"][0]["sum_ms"] == pytest.approx(2.40, abs=0.01)  # what must be read, at 1.597 TB/s


def test_its_title_says_what_it_is_not(report, tmp_path, capsys):
    project(report, tmp_path)
    out = capsys.readouterr().out
    assert "Projection, not measured: decode steps of 4 RTX PRO 6000" in out
    assert "not projected: batch 128" in out


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("device", "CPU", "wanted a report measured on an H200"),
        ("shard", "0/2", "shards 2"),
        ("shard", "0/1", "shards 1"),
    ],
)
def test_what_was_measured_elsewhere_or_of_another_share_is_refused(report, tmp_path, field, value, said):
    report["conditions"][field] = value
    with pytest.raises(ConfigError, match=said):
        project(report, tmp_path)
