"""Steps of the oracle `geo` through the decode kernels, as on a GPU: the whole model and its shortest prompt; layers of
experts in both formats."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

import engine.model.attention as attention
import kernels.gemm_decode as gemm_decode
import kernels.hyper_connection_decode as hyper_connection_decode
import kernels.indexer_decode as indexer_decode
import kernels.moe_decode as moe_decode
from kernels.tiles import Tile

TESTS = Path(__file__).parent.parent


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


geo, geo_experts = _load("gpu_geo", TESTS / "gpu/geo.py"), _load("gpu_geo_experts", TESTS / "gpu/geo_experts.py")
moe_cases = _load("moe_cases", TESTS / "kernels/moe_cases.py")
gemm_cases = _load("gemm_cases", TESTS / "kernels/gemm_cases.py")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """A program costs tens of milliseconds here, or hundreds; one takes all rows of an expert, 1,024 of a linear layer,
    or two spans of the streams, whose kernels run a few times in steps of one token. Other cuts: interpreted_moe.py,
    interpreted_gemm.py, interpreted_hyper_connection.py."""
    linear = gemm_cases.few_tile(ks=16, rs=8, r=8)
    monkeypatch.setattr(gemm_decode, "table_tile", lambda arch, tokens, **_: linear)
    tile = moe_cases.make_tile(r=4, rs=4, s=4)
    monkeypatch.setattr(moe_decode, "tile_for", lambda op, arch, *, tokens: tile)
    monkeypatch.setattr(indexer_decode, "sm_count", lambda _: 1)
    spreads = itertools.count()
    monkeypatch.setattr(hyper_connection_decode, "uses_triton", lambda x: x.shape[0] == 1 and next(spreads) < 4)
    monkeypatch.setattr(hyper_connection_decode, "tile_for", lambda op, arch, **_: Tile({"W": 1, "L": 2}, 1))


# How many of the prompt's nine tokens run in one step, of which the experts alone take kernels: the interpreter takes a
# second for each token. The others follow in steps of two and of one, or of one.
@pytest.mark.parametrize("chunk", [8, pytest.param(6, marks=pytest.mark.long)])
def test_steps_of_few_tokens_choose_as_golden(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(attention, "KERNEL_TOKENS", 2)
    checkpoint = geo.write_checkpoint(tmp_path / "geo")
    step, *others = geo.run(checkpoint, device="cpu", dtype="float32", index="fp4", lengths=(9,), steps=1, chunk=chunk)
    assert (others, step.fault) == ([], "")
    # More than nothing, so the kernels did run. At position 7 two experts of layer 1 score alike but for 0.002, and
    # their rounding of the queries chooses the other one: 0.14 from there on.
    assert step.reference > 0


@pytest.mark.parametrize(("formats", "layer", "tokens"), [("mxfp4", 0, 1), ("nvfp4", 2, 2)])
def test_expert_layers_stay_close_to_float_experts(tmp_path, formats, layer, tokens):
    layers = geo_experts.Layers(tmp_path, formats, device="cpu", dtype="float32")
    assert layers.fault(layer, tokens) == ""
