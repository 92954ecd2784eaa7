"""Linear layers of many tokens, for which weights are widened once; what is allocated is NaN to begin with."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.gemm_decode as decode
import kernels.gemm_large as large
from kernels.gemm import dequantize_slice
from kernels.launch_order import ASIDE, CHAIN, Pair
from kernels.moe import gated

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
MANY = 9  # tokens


def _cases():
    name = "gemm_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


make_case = _cases().make_case


@pytest.fixture(autouse=True)
def widened(monkeypatch):
    """Let few tokens be many, poison what is allocated, and return the weights that were multiplied."""
    seen, plain, empty = [], large._multiply, torch.empty
    monkeypatch.setattr(large, "LARGE", MANY - 1)
    monkeypatch.setattr(large, "_multiply", lambda out, x, weight: seen.append(weight) or plain(out, x, weight))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    return seen


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((MANY, 140, 640), {}),
        ((MANY, 140, 640), {"powers": False}),
        ((MANY, 7, 33), {}),
        ((MANY, 140, 144), {"offset": (17, 112), "powers": False}),
        ((MANY, 140, 144), {"offset": (127, 5)}),
        ((MANY, 80, 256), {"groups": 3}),
        ((MANY, 20, 320), {"gap": 8}),
        ((MANY, 20, 320), {"dtype": BF16}),
        ((MANY, 20, 128), {"dtype": BF16, "groups": 2}),
        ((MANY, 160, 128), {"limit": 10.0}),
        ((MANY, 32, 128), {"limit": 10.0, "dtype": BF16}),
        ((MANY, 20, 320), {"normed": True, "gap": 8}),
    ],
    ids=str,
)
def test_a_layer_of_many_tokens_equals_its_sums_in_float64(shape, options, widened):
    case = make_case(*shape, **{"powers": True, **options})
    assert case.fault() == ""
    assert case.fault(out_dtype=BF16) == ""
    assert len(widened) == 2


def test_weights_are_exact_where_scales_are_powers_of_two():
    codes = torch.arange(256).to(torch.uint8)[:, None] + torch.arange(200).to(torch.uint8)[None, :]
    scale = torch.tensor([[2.0**-20, 1.0], [2.0**100, 2.0**-110]])
    found, wanted = large.dequantize(codes.view(FP8), scale), dequantize_slice(codes.view(FP8), scale, (0, 0))
    assert found.dtype == BF16
    assert torch.equal(found.float().nan_to_num(nan=1e38), wanted.nan_to_num(nan=1e38))


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(MANY - 1, {}), (MANY, {"x_dtype": FP32}), (MANY, {"dtype": FP32}), (MANY, {"quantize": True})],
    ids=str,
)
def test_what_bf16_products_do_not_take_has_its_own_kernels(tokens, options, widened):
    assert make_case(tokens, 20, 128, **options).fault() == ""
    assert not widened


def test_a_tile_that_is_given_is_taken(widened):
    make_case(MANY, 20, 128).run(tile=_cases().many_tile())
    assert not widened


def test_a_token_does_not_depend_on_the_others():
    case = make_case(MANY, 32, 256, normed=True, limit=10.0)
    before = case.run()
    case.x[[0, *range(2, MANY)]] = math.nan
    after = case.run()
    assert torch.equal(after[1], before[1])
    assert bool(after[[0, *range(2, MANY)]].isnan().all())


def test_a_gate_or_a_value_that_is_no_number_spoils_its_channel_and_no_other():
    case = make_case(MANY, 32, 128, dtype=BF16, limit=10.0)
    case.weight[5], case.weight[16 + 7] = math.nan, math.nan
    assert case.run().isnan().any(0).nonzero().flatten().tolist() == [5, 7]


def test_gates_act_on_sums_in_float32():
    case = make_case(MANY, 32, 128, limit=1.0, powers=True)
    case.x *= 8
    sums = decode.linear_decode(case.x, case.weight, case.scale, out_dtype=FP32)
    assert 0.2 < float((sums.abs() > 1.0).float().mean()) < 0.8
    torch.testing.assert_close(case.run(), gated(*sums.chunk(2, 1), limit=1.0).to(BF16), rtol=2**-8, atol=0.0)


def test_nothing_is_launched_aside_of_many_tokens():
    pair, case, few = Pair(), make_case(MANY, 32, 128), make_case(2, 32, 128, seed=1)
    decode.linear_decode(case.x, case.weight, case.scale, order=pair.lead)
    assert pair.aside.take(reads=(few.x,), writes=()) == CHAIN != ASIDE
