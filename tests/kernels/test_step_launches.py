"""All that a decode step launches, as a GPU rank runs it, is compiled by every run of the gate: by the model itself.

A few layers of DeepSeek-V4-Flash, of each kind, one of four ranks' shapes, memory that nobody writes, and the kernels'
entry replaced as in test_dispatch.py.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.cache import KVCache
from engine.model.layers import Rotations
from engine.model.layout import build_layout
from engine.model.model import DeepSeekV4
from engine.model.published import published_config
from engine.model.shard import Shard
from engine.model.synthetic import synthetic_weights
from kernels.check import shipped
from kernels.step import begin_step, end_step


def _dispatch():
    name = "kernels_test_dispatch"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_dispatch.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


dispatch = _dispatch()
launches = dispatch.launches
SIZES = (1, 8, 16, 32, 64)  # cuts change behind them
MODEL, SHARD = "DeepSeek-V4-Flash-NVFP4", Shard(0, 4)
LAYERS = 4  # windows alone, and both compressions; experts by table, and by score


@functools.cache
def weights():
    """Return a rank's tensors: zeros, but for the largest, whose pages are never touched."""
    whole = published_config(MODEL).first_layers(LAYERS)
    with FakeTensorMode():
        drawn = synthetic_weights(whole, SHARD, dtype=torch.bfloat16, device=torch.device("cpu"), keeps_packed=True)
    return {
        name: (torch.empty if x.numel() >> 26 else torch.zeros)(x.shape, dtype=x.dtype) for name, x in drawn.items()
    }


@functools.cache
def made(index):
    """Return a model and its cache."""
    config = SHARD.of(published_config(MODEL).first_layers(LAYERS))
    layout = build_layout(config, block_tokens=256, kv_cache_dtype="packed", index_cache_dtype=index)
    return DeepSeekV4(config, dict(weights()), index_hadamard=index == "fp4"), KVCache(layout, 2, 1)


@pytest.mark.parametrize("index", ["fp8", "fp4"])
def test_every_launch_of_the_model_in_a_decode_step_is_compiled_by_the_gate(index, launches, monkeypatch):
    arch, seen = launches
    model, cache = made(index)
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: plain(*args, **kwargs).zero_())  # kernels write nothing
    seen.clear()
    for size in SIZES:
        rows, last_token = torch.zeros(size, 4, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)
        rotary = model.rotary
        step = begin_step(rows, last_token, size=size, window=rotary.window, compressed=rotary.compressed)
        batch = step.batch(torch.full((size, 512), -1, dtype=torch.int32))
        rotations = Rotations(window=step.window, compressed=step.compressed, csa=step.csa, hca=step.hca)
        x = model.decode(step.token_ids, batch, rotations, cache)
        model.head_logits(x)
        end_step(rows, last_token, torch.zeros(size, dtype=torch.int64), x)
    assert len(seen) > len(SIZES) * LAYERS * 12
    compiled = shipped(arch)
    for one in seen:
        close = [dispatch.mismatch(v, one) for v in compiled if v.kernel is one["kernel"]]
        assert [] in close, f"{one['kernel'].fn.__name__} on {arch}: {min(close, key=len, default='no variant')}"
