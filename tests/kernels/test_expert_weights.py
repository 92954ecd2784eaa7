"""Packing four-bit experts: a permutation of bits, refused where a value would change."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.expert_weights import dequantize_experts, nvfp4_from_mxfp4, pack_experts, unpack_experts
from kernels.quant import dequantize_e2m1, ue8m0_to_scale


def _cases():
    name = "moe_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


checkpoint = _cases().checkpoint
SIZES = [(2, 16, 64, 1), (3, 32, 192, 1), (2, 48, 128, 1), (2, 32, 256, 2), (1, 96, 64, 2)]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("experts", "rows", "channels", "parts"), SIZES)
def test_unpacking_gives_back_every_bit(fmt, experts, rows, channels, parts):
    codes, scales, factors = checkpoint(0, experts, rows, channels, fmt, parts=parts)
    packed = pack_experts(codes, scales, factors, format=fmt, parts=parts, name="w")
    assert (packed.experts, packed.rows, packed.channels, packed.parts) == (experts, rows, channels, parts)
    found = unpack_experts(packed)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], scales.view(torch.uint8))
    if factors is not None:
        assert torch.equal(found[2], factors)


@pytest.mark.parametrize("parts", [1, 2])
def test_dequantised_nvfp4_is_code_times_scale_times_factor(parts):
    codes, scales, factors = checkpoint(1, 2, 32, 128, "nvfp4", parts=parts)
    packed = pack_experts(codes, scales, factors, format="nvfp4", parts=parts, name="w")
    wanted = dequantize_e2m1(codes, scales.float(), 16) * factors.repeat_interleave(32 // parts, 1)[..., None]
    assert torch.equal(dequantize_experts(packed), wanted)


def test_dequantised_mxfp4_is_code_times_scale():
    codes, scales, _ = checkpoint(1, 2, 32, 128, "mxfp4", parts=2)
    packed = pack_experts(codes, scales, None, format="mxfp4", parts=2, name="w")
    assert torch.equal(dequantize_experts(packed), dequantize_e2m1(codes, ue8m0_to_scale(scales), 32))


@pytest.mark.parametrize("parts", [1, 2])
def test_mxfp4_becomes_nvfp4_without_loss_up_to_a_span_of_17(parts):
    codes, scales, _ = checkpoint(2, 2, 32, 128, "mxfp4", parts=parts)
    scales[0, 0, 0], scales[0, 1, 1], scales[0, 31, 0] = 125, 125 - 17, 125
    scales[1, 3] = 3  # zeros, far below
    codes[1, 3] = 0x80
    fine, factors = nvfp4_from_mxfp4(codes, scales, parts=parts, name="w")
    packed = pack_experts(codes, fine, factors, format="nvfp4", parts=parts, name="w")
    assert torch.equal(dequantize_experts(packed), dequantize_e2m1(codes, ue8m0_to_scale(scales), 32))


def test_mxfp4_that_nvfp4_can_not_hold_is_refused_by_name():
    codes, scales, _ = checkpoint(2, 2, 16, 64, "mxfp4", parts=1)
    scales.fill_(120)
    scales[1, 5, 1], codes[1, 5] = 102, 0x11
    with pytest.raises(ValueError, match=r"layers\.3\.w2: expert 1 has mxfp4 scales 18 powers of two apart"):
        nvfp4_from_mxfp4(codes, scales, parts=1, name="layers.3.w2")


def _mxfp4(change):
    codes, scales, _ = checkpoint(3, 2, 32, 64, "mxfp4", parts=2)
    scales.fill_(120)
    codes.fill_(0x21)
    change(codes, scales)
    return pack_experts(codes, scales, None, format="mxfp4", parts=2, name="layers.3.w13")


def test_mxfp4_that_f16_can_not_hold_is_refused_by_name():
    def change(codes, scales):
        scales[1, 20, 0] = 120 - 24

    with pytest.raises(ValueError, match=r"layers\.3\.w13: expert 1 has mxfp4 scales from 2\^-31 to 2\^-7"):
        _mxfp4(change)


def test_the_two_parts_of_a_matrix_may_lie_far_apart():
    _mxfp4(lambda codes, scales: scales[:, :16].fill_(40))


def test_zeros_do_not_count_for_the_span():
    def change(codes, scales):
        scales[1, 20, 0], codes[1, 20, :16] = 3, 0x80

    _mxfp4(change)


def test_a_nan_scale_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layers\.3\.w13: a ue8m0 scale is NaN"):
        _mxfp4(lambda codes, scales: scales[0, 0, 0].fill_(255))
    codes, scales, factors = checkpoint(3, 2, 32, 64, "nvfp4", parts=2)
    scales.view(torch.uint8)[1, 2, 3] = 0xFF
    with pytest.raises(ValueError, match="w13: an e4m3 scale is NaN"):
        pack_experts(codes, scales, factors, format="nvfp4", parts=2, name="w13")


def test_a_factor_that_is_no_number_is_refused_by_name():
    codes, scales, factors = checkpoint(3, 2, 32, 64, "nvfp4", parts=2)
    factors[1, 1] = float("inf")
    with pytest.raises(ValueError, match=r"w13: a factor \(weight_scale_2\) is not finite"):
        pack_experts(codes, scales, factors, format="nvfp4", parts=2, name="w13")


@pytest.mark.parametrize(("rows", "channels", "said"), [(24, 64, "24 rows of 64"), (32, 96, "32 rows of 96")])
def test_sizes_that_tiles_do_not_divide_are_refused(rows, channels, said):
    codes, scales, factors = checkpoint(3, 2, rows, channels, "nvfp4", parts=1)
    with pytest.raises(ValueError, match=said):
        pack_experts(codes, scales, factors, format="nvfp4", parts=1, name="w")


def test_missing_or_needless_factors_are_refused():
    codes, scales, factors = checkpoint(3, 2, 32, 64, "nvfp4", parts=2)
    with pytest.raises(ValueError, match=r"factors None of nvfp4: wanted \(2, 2\)"):
        pack_experts(codes, scales, None, format="nvfp4", parts=2, name="w")
    with pytest.raises(ValueError, match="mxfp4 has no factor"):
        pack_experts(codes, torch.full((2, 32, 2), 120, dtype=torch.uint8), factors, format="mxfp4", parts=2, name="w")


@pytest.mark.parametrize(
    ("codes", "scales", "fmt"),
    [
        (torch.int16, torch.uint8, "nvfp4"),
        (torch.uint8, torch.float32, "nvfp4"),
        (torch.uint8, torch.float8_e8m0fnu, "nvfp4"),
        (torch.uint8, torch.float8_e4m3fn, "mxfp4"),
    ],
)
def test_bits_of_another_type_are_refused(codes, scales, fmt):
    stored, bits, factors = checkpoint(3, 2, 32, 64, fmt, parts=2)
    bits = bits.view(torch.uint8).float() if scales == torch.float32 else bits.view(scales)
    with pytest.raises(ValueError, match=rf"w13: codes {codes}, scales {scales} of {fmt}: wanted uint8 or int8"):
        pack_experts(stored.to(codes), bits, factors, format=fmt, parts=2, name="w13")


def test_a_factor_that_the_kernels_can_not_lift_is_refused_by_name():
    codes, scales, factors = checkpoint(3, 2, 32, 64, "nvfp4", parts=2)
    factors[1, 0] = 2.0**120
    pack_experts(codes, scales, factors, format="nvfp4", parts=2, name="w13")
    factors[1, 1] = 2.0**121
    with pytest.raises(ValueError, match=r"w13: a factor \(weight_scale_2\) is 2\.65846e\+36; .* up to 2\^120"):
        pack_experts(codes, scales, factors, format="nvfp4", parts=2, name="w13")


def test_zeros_under_scales_that_no_factor_can_be_are_refused_with_those_scales():
    codes, scales = torch.zeros(1, 16, 32, dtype=torch.uint8), torch.zeros(1, 16, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"w2 has mxfp4 scales from 2\^-127 to 2\^-127; .* above 2\^-127"):
        pack_experts(codes, scales, None, format="mxfp4", parts=1, name="w2")
