"""The gate's kernel against what is right for its tokens; scratch and outputs are NaN to begin with."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.moe_gate as module

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")


def _cases():
    name = "moe_gate_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case, tile = cases.make_case, cases.make_tile


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        if x.device.type == "meta":
            return x
        return x.fill_(math.nan) if x.dtype.is_floating_point else x.fill_(-(2**30))

    monkeypatch.setattr(module.torch, "empty", empty)


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 18])
def test_any_number_of_tokens(tokens, by_table):
    assert make_case(tokens, by_table=by_table, padding=tokens % 3).fault(tile=tile()) == ""


@pytest.mark.parametrize(
    "design",
    [tile(ks=2, split=2), tile(ks=4, split=3), tile(nb=2), tile(ks=2, nb=4), tile(ks=8, split=8)],
    ids=lambda t: str(list(t.constants.values())),
)
def test_every_way_to_cut(design):
    assert make_case(11, hidden=320, padding=1).fault(tile=design) == ""


@pytest.mark.parametrize("tokens", [3, 20])
def test_the_table_has_tiles_for_every_shape(tokens):
    assert make_case(tokens, hidden=1024, experts=33, top_k=6).fault() == ""


@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (16, 6), (40, 1), (5, 5)])
def test_any_number_of_experts(experts, top_k):
    assert make_case(4, experts=experts, top_k=top_k, hidden=64).fault(tile=tile()) == ""


def test_more_experts_than_a_lane_has_words_for():
    assert make_case(9, experts=300, top_k=4, hidden=64).fault(tile=tile()) == ""


@pytest.mark.parametrize("tokens", [3, 12])
def test_experts_that_are_listed_twice_have_two_rows(tokens):
    case = make_case(tokens, by_table=True)
    case.routing["table"][:, 2] = case.routing["table"][:, 0]
    assert case.fault(tile=tile()) == ""


def test_hidden_states_may_be_float32():
    assert make_case(4, dtype=torch.float32).fault(tile=tile(ks=2)) == ""


def test_experts_with_many_rows_are_listed_first():
    case = make_case(18, same=True, bias=False)
    assert case.fault(tile=tile()) == ""
    assert int(case.run(tile=tile()).active[1]) > 0


@pytest.mark.parametrize(("tokens", "by_table"), [(3, False), (7, True), (12, False)])
def test_a_gated_layer_shares_the_launch(tokens, by_table, monkeypatch):
    monkeypatch.setattr(module, "linear_decode", None)
    assert make_case(tokens, hidden=1024, by_table=by_table, padding=1).beside_fault(64) == ""


@pytest.mark.parametrize("change", [{"hidden": 128}, {"dtype": torch.float32}], ids=str)
def test_a_gated_layer_that_the_launch_does_not_take_has_one_of_its_own(change):
    assert make_case(3, **{"hidden": 256} | change).beside_fault(32) == ""


def test_equal_scores_go_to_the_lower_expert():
    case = make_case(9, bias=False)
    case.gate[:] = case.gate[:1]
    assert case.run(tile=tile()).ids.tolist() == [[0, 1, 2]] * 9


def test_scores_are_zero_again():
    for tokens in (3, 20):
        make_case(tokens).run(tile=tile(split=2))
    assert not module._scratch(torch.device("cpu"), 256)[0].any()


def test_what_an_earlier_step_told_is_not_taken_for_this_ones():
    for tokens, seed in ((18, 0), (9, 1), (18, 2)):
        assert make_case(tokens, seed=seed).fault(tile=tile()) == ""


def test_a_tile_that_splits_into_more_than_there_is_room_for_is_refused():
    with pytest.raises(ValueError, match="wanted SPLIT of at most 8"):
        make_case(2).run(tile=tile(split=9))


def test_a_tokens_bits_are_those_it_has_alone():
    case = make_case(20, hidden=256, padding=1)
    whole = case.run(tile=tile(ks=2))
    case.x, case.routing["sequence"] = case.x[:1], case.routing["sequence"][:1]
    alone = case.run(tile=tile(ks=2))
    assert torch.equal(alone.ids, whole.ids[:1]) and torch.equal(alone.weights, whole.weights[:1])


def test_a_nan_stays_with_its_token():
    case = make_case(10)
    before = case.run(tile=tile())
    case.x[4, 7] = torch.nan
    after = case.run(tile=tile())
    assert bool(after.weights[4].isnan().all())
    others = [row for row in range(10) if row != 4]
    assert torch.equal(after.weights[others], before.weights[others])


def test_an_expert_that_the_table_invents_makes_its_token_nan():
    case = make_case(3, by_table=True)
    case.routing["token_ids"].copy_(torch.tensor([1, 2, 3]))
    case.routing["table"][2, 1] = 20
    got = case.run(tile=tile())
    assert got.weights.isnan().all(1).tolist() == [False, True, False]
    assert got.ids[1, 1] == 0
