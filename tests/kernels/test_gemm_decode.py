"""Linear layers on the CPU: what the wrappers compute there, and what they refuse."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.gemm import linear
from kernels.gemm_cut import Matrix, fit, table_tile
from kernels.gemm_decode import grouped_linear_decode, join_weights, linear_decode, quantize_rows
from kernels.gemm_pair import linear_pair_decode
from kernels.norm_rope import rms_norm


def _cases():
    name = "gemm_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case = cases.make_case
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("offset", [(0, 0), (64, 100)], ids=str)
@pytest.mark.parametrize("options", [{}, {"normed": True}, {"x_dtype": torch.float32}], ids=str)
def test_a_layer_equals_its_sums_in_float64(offset, options):
    assert make_case(3, 200, 300, offset=offset, **options).fault() == ""


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16], ids=str)
def test_groups_have_a_matrix_each(dtype):
    assert make_case(3, 40, 130, dtype=dtype, groups=3).fault() == ""


def test_a_layer_equals_that_of_a_prefill():
    case = make_case(3, 200, 300, x_dtype=torch.float32)
    assert torch.equal(case.run(out_dtype=torch.float32), linear(case.x, case.weight, case.scale))


@pytest.mark.parametrize(("groups", "channels"), [(0, 200), (2, 128)])
def test_quantised_activations_lose_what_their_grid_has_not(groups, channels):
    case = make_case(3, 20, channels, groups=groups, quantize=True)
    exact = make_case(3, 20, channels, groups=groups)
    assert case.fault() == ""
    apart = (case.run() - exact.run()).float().norm() / exact.run().float().norm()
    assert 0.01 < apart < 0.06


def test_a_norm_is_rounded_to_the_dtype_of_x_before_it_is_quantised():
    case = make_case(3, 20, 256, normed=True, quantize=True)
    assert case.fault() == ""
    normed = rms_norm(case.x, case.norm, eps=1e-6)
    plain = linear_decode(normed.to(case.x.dtype), case.weight, case.scale, quantize=True)
    assert torch.equal(case.run(), plain)
    assert not torch.equal(plain, linear_decode(normed, case.weight, case.scale, quantize=True))


def test_gates_and_values_are_halves_of_the_rows():
    case = make_case(3, 288, 300, limit=5.0)
    assert case.fault() == ""


def test_two_matrices_of_one_input_give_what_each_gives():
    a, b = make_case(3, 40, 256, dtype=torch.bfloat16), make_case(3, 24, 256, seed=1)
    outs = linear_pair_decode(a.x, (a.weight, None), (b.weight, b.scale), out_dtypes=(torch.float32, torch.bfloat16))
    assert torch.equal(outs[0], linear_decode(a.x, a.weight, out_dtype=torch.float32))
    assert torch.equal(outs[1], linear_decode(a.x, b.weight, b.scale))


def test_two_matrices_of_several_inputs_are_refused():
    a, b = make_case(3, 40, 256, dtype=torch.bfloat16), make_case(3, 24, 128, seed=1)
    with pytest.raises(ValueError, match="x of 256 channels for a weight 24 x 128"):
        linear_pair_decode(a.x, (a.weight, None), (b.weight, b.scale))


def test_joined_weights_give_both_outputs():
    first, last = make_case(3, 256, 300, seed=1), make_case(3, 40, 300, seed=2)
    weight, scale = join_weights((first.weight, last.weight), (first.scale, last.scale))
    parts = linear_decode(first.x, weight, scale).split((256, 40), 1)
    last.x = first.x
    assert torch.equal(parts[0], first.run())
    assert torch.equal(parts[1], last.run())


def test_joined_float_weights_have_no_scale():
    weights = [make_case(1, rows, 64, dtype=torch.bfloat16).weight for rows in (3, 5)]
    joined, scale = join_weights(weights)
    assert joined.shape == (8, 64)
    assert scale is None


@pytest.mark.parametrize("rows", [(40, 256), (128, 256, 1, 2)], ids=str)
def test_weights_that_cut_a_block_are_not_joined(rows):
    made = [make_case(1, n, 64) for n in rows]
    with pytest.raises(ValueError, match="can't be joined"):
        join_weights([m.weight for m in made], [m.scale for m in made])


def test_weights_of_several_types_are_not_joined():
    with pytest.raises(ValueError, match="can't be joined"):
        join_weights((torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.bfloat16)))


def test_no_tokens_at_all():
    assert make_case(0, 20, 64).run().shape == (0, 20)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(3, 65, dtype=torch.bfloat16)}, "65 channels for a weight 20 x 64"),
        ({"x": torch.zeros(3, 1, 64)}, r"x \(3, 1, 64\)"),
        ({"x": torch.zeros(64, 3).T}, "strides of x"),
        ({"x": torch.zeros(3, 64, dtype=torch.float16)}, "x torch.float16"),
        ({"scale": None}, "without a scale"),
        ({"weight": torch.zeros(20, 64)}, "with a scale"),
        ({"weight": torch.zeros(20, 128).to(FP8)[:, :64]}, r"weight \(128, 1\)"),
        ({"scale": torch.zeros(2, 1)}, r"scale \(2, 1\)"),
        ({"scale": torch.zeros(1, 1, dtype=torch.float64)}, "float64 of a weight"),
        ({"offset": (128, 0)}, r"offset \(128, 0\)"),
        ({"offset": (0, -1)}, r"offset \(0, -1\)"),
        ({"norm": torch.zeros(63)}, r"norm \(63,\)"),
        ({"norm": torch.zeros(63), "quantize": True}, r"norm \(63,\)"),
        ({"norm": torch.zeros(128)[::2]}, r"strides \(2,\)"),
        ({"offset": (0, 64), "quantize": True}, "whole tiles along K"),
        ({"out_dtype": torch.float16}, "out_dtype torch.float16"),
        ({"limit": 1.0}, "limit 1.0 of 20 rows"),
        ({"limit": 0.0, "weight": torch.zeros(32, 64).to(FP8)}, "limit 0.0 of 32 rows"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    case = make_case(3, 20, 64)
    given = {"x": case.x, "weight": case.weight, "scale": case.scale, **change}
    with pytest.raises(ValueError, match=said):
        linear_decode(given.pop("x"), given.pop("weight"), given.pop("scale"), **given)


def test_groups_that_do_not_fit_are_refused():
    case = make_case(3, 20, 64, groups=2)
    with pytest.raises(ValueError, match=r"x \(3, 1, 64\)"):
        grouped_linear_decode(case.x[:, :1], case.weight, case.scale)
    with pytest.raises(ValueError, match="whole tiles along K"):
        grouped_linear_decode(case.x, case.weight, case.scale, quantize=True)


def test_rows_to_quantise_are_packed():
    with pytest.raises(ValueError, match="channels packed"):
        quantize_rows(torch.zeros(64, 3).T)


def test_few_rows_share_their_channels_among_programs_and_many_do_not():
    tile = cases.few_tile(ks=4, depth=2, split=8)
    assert fit(tile, 1, Matrix(256, 4096, 2), sms=132)["SPLIT"] == 8
    assert fit(tile, 1, Matrix(1 << 17, 4096, 2), sms=132)["SPLIT"] == 1


def test_channels_are_not_shared_where_a_program_would_have_too_few():
    tile = cases.many_tile(split=8, least=4)
    assert fit(tile, 64, Matrix(64, 1024, 1), sms=132)["SPLIT"] == 2
    assert fit(tile, 64, Matrix(64, 512, 1), sms=132)["SPLIT"] == 1


def test_programs_that_hold_their_operands_share_channels_for_which_one_has_no_room():
    tile = cases.held_tile(steps=8, split=1)
    cut = fit(tile, 64, Matrix(4096, 2176, 1), sms=132)
    assert (cut["SPLIT"], cut["STEPS"], cut["SHARES"], cut["EVEN"]) == (3, 6, 3, 0)
    assert fit(tile, 64, Matrix(4096, 1024, 1), sms=132)["SPLIT"] == 1


@pytest.mark.parametrize("channels", [640, 1152, 4224])
@pytest.mark.parametrize("split", [2, 3, 4, 5, 8])
def test_no_program_is_left_without_channels(channels, split):
    cut = fit(cases.many_tile(split=split), 64, Matrix(64, channels, 1), sms=132)
    steps = channels // 128
    share = -(-steps // cut["SPLIT"])
    assert share * (cut["SPLIT"] - 1) < steps


def test_quantised_activations_of_few_tokens_take_a_kernel_that_has_them():
    tile = table_tile("sm_90", 1, rows=64, channels=128, unit=1, is_whole=True, quantize=True)
    assert "BLOCK_R" in tile.constants


@pytest.mark.parametrize("arch", ["sm_120", "sm_90"])
def test_rows_that_are_no_whole_pieces_take_a_tile_of_many_tokens(arch):
    given = {"rows": 64, "channels": 100, "unit": 1}
    assert "BLOCK_R" in table_tile(arch, 1, **given, is_whole=False).constants
    assert "KS" in table_tile(arch, 1, **given, is_whole=True).constants
