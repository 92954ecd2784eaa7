"""Pairs of launches: the order that each is given, what a pair keeps and refuses; and what the compiler makes of it."""

import re
import weakref

import pytest
import torch

from kernels import check as gate
from kernels import gemm_decode, gemm_variants
from kernels.launch_order import ASIDE, CHAIN, IN_CHAIN, LEAD, Pair

CPU = torch.device("cpu")


def lead(pair, *, reads=(), writes=()):
    assert pair.lead.take(reads=reads, writes=writes) == LEAD


def aside(pair, *, reads=(), writes=()):
    return pair.aside.take(reads=reads, writes=writes)


def test_a_launch_is_aside_of_one_that_has_led():
    pair = Pair()
    lead(pair)
    assert aside(pair) == ASIDE


def test_where_nothing_has_led_nothing_is_aside():
    assert aside(Pair()) == CHAIN


def test_a_second_launch_aside_is_in_the_chain():
    pair = Pair()
    lead(pair)
    assert [aside(pair), aside(pair)] == [ASIDE, CHAIN]


def test_a_launch_with_another_one_in_front_is_in_the_chain_and_so_is_what_follows():
    pair = Pair()
    lead(pair)
    assert pair.aside.behind() is IN_CHAIN
    assert aside(pair) == CHAIN


def test_a_lead_leads_with_another_launch_in_front_and_again():
    pair = Pair()
    lead(pair)
    assert pair.lead.behind().take(reads=(), writes=()) == LEAD
    lead(pair)
    assert aside(pair) == ASIDE


def test_what_a_lead_touches_lives_as_long_as_its_pair():
    x, out = torch.zeros(4), torch.zeros(4)
    alive = [weakref.ref(x), weakref.ref(out)]
    pair = Pair()
    lead(pair, reads=(x, None), writes=(out,))
    del x, out
    aside(pair)
    assert None not in [ref() for ref in alive]
    del pair
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"writes": "a"}, {"reads": "a"}),
        ({"writes": "a"}, {"writes": "a"}),
        ({"reads": "a"}, {"writes": "a"}),
    ],
    ids=["read what is written", "write what is written", "write what is read"],
)
def test_memory_that_both_touch_and_one_writes_is_refused(first, second):
    whole = torch.zeros(8)
    views = {"a": whole[:2]}, {"a": whole[2:]}  # not the same values, but nobody could tell
    pair = Pair()
    lead(pair, **{how: [views[0][name]] for how, name in first.items()})
    with pytest.raises(ValueError, match="a launch aside touches memory of the one that leads, at"):
        aside(pair, **{how: [views[1][name]] for how, name in second.items()})


def test_a_pair_that_takes_turns_is_in_the_chain():
    pair = Pair(takes_turns=True)
    assert [pair.lead.take(reads=(), writes=()), aside(pair)] == [CHAIN, CHAIN]


def test_both_may_read_the_same():
    x, pair = torch.zeros(4), Pair()
    lead(pair, reads=[x], writes=[torch.zeros(4)])
    assert aside(pair, reads=[x], writes=[torch.zeros(4)]) == ASIDE


def test_linear_layers_that_run_at_once_share_no_counters():
    leads, beside = (gemm_decode._counters(CPU, 1, order) for order in (LEAD, ASIDE))
    assert leads.untyped_storage().data_ptr() != beside.untyped_storage().data_ptr()
    assert gemm_decode._counters(CPU, 1, CHAIN) is leads  # these take turns


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the waits, launches and stores of a linear layer compiled in each order, as they follow in its code."""
    found = {}
    shape = (1, 1, 4096, 512, torch.float8_e4m3fn, "*bf16", "*bf16", False)
    for order in (LEAD, ASIDE):
        folder = tmp_path_factory.mktemp("dump")
        (report,) = gate.check(
            [(gemm_variants.linear_variant("sm_90", *shape, order=order), "sm_90")], cache=None, dump=folder
        )
        assert report.faults == ()
        (path,) = folder.glob("*.sass")
        found[order] = re.findall(r"\b(ACQBULK|PREEXIT|STG)\b", path.read_text())
    return found


@pytest.mark.parametrize(
    ("order", "wanted"),
    [(LEAD, ["ACQBULK", "PREEXIT", "STG"]), (ASIDE, ["PREEXIT", "STG", "ACQBULK"])],
    ids=["lead", "aside"],
)
def test_the_compiler_keeps_what_the_order_says(order, wanted, compiled):
    """ACQBULK waits for the launch before, PREEXIT lets the next one begin."""
    assert list(dict.fromkeys(compiled[order])) == wanted
    assert [compiled[order].count(what) for what in ("ACQBULK", "PREEXIT")] == [1, 1]
