"""What a decode step's layers launch is kernels' own: no operation of torch between them. Seen on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine.model.model as model

# Modules whose operations are kernels where there is a GPU; what their references do here is not looked at.
KERNELS = ("_decode.py", "moe_gate.py", "gemm_pair.py")


class Launches(TorchDispatchMode):
    """Notes every operation, while it is on, that would launch: one that gives memory which it was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" not in str(func) and not any(name.endswith(KERNELS) for name in _files()):
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
            made = [x for x in tree_leaves(out) if torch.is_tensor(x)]
            if func._schema.is_mutable or any(x.untyped_storage().data_ptr() not in given for x in made):
                self.seen.append(str(func))
        return out


def _files():
    frame = sys._getframe()
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def _geo():
    name = "gpu_geo"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "gpu/geo.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Return what the layers of a step of geo launch beside kernels, by ratio."""
    found, plain, geo = {}, model.Layer.__call__, _geo()
    with pytest.MonkeyPatch.context() as patch:

        def call(layer, *args):
            if args[3] is None:  # no decode step
                return plain(layer, *args)
            with Launches() as mode:
                out = plain(layer, *args)
            found.setdefault(layer.attention.ratio, []).extend(mode.seen)
            return out

        patch.setattr(model.Layer, "__call__", call)
        checkpoint = geo.write_checkpoint(tmp_path_factory.mktemp("geo"))
        geo.logits_of(
            checkpoint, kernels=True, device="cpu", dtype="bfloat16", index="fp8", lengths=(9,), steps=1, chunk=512
        )  # fmt: skip
    return found


@pytest.mark.parametrize("ratio", [0, 4, 128], ids=["window", "csa", "hca"])
def test_a_layer_of_a_decode_step_launches_nothing_but_kernels(launches, ratio):
    assert launches[ratio] == []
