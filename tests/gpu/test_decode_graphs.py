"""Captured decode steps on the oracle `geo`: see decode_graphs.py, which also runs without pytest."""

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


decode_graphs = _load("decode_graphs")


@pytest.mark.parametrize("size", decode_graphs.SIZES)
def test_every_size_of_graph_chooses_as_golden(size):
    assert [line for line in decode_graphs.trials((size,), "cuda") if line.startswith("FAULT")] == []
