"""Linear layers compiled, at the model's sizes: see gemm.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_gemm"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("gemm.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_compiled_layers_equal_the_reference(case):
    assert cases.fault_of(case, "cuda") == ""


def test_a_replayed_graph_computes_what_eager_calls_do():
    assert cases.replay_fault("cuda") == ""


@pytest.mark.parametrize("tokens", [300, 4096])
def test_a_token_does_not_depend_on_the_others(tokens):
    assert cases.apart_fault("cuda", tokens) == ""
