"""What the two-launch hyper-connection computes on a CPU, and what it refuses."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.hyper_connection import hc_head, hc_post, hc_pre, sinkhorn_reference
from kernels.hyper_connection_decode import ADDED, mix, spread, spread_and_mix
from kernels.norm_rope import rms_norm
from kernels.tiles import TILES


def _cases():
    name = "hyper_connection_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case = cases.make_case


def normed(x, mixer, dtype):
    return rms_norm(x.to(dtype), mixer.norm, eps=mixer.norm_eps)


def weights_of(mixer):
    return mixer.fn, mixer.base, mixer.scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_two_sublayers_and_the_head_have_the_bits_of_the_separate_operations(n, dtype):
    case = make_case(3, n=n, dtype=dtype, iters=20)
    head = cases.make_mixer(7, n=n, hidden=64, head=True)
    begun = case.begin()
    after = spread_and_mix(case.y, begun, case.second)
    last = spread_and_mix(case.y, after, head)

    settings = {"eps": cases.EPS, "norm_eps": cases.NORM_EPS}
    streams = case.streams
    for mixer, got in ((case.first, begun), (case.second, after)):
        x, post, comb = hc_pre(streams, *weights_of(mixer), iters=20, **settings)
        assert torch.equal(got.streams, streams)
        assert torch.equal(got.x, normed(x, mixer, dtype).to(dtype))
        streams = hc_post(case.y, streams, post, comb)
    assert torch.equal(last.streams, streams)
    assert torch.equal(last.x, normed(hc_head(streams, *weights_of(head), **settings), head, dtype))
    assert last.carry is None


def test_both_steps_equal_their_formula():
    assert make_case(5, padding=2).fault() == ""


def test_padding_becomes_zeros_whatever_its_rows_hold():
    got = make_case(2, padding=3).run()
    assert bool((got.streams[2:] == 0).all())
    assert bool((got.x[2:] == 0).all())


def test_rows_of_experts_are_added_up():
    case = make_case(5, top_k=3, padding=2)
    assert case.fault() == ""
    assert cases.summed_fault(case) == ""


def test_rows_of_experts_for_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"y \(3, 64\): wanted contiguous floats \(2, 64\), or rows of experts"):
        spread_and_mix(make_case(3, top_k=2).y, make_case(2).begin(), make_case(2).second)


def test_the_spread_alone_has_the_bits_of_both():
    assert cases.spread_alone_fault(make_case(3)) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fn": torch.zeros(24, 64)}, r"fn \(24, 64\)"),
        ({"base": torch.zeros(4)}, r"base \(4,\)"),
        ({"scale": torch.zeros(1)}, r"scale \(1,\)"),
        ({"norm": torch.zeros(64, dtype=torch.bfloat16)}, r"norm \(64,\) torch.bfloat16"),
        ({"iters": 0}, "iters 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, said):
    case = make_case(2)
    with pytest.raises(ValueError, match=said):
        mix(case.streams, dataclasses.replace(case.first, **change))


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        (torch.zeros(2, 5, 64), r"streams \(2, 5, 64\)"),
        (torch.zeros(2, 4, 65), r"streams \(2, 4, 65\)"),
        (torch.zeros(2, 4, 64, dtype=torch.float16), "streams of torch.float16"),
        (torch.zeros(2, 64, 4).transpose(1, 2), "channels contiguous"),
    ],
)
def test_streams_that_the_kernels_can_not_read_are_refused(streams, said):
    with pytest.raises(ValueError, match=said):
        mix(streams, make_case(2).first)


@pytest.mark.parametrize("sequence", [torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)], ids=str)
def test_a_sequence_that_does_not_fit_is_refused(sequence):
    case = make_case(2)
    with pytest.raises(ValueError, match="sequence"):
        mix(case.streams, case.first, sequence=sequence)


@pytest.mark.parametrize(
    "y",
    [torch.zeros(3, 64), torch.zeros(2, 64, dtype=torch.int32), torch.zeros(64, 2).T],
    ids=["rows", "ints", "turned"],
)
def test_an_output_that_does_not_fit_is_refused(y):
    case = make_case(2)
    with pytest.raises(ValueError, match="y "):
        spread_and_mix(y, case.begin(), case.second)


def test_nothing_is_spread_behind_the_head():
    case = make_case(2, head=True)
    with pytest.raises(ValueError, match="behind the head"):
        spread(case.y, case.run())


@pytest.mark.parametrize("arch", sorted(TILES["hyper_spread"]))
def test_a_tile_leaves_sums_that_the_second_launch_can_add_up(arch):
    assert all(ADDED % tile.constants["L"] == 0 for tile in TILES["hyper_spread"][arch])


@pytest.mark.parametrize("arch", sorted(TILES["hyper_finish"]))
def test_sums_are_added_up_alike_for_any_number_of_tokens(arch):
    """Or a token's bits would depend on how many others there are."""
    assert len(TILES["hyper_finish"][arch]) == 1


@pytest.mark.parametrize("op", ["hyper_spread_chunk", "hyper_finish_chunk"])
def test_chunks_have_one_tile_so_that_bits_do_not_depend_on_their_size(op):
    assert all(len(TILES[op][arch]) == 1 for arch in TILES[op])


def test_a_carry_that_holds_matrices_is_spread_with_them():
    case = make_case(3)
    begun = case.begin()
    n = begun.streams.shape[1]
    carry = begun.carry.clone()
    carry[:, 1:, :n] = sinkhorn_reference(carry[:, 1:, :n], eps=begun.eps, iters=begun.iters)
    ready = dataclasses.replace(begun, carry=carry, ready=True)
    assert torch.equal(spread(case.y, ready), spread(case.y, begun))
