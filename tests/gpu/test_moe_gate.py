"""The gate compiled, at the model's sizes: see moe_gate.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_moe_gate"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("moe_gate.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_the_compiled_gate_routes_right(case):
    assert cases.fault_of(case, "cuda") == ""


def test_a_replayed_graph_chooses_what_eager_calls_do():
    assert cases.replay_fault("cuda") == ""
