"""How experts are cut: what each way costs, and which is taken where nothing is configured."""

import msgspec
import pytest

from engine.config import EngineConfig
from engine.expert_cut import LINK, WAYS, Link, cheaper, cost_of, cost_table, shares_experts
from engine.model.published import published_config

FLASH = published_config("DeepSeek-V4-Flash-NVFP4")


def group(**settings):
    return EngineConfig(model="m", role="decode", **{"device": "cuda", "ranks": 4, **settings})


def test_both_ways_exchange_the_same_sums():
    inner, expert = (cost_of(way, FLASH, 4, tokens=16) for way in ("inner", "expert"))
    assert inner.sent_bytes == expert.sent_bytes == 2 * 3 / 4 * 16 * 4096 * 2
    assert inner.exchange_us == expert.exchange_us == pytest.approx(LINK.latency_us + inner.sent_bytes / 50e3)


def test_the_busiest_of_ranks_that_share_experts_out_reads_more_than_its_part():
    """One token takes six experts of four ranks: one and a half each, but on the busiest nearly three."""
    inner, expert = (cost_of(way, FLASH, 4, tokens=1) for way in ("inner", "expert"))
    assert expert.read_bytes / inner.read_bytes == pytest.approx(2.7 / 1.5, abs=0.15)
    # With all experts in use each rank reads a quarter, whichever way.
    inner, expert = (cost_of(way, FLASH, 4, tokens=4096) for way in ("inner", "expert"))
    assert expert.read_bytes == pytest.approx(inner.read_bytes, rel=1e-3)


def test_dispatch_moves_more_than_sums_where_every_rank_needs_every_token():
    for tokens in (1, 64, 4096):
        inner, dispatch = (cost_of(way, FLASH, 4, tokens=tokens) for way in ("inner", "dispatch"))
        assert dispatch.sent_bytes > inner.sent_bytes and dispatch.exchange_us > inner.exchange_us


def test_experts_are_cut_by_their_inner_dimension_unless_that_leaves_no_whole_tile():
    for ranks in (2, 4, 8):
        assert cheaper(FLASH, ranks, tokens=16) == "inner"
    narrow = msgspec.structs.replace(FLASH, moe_intermediate_size=128)  # of four ranks 32 channels each: half a step
    assert cheaper(narrow, 2, tokens=16) == "inner"
    assert cheaper(narrow, 4, tokens=16) == "expert"
    odd = msgspec.structs.replace(narrow, n_routed_experts=255)  # can't be shared out: dequantised
    assert cheaper(odd, 4, tokens=16) == "inner"


def test_a_slower_link_changes_nothing_since_both_pay_it():
    assert cheaper(FLASH, 4, tokens=16, link=Link(gb_per_s=1.0, latency_us=100.0)) == "inner"


def test_what_is_configured_wins():
    narrow = msgspec.structs.replace(FLASH, moe_intermediate_size=128)
    assert shares_experts(group(), narrow) and not shares_experts(group(), FLASH)
    assert shares_experts(group(expert_parallel=True), FLASH)
    assert not shares_experts(group(expert_parallel=False), narrow)
    assert not shares_experts(group(expert_parallel=True, ranks=1), FLASH)
    assert not shares_experts(group(device="cpu"), narrow)
    assert shares_experts(group(ranks=1, simulate_rank="1/4"), narrow)


def test_the_table_has_every_way_at_every_size():
    table = cost_table(FLASH, 4)
    assert [(cost.tokens, cost.way) for cost in table] == [(n, way) for n in (1, 16, 64, 4096) for way in WAYS]
