"""Every storage form of `geo` and `mx` on a GPU: see storage_forms.py, which also runs without pytest."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.gpu
def test_every_storage_form_chooses_as_golden():
    done = subprocess.run(
        [sys.executable, str(HERE / "storage_forms.py"), "--jobs", "12"],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
