"""Block quantisation: exact scales, edges of the formats, and never a NaN from finite input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.quant import (
    dequantize_block_fp8,
    dequantize_e2m1,
    dequantize_e4m3,
    hadamard,
    quantize_e2m1,
    quantize_e4m3,
    scale_to_ue8m0,
    ue8m0_to_scale,
)

FORMATS = {
    "e4m3": (quantize_e4m3, dequantize_e4m3, 448.0, 64),
    "e2m1": (quantize_e2m1, dequantize_e2m1, 6.0, 32),
}
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(x, fmt, group=None):
    quantise, dequantise, _, default = FORMATS[fmt]
    codes, scale = quantise(x, group or default)
    return dequantise(codes, scale, group or default), codes, scale


@pytest.mark.parametrize("fmt", FORMATS)
@given(values=st.lists(finite, min_size=64, max_size=64))
def test_finite_input_gives_finite_output_and_no_nan_bytes(fmt, values):
    x = torch.tensor([values])
    back, codes, scale = round_trip(x, fmt)
    assert bool(back.isfinite().all())
    assert 255 not in scale_to_ue8m0(scale).tolist()[0]
    if fmt == "e4m3":
        assert not set(codes.view(torch.uint8).flatten().tolist()) & {0x7F, 0xFF}


@pytest.mark.parametrize("fmt", FORMATS)
@given(exponent=st.integers(-100, 100), mantissa=st.sampled_from([1.0, 1 + 2**-23, 1.5, 2 - 2**-23]))
def test_scale_is_the_least_power_of_two_that_holds_the_maximum(fmt, exponent, mantissa):
    _, _, top, group = FORMATS[fmt]
    floor = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126}[fmt]
    amax = torch.tensor(mantissa * top * 2.0**exponent, dtype=torch.float32)
    x = torch.zeros(1, group)
    x[0, 3] = -amax
    _, _, scale = round_trip(x, fmt)
    wanted = max(float(amax), floor) / top
    assert math.frexp(float(scale))[0] == 0.5
    assert float(scale) / 2 < wanted * (1 + 1e-6)
    assert float(scale) >= wanted * (1 - 1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_block_becomes_zero_codes_and_zero_values(fmt, normal):
    group = FORMATS[fmt][3]
    x = torch.cat([torch.zeros(2, group), normal(2, group)], 1)
    back, codes, scale = round_trip(x, fmt)
    assert bool((back[:, :group] == 0).all())
    assert bool((codes[:, : group // (2 if fmt == "e2m1" else 1)].view(torch.uint8) == 0).all())
    assert bool((scale > 0).all())
    assert bool((back[:, group:] != 0).any())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-4, 448.0, 449.0, 1.5e38])
def test_extreme_values_keep_their_size(fmt, value):
    x = torch.full((1, 64), value)
    back, _, _ = round_trip(x, fmt)
    if fmt == "e4m3" and value < 1e-9:
        assert bool((back == 0).all()), "far below the floor of the scale"
    elif value == 1e-45:
        assert bool((back == 0).all())
    else:
        # e2m1 has gaps of a third between 4 and 6, so a value may move by a sixth of the larger.
        assert torch.allclose(back, x, rtol={"e4m3": 2**-4, "e2m1": 0.21}[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_at_the_top_of_float32_saturate_instead_of_overflowing(fmt):
    back, _, _ = round_trip(torch.full((1, 64), torch.finfo(torch.float32).max), fmt)
    assert torch.equal(back, torch.full((1, 64), 2.0**127))


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_huge_value_does_not_spoil_other_groups(fmt, normal):
    group = FORMATS[fmt][3]
    x = normal(1, 2 * group)
    quiet, _, _ = round_trip(x, fmt)
    x[0, group + 1] = 3e38
    loud, _, _ = round_trip(x, fmt)
    assert torch.equal(loud[:, :group], quiet[:, :group])
    assert bool(loud.isfinite().all())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_stay_in_their_group_and_are_not_hidden(fmt, bad, normal):
    group = FORMATS[fmt][3]
    x = normal(1, 3 * group)
    x[0, group + 5] = bad
    quantise, dequantise, _, _ = FORMATS[fmt]
    codes, scale = quantise(x, group)
    back = dequantise(codes, ue8m0_to_scale(scale_to_ue8m0(scale)), group)
    assert bool(back[:, :group].isfinite().all())
    assert bool(back[:, 2 * group :].isfinite().all())
    assert bool(back[:, group : 2 * group].isnan().all())


def test_e2m1_rounds_to_nearest_with_ties_to_the_even_code():
    magnitudes = [0.0, 0.24, 0.25, 0.26, 0.5, 0.75, 1.0, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 6.0]
    wanted = [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    x = torch.tensor([magnitudes + [-m for m in magnitudes] + [6.0] * 4])
    back, _, scale = round_trip(x, "e2m1")
    assert float(scale) == 1.0
    assert back[0].tolist() == wanted + [-w for w in wanted] + [6.0] * 4


def test_e2m1_packs_the_even_channel_into_the_low_nibble():
    x = torch.tensor([[0.5, -6.0] + [0.0] * 30])
    _, codes, _ = round_trip(x, "e2m1")
    assert codes[0, 0].item() == 0x1 | 0xF << 4


def test_every_e2m1_and_ue8m0_code_reads_as_documented():
    codes = torch.tensor([[i | (i << 4) for i in range(16)]], dtype=torch.uint8)
    values = dequantize_e2m1(codes, torch.ones(1, 1), 32)[0, ::2].tolist()
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values == half + [-v for v in half]
    scales = ue8m0_to_scale(torch.arange(256, dtype=torch.uint8))
    assert scales[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert bool(scales[255].isnan())


@given(byte=st.integers(1, 254))
def test_ue8m0_bytes_survive_the_way_there_and_back(byte):
    assert scale_to_ue8m0(ue8m0_to_scale(torch.tensor([byte], dtype=torch.uint8))).item() == byte


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_a_rounded_row_changes_nothing(fmt, normal):
    once, _, _ = round_trip(normal(40, 256), fmt)
    twice, _, _ = round_trip(once, fmt)
    assert torch.equal(once, twice)


def test_block_fp8_weight_uses_the_scale_of_its_tile_also_at_the_ragged_edge():
    weight = torch.ones(130, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    full = dequantize_block_fp8(weight, scale)
    assert [float(full[i, j]) for i, j in ((127, 127), (127, 128), (128, 0), (129, 199))] == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match=r"wanted \(2, 2\)"):
        dequantize_block_fp8(weight, scale[:1])


def test_hadamard_is_orthogonal_symmetric_and_in_sylvester_order(normal):
    x = normal(3, 128)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)
    first = hadamard(torch.eye(4))
    assert torch.equal(first * 2, torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]))
    with pytest.raises(ValueError, match="power of two"):
        hadamard(normal(1, 96))


def test_groups_that_do_not_divide_the_row_are_refused(normal):
    with pytest.raises(ValueError, match="100 channels"):
        quantize_e4m3(normal(1, 100), 64)
