"""`oracle/geo` through the decode kernels: see geo.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def geo():
    path = Path(__file__).parent / "geo.py"
    spec = importlib.util.spec_from_file_location("gpu_geo", path)
    module = sys.modules.setdefault("gpu_geo", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(geo, tmp_path_factory):
    return geo.write_checkpoint(tmp_path_factory.mktemp("geo"))


@pytest.mark.parametrize("index", ["fp4", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_teacher_forced_step_chooses_as_golden(geo, checkpoint, dtype, index):
    steps = geo.run(checkpoint, device="cuda", dtype=dtype, index=index)
    assert len(steps) == 24
    assert [(s.length, s.step, s.fault) for s in steps if s.fault] == []
    assert geo.median_fault(steps) == ""
