"""Fixtures of the engine's tests: the oracle's checkpoints and golden files, and the prefill-decode harness."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
ORACLE = HERE.parent / "oracle"


def _module(name, path):
    """Import a file under a name of its own: tests are no package, and pytest runs in importlib mode."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


class Oracle:
    """Checkpoints and what they must give. `tiny` is stored whole; the weights of `mx` and `geo` are made here."""

    def __init__(self, cache):
        self._cache = cache
        self._float = {}
        # ref_v4 imports its neighbour by this name.
        self.make_golden = _module("make_golden", ORACLE / "make_golden.py")
        self.reference = _module("ref_v4", ORACLE / "ref_v4.py")

    def config(self, name):
        return json.loads((self.folder(name) / "config.json").read_text())

    def folder(self, name):
        if name == "tiny":
            return ORACLE / "tiny"
        folder = self._cache / name
        if not folder.exists():
            self.write(name, json.loads((ORACLE / name / "config.json").read_text()))
        return folder

    def write(self, name, config):
        """Write a checkpoint with this config, weights by tensor name, and return its folder."""
        folder = self._cache / name
        if not folder.exists():
            stored, self._float[name] = self.make_golden.build_weights(config)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
        return folder

    def weights(self, name):
        """Return the dequantised float32 weights by official name."""
        if name not in self._float:
            self._float[name] = self.make_golden.build_weights(self.config(name))[1]
        return self._float[name]

    def golden(self, name):
        return load_file(ORACLE / name / "golden.safetensors")

    def golden_sim(self, name):
        return load_file(ORACLE / name / "golden_sim.safetensors")


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    return Oracle(tmp_path_factory.mktemp("oracle"))


@pytest.fixture
def edit(oracle, tmp_path):
    """Return a function (checkpoint, change) -> folder of a copy whose tensors `change` has edited in place."""

    def make(name, change):
        tensors = load_file(oracle.folder(name) / "model.safetensors")
        change(tensors)
        (tmp_path / "config.json").write_text(json.dumps(oracle.config(name)))
        save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.fixture(scope="session")
def harness():
    return _module("engine_harness", HERE / "harness.py")


@pytest.fixture(scope="session")
def flash():
    """DeepSeek-V4-Flash's config."""
    return _module("engine_test_layout", HERE / "test_layout.py").FLASH


@pytest.fixture(scope="session")
def rounded_reference(oracle):
    return _module("engine_rounded_reference", HERE / "rounded_reference.py")


@pytest.fixture(scope="session")
def make_pair(oracle, harness):
    """Return a function (checkpoint name, **options) -> Pair; pairs are kept for the session."""
    pairs = {}

    def make(name, **options):
        key = (name, *sorted(options.items()))
        if key not in pairs:
            runners = [harness.make_runner(oracle.folder(name), role=role, **options) for role in ("prefill", "decode")]
            pairs[key] = harness.Pair(*runners)
        return pairs[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small matrices run faster on one thread, and other tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
