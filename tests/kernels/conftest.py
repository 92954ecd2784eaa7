"""Fixtures of the kernels' tests."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from kernels.rows import Rows
from kernels.triton_env import INTERPRETED
from kv_transfer.layout import row_bytes

# Machines under load must not fail a test for its time, nor luck for its examples.
settings.register_profile("kernels", deadline=None, derandomize=True)
settings.load_profile("kernels")

if INTERPRETED:
    spec = importlib.util.spec_from_file_location("kernel_interp", Path(__file__).with_name("interp.py"))
    assert spec is not None and spec.loader is not None
    interp = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interp)
    interp.repair()


def pytest_collection_modifyitems(items):
    if not INTERPRETED and any(item.path.name.startswith("interpreted_") for item in items):
        raise pytest.UsageError("interpreted_*.py need TRITON_INTERPRET=1 in the environment (tests/kernels/interp.py)")


@pytest.fixture
def make_rows():
    """Return a function (format, width, units, rows) -> Rows over a pool of its own, full of NaN bytes."""

    def make(fmt, width, *, units, rows):
        values, scales = row_bytes(fmt, width)
        pool = torch.full((units, -(-rows * (values + scales) // 16) * 16), 0xFF, dtype=torch.uint8)
        return Rows.view(pool, fmt, width=width, rows=rows, offset=0, value_bytes=values, scale_bytes=scales)

    return make


@pytest.fixture
def normal():
    """Return a function (*shape, seed) -> standard normal float32."""

    def draw(*shape, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return draw
