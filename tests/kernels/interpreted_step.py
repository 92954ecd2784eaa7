"""The first and last launch of a step against their torch references; outputs are full of other numbers before."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import kernels.step as module


def _cases():
    name = "step_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        x.view(torch.uint8).fill_(0xFF)
        return x

    monkeypatch.setattr(module.torch, "empty", empty)


@pytest.mark.parametrize("rope", [64, 12])
def test_a_steps_inputs_are_those_of_the_reference(rope):
    assert cases.begin_fault(cases.make_step(rope=rope)) == ""


@pytest.mark.parametrize("hidden", [64, 100])
def test_a_step_ends_as_the_reference_does(hidden):
    assert cases.end_fault(cases.make_step(hidden=hidden)) == ""


def test_one_row_is_a_step():
    step = cases.make_step(size=1, spare=0)
    assert (cases.begin_fault(step), cases.end_fault(step)) == ("", "")
