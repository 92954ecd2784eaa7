"""The decode step's experts on the CPU: their references agree with those of moe.py, on weights read the plain way."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.expert_weights import dequantize_experts
from kernels.moe import experts_reference
from kernels.moe_decode import experts_decode
from kernels.moe_held import hold_experts
from kernels.moe_routing import route_tokens


def _cases():
    name = "moe_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


make_case = _cases().make_case


@pytest.mark.parametrize("formats", [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("nvfp4", "mxfp4")], ids="-".join)
@pytest.mark.parametrize("same", [False, True])
def test_experts_equal_those_of_a_prefill(formats, same):
    """f16 keeps h to 2^-11."""
    case = make_case(7, formats=formats, same=same)
    routed = case.route()
    wanted = experts_reference(
        case.x.float(), dequantize_experts(case.w13), dequantize_experts(case.w2), routed.ids.long(), routed.weights,
        case.limit,
    )  # fmt: skip
    assert (case.run() - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_rows_are_listed_by_expert_then_token_and_padding_has_none():
    case = make_case(3, bias=False, padding=1)
    case.scores.copy_(torch.eye(6)[[5, 0, 5, 0]] + torch.eye(6)[[2, 5, 0, 1]] * 0.5 + 0.01)
    routed = case.route()
    assert routed.ids.tolist() == [[5, 2], [0, 5], [5, 0], [-1, -1]]
    assert routed.rank.tolist() == [[0, 0], [0, 1], [2, 1], [-1, -1]]
    assert routed.first.tolist() == [0, 2, 2, 3, 3, 3]
    assert [routed.token[expert, :rows].tolist() for expert, rows in ((0, 2), (2, 1), (5, 3))] == [
        [1, 2],
        [0],
        [0, 1, 2],
    ]
    assert routed.active[:16].tolist() == [3, 0, 0, 0, 0, 0, 2, 0, 2, 2, 1, 0, 5, 3, 3, 0]


def test_experts_with_many_rows_are_listed_first():
    case = make_case(20, bias=False, experts=4)
    case.scores.copy_((torch.eye(4) + 0.01)[[0] * 19 + [1]] + torch.tensor([0.0, 0.0, 0.0, 0.9]))
    assert case.route().active[:16].tolist() == [3, 2, 0, 0, 0, 0, 19, 0, 3, 20, 20, 0, 1, 19, 1, 0]


def test_padding_has_no_weight():
    case = make_case(1, padding=1)
    routed = case.route()
    assert bool((routed.weights[1] == 0).all())
    assert routed.ids[1].tolist() == [-1, -1]


def test_no_tokens_at_all():
    case = make_case(0)
    assert case.run().shape == (0, 64)
    assert int(case.route().active[0]) == 0


def test_what_does_not_fit_is_refused():
    case = make_case(2)
    with pytest.raises(ValueError, match="wanted E x 2I x H in 2 and E x H x I in 1"):
        experts_decode(case.route(), case.w2, case.w13, limit=10.0)
    with pytest.raises(ValueError, match=r"add \(2, 63\)"):
        experts_decode(case.route(), case.w13, case.w2, limit=10.0, add=torch.zeros(2, 63))
    with pytest.raises(ValueError, match="limit 0"):
        experts_decode(case.route(), case.w13, case.w2, limit=0)
    with pytest.raises(ValueError, match="no bias"):
        route_tokens(
            case.x, case.scores, top_k=2, scaling=1.5, bias=torch.zeros(6),
            table=torch.zeros(5, 2, dtype=torch.int64), token_ids=torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip
    with pytest.raises(ValueError, match="top_k 7 of 6 experts"):
        route_tokens(case.x, case.scores, top_k=7, scaling=1.5)
    with pytest.raises(ValueError, match="routing among 6 experts, weights of 5"):
        few = torch.arange(5)
        experts_decode(case.route(), case.w13.select(few), case.w2.select(few), limit=10.0)


@pytest.mark.parametrize("name", ["token_ids", "sequence", "bias"])
def test_what_is_not_contiguous_is_refused(name):
    case = make_case(3, by_table=name == "token_ids", padding=1)
    given = case.routing[name]
    case.routing[name] = torch.stack([given, given], 1)[:, 0]
    with pytest.raises(ValueError, match=f"{name} .* wanted contiguous"):
        case.route()


def test_padding_may_have_any_token_id():
    case = make_case(2, by_table=True, padding=1)
    before = case.run()
    case.routing["token_ids"][2] = 2**31
    assert torch.equal(case.run(), before)


def test_small_activations_keep_their_digits():
    case, small = make_case(3), make_case(3)
    small.x = (case.x * 2.0**-9).to(torch.bfloat16)
    exact = experts_reference(
        small.x.float(), dequantize_experts(case.w13), dequantize_experts(case.w2), case.route().ids.long(),
        case.route().weights, case.limit,
    )  # fmt: skip
    assert (small.run() - exact).abs().max() < 1e-3 * exact.abs().max()


@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_ranks_that_share_experts_out_add_up_to_one_with_all(tokens):
    case = make_case(tokens, padding=2)
    whole, parts = case.run(), []
    for held in (range(0, 2), range(2, 3), range(3, 6)):
        mine = torch.arange(held.start, held.stop)
        own = hold_experts(case.route(), held)
        entries = own.active[4 : 4 + 4 * int(own.active[0])].view(-1, 4)
        assert set(entries[:, 0].tolist()) <= set(range(len(held)))
        parts.append(experts_decode(own, case.w13.select(mine), case.w2.select(mine), limit=case.limit))
    assert torch.allclose(sum(parts), whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))


def test_a_routing_is_cut_once():
    own = hold_experts(make_case(3).route(), range(0, 2))
    with pytest.raises(ValueError, match="cut before"):
        hold_experts(own, range(0, 2))
