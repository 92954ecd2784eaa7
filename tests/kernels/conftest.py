"""Fixtures of the kernels' tests."""

import importlib.util
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from kernels.rows import Rows
from kernels.triton_env import INTERPRETED
from kv_transfer.layout import row_bytes

# Machines under load must not fail a test for its time, nor luck for its examples.
settings.register_profile("kernels", deadline=None, derandomize=True)
settings.load_profile("kernels")

HERE = Path(__file__).parent
RUNS = pytest.StashKey[dict[tuple[str, str], Future]]()
POOL = pytest.StashKey[ThreadPoolExecutor]()


def _load_interp() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_interp", HERE / "interp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if INTERPRETED:
    _load_interp().repair()


def pytest_collection_modifyitems(items):
    if not INTERPRETED and any(item.path.name.startswith("interpreted_") for item in items):
        raise pytest.UsageError("interpreted_*.py need TRITON_INTERPRET=1 in the environment (tests/kernels/interp.py)")


def pytest_collection_finish(session):
    """Begin what test_interpreted.py waits for: minutes of processor time, while most tests before it wait for others.

    At the lowest priority, and one run at a time beside tests that play with time; two where there are none.
    """
    items = [item for item in session.items if "runs" in getattr(item, "fixturenames", ())]
    if not items or session.config.option.collectonly:
        return
    interp, alone = _load_interp(), all(item.path.is_relative_to(HERE) for item in session.items)
    pool = session.config.stash[POOL] = ThreadPoolExecutor(2 if alone else 1)
    wanted = [(item.callspec.params["module"], item.callspec.params["which"]) for item in items]
    session.config.stash[RUNS] = {
        (name, which): pool.submit(interp.run, HERE / f"{name}.py", "-m", which, niceness=19) for name, which in wanted
    }


def pytest_sessionfinish(session):
    if POOL in session.config.stash:
        session.config.stash[POOL].shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def interp() -> ModuleType:
    """interp.py, which is no module of a package."""
    return _load_interp()


@pytest.fixture(scope="session")
def runs(request) -> dict[tuple[str, str], Future]:
    """The runs of interpreted_*.py that were begun: by file and marker expression, as futures."""
    return request.config.stash[RUNS]


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
