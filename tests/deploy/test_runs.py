"""The scripts of deploy/runs: they parse, know their steps, and run dry on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "two_gpus": ("correctness", "all_reduce", "step", "transfer", "pair", "longest", "faults"),
    "full_shape": (
        *("correctness", "served", "all_reduce", "step", "serve_short", "serve_long", "serve_longest", "transfer"),
    ),
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


STUB = """#!/bin/sh
# python, but for benchmarks: those leave a step that takes ten times its floor.
case "$2" in bench.bars) exec {python} "$@" ;; esac
while [ $# -gt 1 ]; do [ "$1" != --json ] || [ -z "$LEAVES" ] || echo "$LEAVES" >"$2"; shift; done
"""


@pytest.fixture
def step_that_leaves(tmp_path):
    """A function of (report, environment) that runs `step` of two_gpus with a benchmark that leaves such a report."""
    stub = tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)

    def leave(text, **environ):
        environ |= {"PYTHON": str(stub), "OUT": str(tmp_path), "LEAVES": text}
        return run("two_gpus", "step", timeout_s=30, **environ)

    return leave


SLOW = '{"runs": [{"batch": 1, "share_of_floor": 0.1}]}'
GOOD = '{"runs": [' + ", ".join(f'{{"batch": {n}, "share_of_floor": 0.5}}' for n in (1, 16, 64)) + "]}"


def test_a_step_that_misses_a_bar_fails_and_says_which(step_that_leaves):
    done = step_that_leaves(SLOW)
    assert done.returncode == 1
    assert "not met: two_gpus_step: floor with sums, of a step at B = 1;" in done.stdout
    assert step_that_leaves(GOOD).returncode == 0


def test_times_of_a_dry_run_are_shown_and_not_judged(step_that_leaves):
    done = step_that_leaves(SLOW, DRY="1")
    assert done.returncode == 0
    assert ">= 0.3       0.1  not judged" in done.stdout


def test_what_an_earlier_run_has_left_is_not_judged(step_that_leaves):
    assert step_that_leaves(GOOD).returncode == 0
    done = step_that_leaves("")
    assert done.returncode == 1
    assert "no report of step (FileNotFoundError)" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in STEPS.items() for step in steps])
def test_a_step_runs_dry(name, step, tmp_path):
    done = run(name, step, timeout_s=480, DRY="1", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
