"""Every planted fault still fits the code it was made for; `make mutants` shows that the tests see it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _runner():
    spec = importlib.util.spec_from_file_location("mutants_run", HERE / "run.py")
    module = sys.modules["mutants_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = _runner()


@pytest.mark.parametrize("mutant", run.all_mutants(), ids=lambda mutant: mutant.name)
def test_patch_applies_and_names_tests_that_exist(mutant):
    assert run.apply(mutant.patch, ROOT, check=True) == "", "make the patch anew"
    files = [word.split("::")[0] for word in mutant.tests.split() if word.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_there_are_mutants_of_every_package():
    packages = {
        line.removeprefix("+++ b/").split("/")[0]
        for mutant in run.all_mutants()
        for line in mutant.patch.read_text().splitlines()
        if line.startswith("+++ ")
    }
    assert packages == {"router", "engine", "prefill_worker", "decode_worker", "kv_transfer", "kernels", "deploy"}


def test_fault_that_no_test_sees_is_reported(tmp_path, monkeypatch):
    """The runner itself: a patch that changes nothing must not count as killed."""
    patch = tmp_path / "harmless.patch"
    patch.write_text(
        "# nothing\n# case: none\n# tests: tests/kv_transfer/test_plan.py\n"
        "--- a/text\n+++ b/text\n@@ -1 +1,2 @@\n one\n+two\n"
    )
    monkeypatch.setattr(run, "copy_tree", lambda tree: (tree / "text").write_text("one\n"))
    monkeypatch.setattr(run, "pytest_run", lambda arguments, tree: (0, ""))
    verdict = run.try_mutant(run.load(patch))
    assert (verdict.is_killed, verdict.word) == (False, "SURVIVED")
