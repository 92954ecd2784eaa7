"""The experts of a decode step compiled, at the model's sizes: see moe.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_moe"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("moe.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_compiled_experts_equal_the_reference(case):
    assert cases.fault_of(case, "cuda") == ""


def test_every_code_under_every_scale_is_exact():
    assert cases.exactness_fault("cuda") == ""


def test_a_replayed_graph_computes_what_eager_calls_do():
    assert cases.replay_fault("cuda") == ""


def test_a_tokens_bits_do_not_depend_on_the_others():
    assert cases.alone_fault("cuda") == ""
