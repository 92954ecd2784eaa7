"""The indexer compiled, at the model's sizes: see indexer.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_indexer"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("indexer.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize("case", cases.cases_of(), ids=str)
def test_compiled_indexer_selects_the_right_entries(case):
    assert cases.fault_of(case, "cuda") == ""


def test_rows_that_selections_have_got_wrong():
    assert cases.rows_fault("cuda") == ""


@pytest.mark.parametrize(("length", "k", "count"), [(262144, 512, 64), (1048576, 2048, 64)])
def test_very_long_rows(length, k, count):
    assert cases.long_rows_fault("cuda", length, k, count) == ""


def test_twenty_calls_select_the_same():
    assert cases.repeat_fault("cuda") == ""


def test_a_token_has_the_same_bits_in_every_batch():
    assert cases.batch_fault("cuda") == ""


def test_a_replayed_graph_follows_lengths_and_blocks():
    assert cases.replay_fault("cuda") == ""
