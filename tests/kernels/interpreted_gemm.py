"""Linear layers' kernels against float64; what the wrappers allocate is NaN to begin with."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.gemm_decode as decode
import kernels.gemm_pair as pair
from kernels.norm_rope import rms_norm
from kernels.quant import quantize_e4m3

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")


def _cases():
    name = "gemm_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case, few, many, held = cases.make_case, cases.few_tile, cases.many_tile, cases.held_tile
FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        return x.view(torch.uint8).fill_(0x7F).view(x.dtype) if x.itemsize == 1 else x.fill_(math.nan)

    monkeypatch.setattr(decode.torch, "empty", empty)


@pytest.mark.parametrize("tokens", [1, 9, 17])
@pytest.mark.parametrize("dtype", [FP8, BF16, FP32], ids=str)
@pytest.mark.parametrize("x_dtype", [BF16, FP32], ids=str)
def test_every_kind_of_weight_and_activation_equals_the_reference(tokens, dtype, x_dtype):
    assert make_case(tokens, 48, 192, dtype=dtype, x_dtype=x_dtype).fault() == ""


@pytest.mark.parametrize("tile", [few(ks=4, depth=2), many(size=64)], ids=["few", "many"])
@pytest.mark.parametrize("shape", [(5, 300, 320), (1, 17, 64), (3, 130, 16)], ids=str)
def test_any_number_of_rows_and_channels(tile, shape):
    assert make_case(*shape).fault(tile=tile) == ""


@pytest.mark.parametrize("shape", [(2, 40, 100), (20, 7, 33)], ids=str)
def test_channels_that_are_no_whole_pieces_of_16_bytes(shape):
    assert make_case(*shape).fault() == ""


@pytest.mark.parametrize("tokens", [3, 18])
@pytest.mark.parametrize("offset", [(64, 0), (0, 64), (17, 112), (127, 5)], ids=str)
def test_a_slice_may_cut_a_block(tokens, offset):
    assert make_case(tokens, 140, 144, offset=offset).fault() == ""


@pytest.mark.parametrize(
    "tile",
    [
        few(ks=2, rs=2),
        few(r=2, rs=2, depth=3),
        few(ks=4, depth=4),
        few(ks=2, r=2, depth=2, split=3),
        few(ks=4, split=4),
        few(depth=8),
    ],
    ids=lambda tile: str(list(tile.constants.values())),
)
def test_every_way_to_cut_few_tokens(tile):
    assert make_case(9, 48, 1152).fault(tile=tile) == ""


@pytest.mark.parametrize(
    "tile",
    [many(columns=16), many(split=3), many(rows=128, columns=16, size=64, split=2), many(columns=64)],
    ids=lambda tile: str(list(tile.constants.values())),
)
def test_every_way_to_cut_many_tokens(tile):
    assert make_case(18, 80, 640).fault(tile=tile) == ""


def test_a_step_of_more_channels_than_a_scale_holds_for():
    with pytest.raises(ValueError, match="a step of 256 e4m3 channels: a scale holds for 128"):
        make_case(18, 80, 640).run(tile=many(size=256))


@pytest.mark.parametrize("tokens", [2, 18])
@pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
def test_groups_have_a_matrix_each(tokens, dtype):
    assert make_case(tokens, 80, 128, dtype=dtype, groups=3).fault() == ""


@pytest.mark.parametrize("tile", [few(split=2), many(split=2)], ids=["few", "many"])
def test_groups_share_channels_among_programs(tile):
    assert make_case(2, 20, 256, groups=2).fault(tile=tile) == ""


@pytest.mark.parametrize("tokens", [1, 9, 17])
@pytest.mark.parametrize("x_dtype", [BF16, FP32], ids=str)
def test_a_norm_in_front(tokens, x_dtype):
    assert make_case(tokens, 20, 320, dtype=BF16, normed=True, x_dtype=x_dtype).fault() == ""


def test_a_norm_in_front_of_warps_that_share_channels_or_rows():
    case = make_case(9, 40, 512, normed=True)
    assert case.fault(tile=few(ks=2, rs=2, r=2, depth=2, split=4)) == ""


@pytest.mark.parametrize(
    "tile", [many(fold=0), many(fold=1), many(rows=128, columns=16)], ids=["apart", "folded", "wide"]
)
@pytest.mark.parametrize("dtype", [FP8, BF16, FP32], ids=str)
def test_a_norm_in_front_of_many_tokens(tile, dtype):
    assert make_case(18, 140, 256, dtype=dtype, normed=True, gap=8).fault(tile=tile) == ""


@pytest.mark.parametrize(
    ("options", "fold", "launches"),
    [
        ({}, 1, 0),
        ({}, 0, 1),
        ({"x_dtype": FP32}, 1, 1),
        ({"channels": 320}, 1, 1),
        ({"offset": (0, 64)}, 1, 1),
    ],
    ids=["folded", "tile without", "float32", "half a step", "cut"],
)
def test_a_norm_has_a_launch_of_its_own_where_a_product_can_not_take_it_along(options, fold, launches, monkeypatch):
    norms, apart = [], decode._normed
    monkeypatch.setattr(decode, "_normed", lambda *given: norms.append(given) or apart(*given))
    case = make_case(18, 20, **{"channels": 256, **options}, normed=True)
    assert case.fault(tile=many(fold=fold)) == ""
    assert len(norms) == launches


def test_a_norm_that_does_not_begin_where_pairs_can_be_copied_has_a_launch_of_its_own(monkeypatch):
    norms, apart = [], decode._normed
    monkeypatch.setattr(decode, "_normed", lambda *given: norms.append(given) or apart(*given))
    case = make_case(18, 20, 256, normed=True)
    case.norm = torch.cat([case.norm[:1], case.norm])[1:]
    assert case.fault(tile=many()) == ""
    assert len(norms) == 1


@pytest.mark.parametrize("tokens", [2, 17])
def test_tokens_may_lie_apart(tokens):
    assert make_case(tokens, 20, 128, gap=8).fault() == ""


def test_the_table_has_tiles_for_many_tokens():
    assert make_case(70, 20, 64).fault() == ""


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (3, few(ks=2, depth=2)),
        (9, few(ks=2, rs=2, r=2, split=3)),
        (18, many()),
        (18, many(rows=128, columns=16, split=2)),
        (18, held()),
    ],
    ids=lambda value: str(list(value.constants.values())) if hasattr(value, "constants") else str(value),
)
def test_gates_act_on_what_they_open(tokens, tile):
    """A limit that many sums exceed, and scales that differ between gates and values."""
    case = make_case(tokens, 160, 512, limit=30.0, quantize="STEPS" in tile.constants)
    case.x *= 2
    sums = dataclasses.replace(case, limit=None).run(out_dtype=FP32)
    assert 0.2 < float((sums.abs() > 30).float().mean()) < 0.8
    assert case.fault(tile=tile) == ""


@pytest.mark.parametrize("tile", [few(), many()], ids=["few", "many"])
@pytest.mark.parametrize("row", [5, 21], ids=["gate", "value"])
def test_a_gate_or_a_value_that_is_no_number_spoils_its_channel_and_no_other(tile, row):
    case = make_case(3, 32, 128, dtype=BF16, limit=10.0)
    before = case.run(tile=tile)
    case.weight[row] = math.nan
    after = case.run(tile=tile)
    assert bool(after[:, 5].isnan().all())
    kept = torch.arange(16) != 5
    assert torch.equal(after[:, kept], before[:, kept])


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [(3, None), (12, few(ks=4, split=2)), (20, None), (20, many(split=2)), (3, few(ks=2, rs=2, r=2))],
    ids=["table", "few, split", "table, many", "many, split", "several rows"],
)
def test_two_matrices_in_one_launch_give_what_each_gives(tokens, tile):
    channels = 1024 if tile is None else 512
    a, b = make_case(tokens, 70, channels, dtype=BF16), make_case(tokens, 24, channels, seed=1)
    outs = pair.linear_pair_decode(a.x, (a.weight, None), (b.weight, b.scale), out_dtypes=(FP32, BF16), tile=tile)
    used = tile or pair._tile("sm_120", tokens)
    assert torch.equal(outs[0], decode.linear_decode(a.x, a.weight, out_dtype=FP32, tile=used))
    assert torch.equal(outs[1], decode.linear_decode(a.x, b.weight, b.scale, tile=used))


def test_two_matrices_that_one_launch_does_not_take_are_two():
    a, b = make_case(70, 20, 128, dtype=BF16), make_case(70, 24, 128, seed=1)
    outs = pair.linear_pair_decode(a.x, (a.weight, None), (b.weight, b.scale))
    assert torch.equal(outs[1], decode.linear_decode(a.x, b.weight, b.scale))


def test_both_output_types():
    case = make_case(3, 20, 128)
    assert torch.equal(case.run(), case.run(out_dtype=FP32).to(BF16))


@pytest.mark.parametrize(("groups", "channels"), [(0, 200), (2, 128)])
def test_quantised_activations(groups, channels):
    assert make_case(3, 20, channels, groups=groups, quantize=True).fault() == ""


@pytest.mark.parametrize("x_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("channels", [128, 320])
def test_a_norm_in_front_of_quantised_activations(channels, x_dtype):
    assert make_case(18, 20, channels, normed=True, quantize=True, x_dtype=x_dtype).fault() == ""


@pytest.mark.parametrize(
    "tile",
    [
        many(columns=16),
        many(split=3),
        many(rows=128, columns=16, stages=2),
        many(columns=64, stages=5),
        held(steps=5),
        held(columns=16, steps=8),
        held(rows=128, columns=64, steps=2),
        held(split=3),
    ],
    ids=lambda tile: str(list(tile.constants.values())),
)
def test_every_way_to_cut_quantised_activations(tile):
    assert make_case(18, 80, 640, normed=True, quantize=True).fault(tile=tile) == ""


@pytest.mark.parametrize("tile", [many(), held()], ids=["many", "held"])
def test_a_slice_of_rows_may_cut_a_block_of_quantised_activations(tile):
    assert make_case(18, 140, 144, offset=(17, 0), quantize=True).fault(tile=tile) == ""


def test_quantised_groups_share_channels_among_programs_that_hold_them():
    assert make_case(3, 70, 384, groups=2, quantize=True).fault(tile=held(split=2)) == ""


def test_quantised_groups_may_end_inside_a_tile():
    assert make_case(3, 150, 128, groups=2, quantize=True).fault(tile=held()) == ""


@pytest.mark.parametrize("tile", [many(split=2), held(split=2)], ids=["many", "held"])
def test_a_quantised_token_does_not_depend_on_the_others(tile):
    case = make_case(5, 20, 512, normed=True, quantize=True)
    before = case.run(tile=tile)
    case.x[[0, 1, 3, 4]] = math.nan
    after = case.run(tile=tile)
    assert torch.equal(after[2], before[2])
    assert bool(after[[0, 1, 3, 4]].isnan().all())


@pytest.mark.parametrize(("quantize", "tile"), [(True, few()), (False, held())], ids=["few", "held"])
def test_a_tile_of_other_activations_is_refused(quantize, tile):
    with pytest.raises(ValueError, match=f"quantize {quantize} with a tile"):
        make_case(3, 20, 128, quantize=quantize).run(tile=tile)


def test_normed_rows_are_quantised_as_the_reference_does():
    case = make_case(5, 16, 384, normed=True)
    normed = rms_norm(case.x, case.norm, eps=1e-6).to(BF16)
    codes, scale = decode.quantize_rows(case.x, case.norm)
    wanted, wanted_scale = quantize_e4m3(normed, 128)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("ulp", [-1, 0, 1])
def test_scales_are_right_on_both_sides_of_a_power_of_two(ulp):
    """The largest value of a group is that of e4m3 times a power of two, or the float beside it."""
    x = torch.zeros(3, 128)
    x[:, 3] = torch.tensor([448.0, 448 * 2.0**-12, 448 * 2.0**100])
    x[:, 3] = (x[:, 3].view(torch.int32) + ulp).view(torch.float32)
    codes, scale = decode.quantize_rows(x)
    wanted, wanted_scale = quantize_e4m3(x, 128)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


def test_quantised_rows_equal_those_of_the_reference():
    x = make_case(5, 16, 384, gap=8).x * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e30])[:, None]
    x[1, 130], x[2, 5] = math.nan, math.inf
    codes, scale = decode.quantize_rows(x)
    wanted, wanted_scale = quantize_e4m3(x, 128)
    assert torch.equal(scale.nan_to_num(-1, posinf=-2), wanted_scale.nan_to_num(-1, posinf=-2))
    assert torch.equal(codes.view(torch.uint8)[::3], wanted.view(torch.uint8)[::3])


@pytest.mark.parametrize(
    ("tile", "normed"),
    [(few(ks=2, depth=2), False), (few(ks=2, split=2), False), (many(split=2), False), (many(), True)],
    ids=["few", "split", "many", "many, normed"],
)
def test_a_token_does_not_depend_on_the_others(tile, normed):
    case = make_case(5, 20, 512, normed=normed)
    before = case.run(tile=tile)
    case.x[[0, 1, 3, 4]] = math.nan
    after = case.run(tile=tile)
    assert torch.equal(after[2], before[2])
    assert bool(after[[0, 1, 3, 4]].isnan().all())


@pytest.mark.parametrize("tile", [few(), many()], ids=["few", "many"])
def test_large_and_small_activations_keep_their_digits(tile):
    case = make_case(3, 20, 128)
    before = case.run(tile=tile, out_dtype=FP32)
    case.x[0] *= 2.0**60
    case.x[2] *= 2.0**-60
    factor = torch.tensor([2.0**60, 1.0, 2.0**-60])[:, None]
    assert torch.equal(case.run(tile=tile, out_dtype=FP32), before * factor)


@pytest.mark.parametrize("tokens", [3, 18])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_activation_that_is_no_number_spoils_its_token_and_no_other(tokens, value):
    case = make_case(tokens, 20, 128)
    before = case.run()
    case.x[1, 5] = value
    after = case.run()
    assert not bool(after[1].isfinite().any())
    assert torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("tile", [few(), many()], ids=["few", "many"])
def test_every_code_is_exact(tile):
    """One channel at a time is 1, so that a sum is a weight."""
    case = make_case(16, 256, 16)
    case.x.copy_(torch.eye(16))
    codes = torch.arange(256).to(torch.uint8)[:, None] + torch.arange(16).to(torch.uint8)[None, :] * 17
    case.weight, case.scale = codes.view(FP8), torch.full((2, 1), 0.75)
    # a NaN code makes NaN of its whole row; rows without one
    sound = ~case.weight.float().isnan().any(1)
    got = case.run(tile=tile, out_dtype=FP32).T
    assert torch.equal(got[sound], case.weight.float()[sound] * 0.75)
    assert bool(got[~sound].isnan().all())


def test_a_weight_that_begins_between_pieces_is_refused():
    case = make_case(3, 20, 64)
    case.weight = torch.zeros(20 * 64 + 8, dtype=torch.uint8)[8:].view(20, 64).view(FP8)
    with pytest.raises(ValueError, match="8 bytes behind a multiple of 16"):
        case.run()


def test_counters_are_zero_again():
    case = make_case(3, 20, 512)
    for tile in (few(split=4), many(split=4)):
        assert torch.equal(case.run(tile=tile), case.run(tile=tile))
    assert not decode._counters(case.x.device, 1).any()
