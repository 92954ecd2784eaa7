"""Prompts of the oracle `geo` through the kernels: see prefill.py, which also runs without pytest."""

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


prefill = _load("prefill")


@pytest.mark.parametrize("formats", prefill.ROWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_of_any_length_choose_as_golden_alone_and_packed(dtype, formats):
    lines = prefill.trials("cuda", dtype, formats, prefill.LENGTHS, prefill.CHUNKS)
    assert len(lines) == 2 * len(prefill.CHUNKS)
    assert [line for line in lines if line.startswith("FAULT")] == []
