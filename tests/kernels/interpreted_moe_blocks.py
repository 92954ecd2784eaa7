"""Routing whose rows are sorted and the products of blocks against their torch references, with blocks made small.

What the wrappers allocate is NaN to begin with.
"""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.moe_blocks as blocks
import kernels.moe_decode as decode
import kernels.moe_gate as gate
import kernels.moe_routing as routing
from kernels.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")


def _cases(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases, gate_cases = _cases("moe_cases"), _cases("moe_gate_cases")
make_case = cases.make_case


def tile(w=4, r=1, nb=4, s=1, ahead=1, stages=1):
    constants = {"W": w, "R": r, "NB": nb, "S": s, "AHEAD": ahead, "REGISTERS": 0}
    return Tile(constants, num_warps=w, num_stages=stages)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    """More than 4 tokens are sorted, 8 rows are a block, and what is allocated is NaN."""
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        if x.device.type == "meta":
            return x
        return x.fill_(math.nan) if x.dtype.is_floating_point else x.fill_(-(2**30))

    monkeypatch.setattr(torch, "empty", empty)
    for module, name, value in (
        (routing, "SORTED", 4), (gate, "SORTED", 4), (routing, "BLOCK_ROWS", 8), (blocks, "BLOCK_ROWS", 8),
        (routing, "_SORTED_AT_ONCE", 8), (blocks, "tile_for", lambda op, arch: tile()),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("formats", [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "nvfp4")], ids="-".join)
def test_every_format_and_a_mixture_equal_the_reference(formats):
    assert make_case(5, formats=formats, padding=1, experts=3).fault() == ""


@pytest.mark.parametrize(("tokens", "by_table"), [(5, True), (12, False)])
def test_routing_of_any_number_of_tokens(tokens, by_table):
    case = make_case(tokens, by_table=by_table, padding=tokens % 4, experts=20, top_k=6)
    assert cases.routing_fault(case.route(), case.expect_routing()) == ""


def test_an_expert_with_many_rows_has_many_blocks():
    case = make_case(17, same=True, experts=3, top_k=1)
    entries = case.route().active
    assert int(entries[0]) == 3
    assert entries[4:16].view(3, 4)[:, :3].tolist() == [[1, 0, 8], [1, 8, 8], [1, 16, 1]]
    assert case.fault() == ""


@pytest.mark.parametrize("design", [tile(nb=16), tile(w=2, r=2, nb=8, s=2, ahead=2)])
def test_blocks_of_any_size_however_they_are_cut(design, monkeypatch):
    """Blocks of 66, of 33 and of 2 rows: a product of their own each, or several."""
    for module in (routing, blocks):
        monkeypatch.setattr(module, "BLOCK_ROWS", 128)
    case = make_case(101, experts=3, top_k=1, hidden=256 if design.constants["S"] > 1 else 64, bias=False)
    case.scores.copy_(torch.eye(3)[[0] * 66 + [1] * 33 + [2] * 2] + 0.1)
    routed = case.expect_routing()
    between = blocks.first_products(routed, case.w13, limit=10.0, lift=1.0, tile=design)
    got = blocks.last_product(routed, between, case.w2, unlift=1.0, tile=design)
    wanted = decode.expert_parts_reference(routed, case.w13, case.w2, limit=10.0).parts
    assert (got - wanted).abs().max() < 2e-3 * wanted.abs().max()


def test_a_share_of_the_channels_at_a_time_gives_the_same_bits(monkeypatch):
    case = make_case(5, hidden=256, experts=2, top_k=1, padding=1)
    add = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    whole = decode.add_up(decode.expert_parts(case.route(), case.w13, case.w2, limit=10.0, add=add))
    monkeypatch.setattr(blocks, "channels_at_once", lambda rows, hidden, most: 128)
    assert torch.equal(case.run(add=add, out_dtype=torch.bfloat16), whole.to(torch.bfloat16))
    assert torch.equal(whole[5], add[5])


def test_padding_tokens_may_hold_anything():
    case = make_case(5, padding=2, by_table=True, experts=3)
    before = case.run()
    case.x[5:] = math.nan
    case.scores[5:] = math.nan
    case.routing["token_ids"][5:] = 10**9
    assert torch.equal(case.run(), before)
    assert bool((before[5:] == 0).all())


def test_only_padding():
    case = make_case(0, padding=6)
    assert bool((case.run() == 0).all())
    assert int(case.route().active[0]) == 0


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_an_activation_that_f16_can_not_hold_makes_its_token_nan_and_no_other(value):
    case = make_case(5, same=True, top_k=1, experts=2)
    before = case.run()
    case.x[1, 5] = value
    after = case.run()
    assert bool(after[1].isnan().all())
    assert torch.equal(after[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_an_expert_that_the_table_invents_makes_its_token_nan_and_no_other():
    case = make_case(5, by_table=True, experts=3)
    case.routing["token_ids"].copy_(torch.tensor([1, 2, 3, 4, 5]))
    before = case.run()
    case.routing["table"][2, 1] = 3
    after = case.run()
    assert bool(after[1].isnan().all())
    assert torch.equal(after[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_a_tables_row_may_name_an_expert_twice():
    case = make_case(5, by_table=True, experts=3)
    case.routing["table"][:] = torch.tensor([2, 2])
    assert case.fault() == ""


@pytest.mark.parametrize("by_table", [False, True])
def test_a_gate_in_front_of_it(by_table):
    assert gate_cases.make_case(5, by_table=by_table, padding=1, hidden=64).fault() == ""
