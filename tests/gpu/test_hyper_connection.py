"""Hyper-connections compiled, at the model's sizes: see hyper_connection.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_hyper_connection"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("hyper_connection.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_compiled_launches_equal_their_formula(case):
    assert cases.fault_of(case, "cuda") == ""


def test_a_token_has_the_same_bits_alone_and_in_a_batch():
    assert cases.batch_fault("cuda") == ""


def test_a_replayed_graph_computes_what_eager_calls_do():
    assert cases.replay_fault("cuda") == ""


def test_a_token_has_the_same_bits_in_every_chunk():
    assert cases.chunk_fault("cuda") == ""
