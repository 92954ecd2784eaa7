"""Routing and the experts' kernels against their torch references; what the wrappers allocate is NaN to begin with."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.moe_decode as decode
import kernels.moe_routing as routing
from kernels.moe_held import hold_experts

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")


def _cases():
    name = "moe_cases"
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
        return x.fill_(math.nan) if x.dtype.is_floating_point else x.fill_(-(2**30))

    monkeypatch.setattr(decode.torch, "empty", empty)


plain_tile_for = decode.tile_for


@pytest.fixture(autouse=True)
def one_program_an_expert(monkeypatch):
    """A program costs tens of milliseconds here: where it does not matter, one takes all rows of an expert."""
    few, many = tile(r=4, rs=2, pair_s=1), tile(r=4, rs=2, pair_s=1, nb=2, many_r=4)
    monkeypatch.setattr(decode, "tile_for", lambda op, arch, *, tokens: many if tokens > routing.MANY else few)


@pytest.mark.parametrize("formats", [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "nvfp4")], ids="-".join)
def test_every_format_and_a_mixture_equal_the_reference(formats):
    assert make_case(3, formats=formats, padding=1).fault() == ""


def test_the_table_has_tiles_for_every_shape(monkeypatch):
    monkeypatch.setattr(decode, "tile_for", plain_tile_for)
    for tokens in (1, 2, 9, 17):
        assert make_case(tokens, same=True, experts=2, top_k=1).fault() == ""


@pytest.mark.parametrize(("tokens", "by_table"), [(1, False), (4, True), (11, False), (18, True)])
def test_routing_of_any_number_of_tokens(tokens, by_table):
    case = make_case(tokens, by_table=by_table, padding=tokens % 3, experts=20, top_k=6)
    assert cases.routing_fault(case.route(), case.expect_routing()) == ""


def test_scores_may_be_given_before_sqrt_softplus():
    case = make_case(9, is_raw=True, padding=2)
    assert cases.routing_fault(case.route(), case.expect_routing()) == ""


def test_very_low_scores_keep_their_size_under_sqrt_softplus():
    case = make_case(1, is_raw=True, bias=False)
    case.scores.fill_(-100.0)
    case.scores[0, 3:5] = torch.tensor([-40.0, -41.0])
    got = case.route()
    assert got.ids.tolist() == [[3, 4]]
    ratio = math.exp(0.5)
    assert torch.allclose(got.weights, torch.tensor([[ratio, 1.0]]) / (1 + ratio) * 1.5, rtol=1e-4)


def test_equal_scores_go_to_the_lower_expert_and_minus_zero_equals_zero():
    case = make_case(2, bias=False, top_k=3)
    case.scores.copy_(torch.tensor([[-0.0, -1.0, 0.0, -0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]))
    assert case.route().ids.tolist() == [[0, 2, 3], [0, 1, 2]]


def test_bias_chooses_but_does_not_weigh():
    case = make_case(1)
    case.scores.fill_(0.5)
    case.scores[0, 5] = 1.5
    case.routing["bias"] = torch.zeros(6)
    case.routing["bias"][2] = 100.0
    got = case.route()
    assert got.ids.tolist() == [[2, 5]]
    assert torch.allclose(got.weights, torch.tensor([[0.375, 1.125]]))


@pytest.mark.parametrize("tokens", [8, 9, 16, 17])
def test_any_number_of_rows_of_an_expert(tokens):
    """8 or 16 are taken at once; 17 leave a last share of one."""
    assert make_case(tokens, same=True, experts=2, top_k=1).fault() == ""


def test_an_expert_with_many_rows_beside_experts_with_one():
    """The list has that expert first, and the others need another kernel."""
    case = make_case(17, bias=False, experts=4)
    case.scores[:, 2] += 10.0
    assert case.route().active[[1, 4]].tolist() == [1, 2]
    assert case.fault() == ""


@pytest.mark.parametrize("nb", [2, 4])
def test_shares_of_experts_with_many_rows_stay_apart(nb):
    case = make_case(18, same=True, experts=3, hidden=128)
    tiles = tile(rs=4, nb=nb, many_r=2, split=2), tile(rs=4, nb=4, many_r=1)
    assert case.route().active[1] == 2
    assert case.fault(tiles=tiles) == ""


def test_a_tables_row_may_name_an_expert_twice():
    case = make_case(9, by_table=True)
    case.routing["table"][:] = torch.tensor([4, 4])
    assert case.fault() == ""


@pytest.mark.parametrize("expert", [6, -1, 2**31])
def test_an_expert_that_the_table_invents_makes_its_token_nan_and_no_other(expert):
    case = make_case(3, by_table=True)
    case.routing["token_ids"].copy_(torch.tensor([1, 2, 3]))
    before = case.run()
    case.routing["table"][2, 1] = expert
    after = case.run()
    assert bool(after[1].isnan().all())
    assert torch.equal(after[::2], before[::2])


@pytest.mark.parametrize(
    ("tokens", "first", "last"),
    [
        (2, tile(ks=4, s=2, rs=2, r=2), tile(r=2, rs=8)),
        (2, tile(r=4, ks=2, rs=2, s=4), tile(r=4, ks=2, rs=4)),
        (2, tile(r=4, ks=8), tile(r=4, rs=2, s=2)),
        (9, tile(r=4, rs=2, s=4, pair_s=2), tile(r=8, ks=2, rs=2, pair_s=1)),
        (17, tile(ks=2, rs=2, nb=4, many_r=2, many_s=2, ahead=2), tile(rs=4, nb=1, many_r=4)),
        (17, tile(rs=4, nb=2, many_r=4, ahead=2, split=4), tile(rs=4, nb=4, many_r=8, many_s=2)),
    ],
    ids=lambda x: str(list(x.constants.values())) if hasattr(x, "constants") else str(x),
)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_every_way_to_cut_equals_the_reference(fmt, tokens, first, last):
    case = make_case(tokens, hidden=512, inner=128, experts=2, top_k=2 - tokens // 17, formats=(fmt, fmt))
    case.x[1] *= 0.01
    assert case.fault(tiles=(first, last)) == ""


def test_sums_do_not_depend_on_the_cut_of_rows():
    case = make_case(1, hidden=128)
    one = case.run(tiles=(tile(r=4), tile(r=2)))
    other = case.run(tiles=(tile(rs=8), tile(r=2, rs=4)))
    # Bit for bit on a GPU; numpy, of which the interpreter's products are made, may round by their shape.
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-5)


def test_padding_tokens_get_zeros_or_what_is_added():
    case = make_case(2, padding=2)
    add = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert bool((case.run()[2:] == 0).all())
    assert torch.equal(case.run(add=add)[2:], add[2:].float())


def test_padding_tokens_may_hold_anything():
    case = make_case(2, padding=2)
    before = case.run()
    case.x[2:] = math.nan
    case.scores[2:] = math.nan
    assert torch.equal(case.run(), before)


@pytest.mark.parametrize("token_id", [-1, 50, 10**9])
def test_padding_tokens_may_have_any_token_id(token_id):
    case = make_case(2, by_table=True, padding=1)
    before = case.run()
    case.routing["token_ids"][2] = token_id
    assert torch.equal(case.run(), before)


def test_only_padding():
    case = make_case(0, padding=3)
    assert bool((case.run() == 0).all())
    assert int(case.route().active[0]) == 0


def test_what_is_added_is_added_last_and_the_result_rounded_once():
    case = make_case(3)
    add = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    whole = case.run()
    assert torch.equal(case.run(add=add), whole + add)
    assert torch.equal(case.run(add=add, out_dtype=torch.bfloat16), (whole + add).to(torch.bfloat16))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_an_activation_that_f16_can_not_hold_makes_its_token_nan_and_no_other(value):
    case = make_case(3, same=True)
    before = case.run()
    case.x[1, 5] = value
    after = case.run()
    assert bool(after[1].isnan().all())
    assert torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("column", [3, 5])
def test_a_score_that_is_nan_makes_its_token_nan_and_no_other(column):
    case = make_case(3)
    before = case.run()
    case.scores[1, column] = math.nan
    after = case.run()
    assert bool(after[1].isnan().all())
    assert torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_gate_and_value_are_clamped(fmt):
    case = make_case(3, formats=(fmt, fmt))
    case.limit = 0.05
    free = make_case(3, formats=(fmt, fmt)).expect()
    assert (case.expect() - free).abs().max() > 0.1 * free.abs().max()
    assert case.fault() == ""


def test_every_code_under_every_scale_is_exact():
    assert cases.exactness_fault() == ""


def test_equal_inputs_give_equal_bits():
    case = make_case(11, padding=1)
    assert torch.equal(case.run(), case.run())


@pytest.mark.parametrize("tokens", [3, 20])
def test_ranks_that_share_experts_out_add_up_to_one_with_all(tokens, monkeypatch):
    """Rows of other ranks' experts are 0, whatever lay in memory."""
    monkeypatch.setattr(decode, "tile_for", plain_tile_for)
    case = make_case(tokens, padding=1)
    whole, parts = case.run(), []
    for held in (range(0, 2), range(2, 6)):
        mine, own = torch.arange(held.start, held.stop), hold_experts(case.route(), held)
        w13, w2 = case.w13.select(mine), case.w2.select(mine)
        parts.append(decode.experts_decode(own, w13, w2, limit=case.limit))
        wanted = decode.experts_decode_reference(own, w13, w2, limit=case.limit)
        assert (parts[-1] - wanted).abs().max() < 2e-3 * whole.abs().max()
    assert (parts[0] + parts[1] - whole).abs().max() < 2e-3 * whole.abs().max()
