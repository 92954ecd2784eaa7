"""`oracle/geo` through the decode kernels: see geo.py and geo_experts.py, which also run without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load(name):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", Path(__file__).with_name(f"{name}.py"))
    module = sys.modules.setdefault(f"gpu_{name}", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


geo, geo_experts = _load("geo"), _load("geo_experts")


@pytest.fixture(scope="module", params=["mxfp4", "nvfp4"])
def checkpoint(request, tmp_path_factory):
    return geo.write_checkpoint(tmp_path_factory.mktemp("geo"), nvfp4=geo.EXPERTS[request.param])


@pytest.mark.parametrize("index", ["fp4", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_teacher_forced_step_chooses_as_golden(checkpoint, dtype, index):
    steps = geo.run(checkpoint, device="cuda", dtype=dtype, index=index)
    assert len(steps) == 24
    assert [(s.length, s.step, s.fault) for s in steps if s.fault] == []
    assert geo.median_fault(steps) == ""


@pytest.mark.parametrize("formats", list(geo.EXPERTS))
@pytest.mark.parametrize("dtype", list(geo_experts.BOUNDS))
def test_expert_layers_stay_close_to_float_experts(tmp_path, dtype, formats):
    layers = geo_experts.Layers(tmp_path, formats, device="cuda", dtype=dtype)
    tried = [(layer, tokens) for layer in geo_experts.LAYERS for tokens in geo_experts.TOKENS]
    assert [(at, fault) for at in tried if (fault := layers.fault(*at))] == []
