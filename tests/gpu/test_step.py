"""A step's first and last launch compiled: see step.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_step"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("step.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("size", cases.SIZES)
def test_compiled_steps_begin_and_end_as_the_reference(size):
    assert cases.size_fault(size, "cuda") == ""


def test_sizes_that_are_no_powers_of_two():
    assert cases.size_fault(5, "cuda", rope=12, hidden=70) == ""


def test_replayed_steps_go_on_from_each_other():
    assert cases.replay_fault("cuda") == ""
