"""The scripts of deploy/runs: they parse, know their steps, and run dry on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "two_gpus": ("correctness", "all_reduce", "step", "transfer", "pair", "faults"),
    "full_shape": ("correctness", "all_reduce", "step", "serve_short", "serve_long", "transfer"),
}


def run(name, *words, timeout_s, **environ):
    script = ROOT / "deploy" / "runs" / f"{name}.sh"
    return subprocess.run(
        ["bash", str(script), *words],
        env=os.environ | {"PYTHON": sys.executable} | environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.parametrize("name", ["two_gpus", "full_shape", "steps"])
def test_run_scripts_parse(name):
    path = ROOT / "deploy" / "runs" / f"{name}.sh"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("name", list(STEPS))
def test_every_step_of_a_run_is_a_function(name):
    text = (ROOT / "deploy" / "runs" / f"{name}.sh").read_text()
    assert f'steps="{" ".join(STEPS[name])}"' in text
    assert [step for step in STEPS[name] if f"step_{step}() {{" not in text] == []


def test_a_step_that_there_is_not_is_refused(tmp_path):
    done = run("two_gpus", "transfers", timeout_s=20, OUT=str(tmp_path))
    assert done.returncode == 2
    assert "transfers: no such step; wanted some of: correctness" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in STEPS.items() for step in steps])
def test_a_step_runs_dry(name, step, tmp_path):
    done = run(name, step, timeout_s=480, DRY="1", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
