"""The indexer of chunks compiled, at the model's sizes: see indexer_chunk.py, which also runs without pytest."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def _load():
    name = "gpu_indexer_chunk"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("indexer_chunk.py"))
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _load()


@pytest.mark.parametrize(("name", "job"), cases.jobs_of("cuda", small=False))
def test_compiled_indexer_of_chunks(name, job):
    assert job() == "", name
