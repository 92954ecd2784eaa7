"""sparse_attention_decode compiled, at the model's sizes: see sparse_attention.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_sparse_attention"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("sparse_attention.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_compiled_attention_equals_the_reference(case):
    assert cases.fault_of(case, "cuda") == ""


def test_bits_of_a_token_do_not_depend_on_the_batch_where_promised():
    assert cases.invariance_fault("cuda") == ""


def test_a_replayed_graph_computes_what_eager_calls_do():
    assert cases.replay_fault("cuda") == ""
