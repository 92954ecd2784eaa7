"""Both launches of a hyper-connection against their formula; what the wrappers allocate is NaN to begin with."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl

import kernels.hyper_connection_chunk as chunk
import kernels.hyper_connection_decode as decode


def _cases():
    name = "hyper_connection_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case = cases.make_case


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    plain = torch.empty
    monkeypatch.setattr(decode.torch, "empty", lambda *args, **kwargs: plain(*args, **kwargs).fill_(math.nan))


@pytest.mark.parametrize(("n", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16)], ids=str)
def test_both_steps_equal_their_formula(n, dtype):
    assert make_case(5, n=n, dtype=dtype).fault() == ""


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_head_equals_its_formula(n):
    assert make_case(2, n=n, head=True).fault() == ""


@pytest.mark.parametrize("y_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_may_be_of_any_float_dtype(y_dtype):
    assert make_case(3, n=2, iters=1, y_dtype=y_dtype).fault() == ""


def test_all_streams_may_be_one_in_memory():
    assert make_case(3, iters=1, expanded=True).fault() == ""


@pytest.mark.parametrize("tokens", [1, 17])
def test_any_number_of_tokens(tokens):
    assert make_case(tokens, padding=2, iters=1).fault() == ""


def test_no_tokens():
    assert make_case(0).run().streams.shape == (0, 4, 64)


def test_any_number_of_spans():
    assert make_case(2, n=3, hidden=192, iters=1).fault() == ""


def test_every_way_to_cut_equals_the_formula():
    assert make_case(1, hidden=192, n=2, iters=1).fault(tiles=cases.make_tiles(2, 2, spans=1)) == ""


def test_there_may_be_more_sums_than_the_second_launch_takes_at_once():
    case = make_case(1, hidden=1088, n=2, iters=1)
    begun = case.begin(tiles=cases.make_tiles(1, 1, spans=2))
    assert cases.mix_fault(begun, case.streams, case.first, None) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_do_not_depend_on_how_the_first_launch_is_cut(dtype):
    case = make_case(2, dtype=dtype, iters=1)
    one = case.run(tiles=cases.make_tiles(1, 1, spans=1))
    other = case.run(tiles=cases.make_tiles(2, 1, spans=2))
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.streams, other.streams)
    assert torch.equal(one.carry, other.carry)


@pytest.mark.parametrize("iters", [1, 20])
def test_matrices_are_normalised_as_often_as_asked(iters):
    """Logits far apart, so that each normalisation matters."""
    assert make_case(4, iters=iters, sharp=6.0).fault() == ""


def test_padding_becomes_zeros_and_its_carry_is_finite():
    got = make_case(2, padding=3, iters=1).run()
    assert bool((got.streams[2:] == 0).all())
    assert bool((got.x[2:] == 0).all())
    assert bool(got.carry[2:].isfinite().all())


def test_a_token_s_bits_do_not_depend_on_the_others():
    case = make_case(17, iters=1)
    whole = case.run()
    for at in (9, 16):
        one = cases.Case(case.streams[at : at + 1], case.y[at : at + 1], case.first, case.second, None).run()
        assert torch.equal(one.x, whole.x[at : at + 1])
        assert torch.equal(one.streams, whole.streams[at : at + 1])
        assert torch.equal(one.carry, whole.carry[at : at + 1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_makes_its_token_nan_and_no_other(value):
    case = make_case(3, n=2, iters=1)
    before = case.run()
    case.y[1, 5] = value
    after = case.run()
    assert bool(after.x[1].isnan().all())
    assert torch.equal(after.x[::2], before.x[::2])
    assert torch.equal(after.streams[::2], before.streams[::2])


def test_rows_of_experts_are_added_up():
    assert make_case(3, n=2, top_k=3, padding=2, iters=1).fault() == ""


@pytest.mark.parametrize("spans", [1, 2])
def test_rows_of_experts_added_up_by_a_launch_of_their_own_lead_to_the_same_bits(spans):
    case = make_case(2, n=2, top_k=3, iters=1)
    assert cases.summed_fault(case, tiles=cases.make_tiles(1, 1, spans=spans)) == ""


def test_there_may_be_nothing_to_add_to_rows_of_experts():
    case = make_case(2, n=2, top_k=2, iters=1)
    case.y = dataclasses.replace(case.y, add=None)
    assert cases.spread_fault(decode.spread(case.y, case.begin()), case.y, case.begin(), None) == ""


def test_the_spread_alone_has_the_bits_of_both():
    assert cases.spread_alone_fault(make_case(3, n=2, padding=1, iters=1)) == ""


def test_a_carry_that_arrives_during_the_wait_is_the_one_that_counts(monkeypatch):
    case = make_case(3)
    begun = case.begin()
    wanted = decode.spread(case.y, begun)
    right = begun.carry.clone()
    late = []

    def wait(_semantic=None):
        late.append(not torch.equal(begun.carry, right))
        begun.carry.copy_(right)

    monkeypatch.setattr(decode, "_pdl", lambda device: (True, {}))
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", wait)
    begun.carry.fill_(0.25)
    assert torch.equal(decode.spread(case.y, begun), wanted)
    assert late[0]


@pytest.mark.parametrize(("n", "head"), [(2, False), (3, False), (4, False), (2, True), (4, True)], ids=str)
def test_launches_of_chunks_equal_their_formula(n, head):
    tiles = cases.make_chunk_tiles()
    case = make_case(18, n=n, padding=2, head=head)
    assert case.fault(tiles=tiles) == ""
    assert case.begin(tiles=tiles).ready


def test_many_tokens_have_launches_of_chunks():
    case = make_case(chunk.MANY - 1, n=2, hidden=128, padding=2)
    assert case.fault() == ""
    assert case.begin().ready
    assert not make_case(2, n=2, iters=1).begin().ready


@pytest.mark.parametrize("options", [{"expanded": True}, {"hidden": 192}, {"sharp": 6.0, "iters": 20}], ids=str)
def test_chunks_of_other_streams_equal_their_formula(options):
    assert make_case(3, **{"iters": 1} | options).fault(tiles=cases.make_chunk_tiles(span=128, channels=32)) == ""


def test_rows_of_experts_are_added_up_before_a_chunk_is_spread():
    case = make_case(3, n=2, top_k=3, padding=2, iters=1)
    assert case.fault(tiles=cases.make_chunk_tiles()) == ""
    assert cases.spread_alone_fault(case, tiles=cases.make_chunk_tiles()) == ""


def test_a_chunk_s_token_has_the_same_bits_wherever_it_lies():
    case, tiles = make_case(19, iters=2), cases.make_chunk_tiles()
    whole = case.run(tiles=tiles)
    one = cases.Case(case.streams[17:18], case.y[17:18], case.first, case.second, None).run(tiles=tiles)
    for name in ("x", "streams", "carry"):
        assert torch.equal(getattr(one, name), getattr(whole, name)[17:18])


def test_padding_of_a_chunk_becomes_zeros_and_its_carry_is_finite():
    got = make_case(2, padding=3, iters=1).run(tiles=cases.make_chunk_tiles())
    assert bool((got.streams[2:] == 0).all())
    assert bool((got.x[2:] == 0).all())
    assert bool(got.carry[2:].isfinite().all())


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # NumPy's, of a maximum
def test_a_value_that_is_not_finite_makes_its_token_of_a_chunk_nan_and_no_other():
    case, tiles = make_case(3, n=2, iters=1), cases.make_chunk_tiles()
    before = case.run(tiles=tiles)
    case.y[1, 5] = math.nan
    after = case.run(tiles=tiles)
    assert bool(after.x[1].isnan().all())
    assert torch.equal(after.x[::2], before.x[::2])


def test_a_pass_goes_on_with_the_launches_it_began_with():
    case = make_case(2, n=2, iters=1)
    begun = case.begin(tiles=cases.make_chunk_tiles())
    assert decode.spread_and_mix(case.y, begun, case.second).ready
    with pytest.raises(ValueError, match="wanted one of hyper_spread_chunk, as before"):
        decode.spread_and_mix(case.y, begun, case.second, tiles=cases.make_tiles(1, 1))
    with pytest.raises(ValueError, match="wanted one of hyper_spread, as before"):
        decode.spread_and_mix(case.y, case.begin(), case.second, tiles=cases.make_chunk_tiles())
