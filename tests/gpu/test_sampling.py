"""Sampling compiled, at the model's vocabulary: see sampling.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_sampling"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("sampling.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_compiled_sampling_takes_the_right_tokens(case):
    assert cases.fault_of(case, "cuda") == ""


def test_a_row_has_the_same_bits_in_every_batch():
    assert cases.batch_fault("cuda") == ""


def test_noise_is_that_of_the_reference():
    assert cases.noise_fault("cuda") == ""


def test_a_replayed_graph_chooses_what_eager_calls_do():
    assert cases.replay_fault("cuda") == ""
