"""Numerics of the Triton kernels in the CPU interpreter: every interpreted_*.py in a process of its own (interp.py).

conftest.py begins them when tests have been collected.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import Future
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Of kernels that nothing calls yet: their samples, and what the gate says, are looked at in every run.
UNCALLED = ("interpreted_sampling",)
# Some of these files' tests are long; a run of its own has those.
PARTLY_LONG = ("interpreted_decode_step", "interpreted_samples", "interpreted_sparse_attention")
MODULES = [
    *(
        pytest.param(path.stem, "not long", marks=pytest.mark.long if path.stem in UNCALLED else (), id=path.stem)
        for path in sorted(HERE.glob("interpreted_*.py"))
    ),
    *(pytest.param(name, "long", marks=pytest.mark.long, id=f"{name}-long") for name in PARTLY_LONG),
]


@pytest.mark.parametrize(("module", "which"), MODULES)
def test_kernels_agree_with_their_references(
    module: str, which: str, runs: dict[tuple[str, str], Future[subprocess.CompletedProcess[str]]]
):
    done = runs[module, which].result()
    assert done.returncode == 0, f"TRITON_INTERPRET=1 pytest tests/kernels/{module}.py\n{done.stdout[-8000:]}"


def test_a_failing_kernel_fails_the_run(interp, tmp_path):
    (tmp_path / "interpreted_wrong.py").write_text("def test_wrong():\n    assert 1 == 2, 'numbers differ'\n")
    done = interp.run(tmp_path / "interpreted_wrong.py")
    assert done.returncode == 1 and "numbers differ" in done.stdout


def test_a_kernel_that_hangs_is_ended(interp, tmp_path):
    (tmp_path / "interpreted_slow.py").write_text("import time\ntime.sleep(600)\n")
    done = interp.run(tmp_path / "interpreted_slow.py", limit_s=2)
    assert done.returncode == 124 and "not done after 2 s" in done.stdout
