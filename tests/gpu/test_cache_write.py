"""cache_write compiled, at the model's sizes: see cache_write.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    spec = importlib.util.spec_from_file_location("gpu_cache_write", Path(__file__).with_name("cache_write.py"))
    module = sys.modules.setdefault("gpu_cache_write", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_compiled_writes_equal_the_reference(case):
    assert cases.fault_of(case, "cuda") == ""


@pytest.mark.parametrize(("fmt", "width"), cases.STORED)
def test_stored_bytes_are_those_of_the_reference(fmt, width):
    assert cases.stored_bytes_fault(fmt, width, "cuda") == ""


@pytest.mark.parametrize(("ratio", "index"), [(r, i) for r, i, turned in cases.KINDS if not turned])
def test_a_captured_launch_follows_its_tensors(ratio, index):
    assert cases.replay_fault(ratio, index, "cuda") == ""


@pytest.mark.parametrize(("index", "hadamard"), cases.READY)
def test_the_indexers_queries_are_those_of_a_launch_of_their_own(index, hadamard):
    module = cases._module("cache_write_cases", cases.TESTS / "kernels/cache_write_cases.py")
    assert module.queries_fault(index, hadamard, device="cuda") == ""


@pytest.mark.parametrize(("ratio", "index"), [(r, i) for r, i, turned in cases.KINDS if not turned])
def test_a_sequence_writes_the_same_bytes_alone(ratio, index):
    module = cases._module("cache_write_cases", cases.TESTS / "kernels/cache_write_cases.py")
    size = {"dim": 512, "heads": 16, "block_tokens": cases.BLOCK_TOKENS}
    assert module.alone_fault(list(cases.ALONE), ratio=ratio, index=index, device="cuda", **size) == ""


@pytest.mark.parametrize(("start", "length"), cases.LONG)
@pytest.mark.parametrize(("ratio", "index"), [(r, i) for r, i, turned in cases.KINDS if not turned])
def test_a_long_chunk_equals_the_reference(ratio, index, start, length):
    assert cases.long_fault(ratio, index, "cuda", start=start, length=length) == ""


def test_what_has_no_place_makes_its_row_nan_and_touches_nothing_else():
    faults = cases.lost_faults("cuda")
    assert {name: fault for name, fault in faults.items() if fault} == {}
