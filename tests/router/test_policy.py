"""The choice of a pair."""

from __future__ import annotations

import itertools

import pytest

from router.policy import DecodeSnapshot, PairSnapshot, PrefillSnapshot, choose, is_held_back

CHUNK = 100


def prefill(url="p", *prompts: int) -> PrefillSnapshot:
    return PrefillSnapshot(url, prompts, max_num_seqs=8, max_num_batched_tokens=CHUNK)


def decode(url="d", *, requests=0, free=10, seats=8) -> DecodeSnapshot:
    return DecodeSnapshot(url, requests, free, num_blocks=10, max_num_seqs=seats, block_tokens=16)


def pairs(prefills, decodes) -> list[PairSnapshot]:
    return list(itertools.starmap(PairSnapshot, itertools.product(prefills, decodes)))


def chosen(prefills, decodes, num_tokens=10, **options):
    pair = choose(pairs(prefills, decodes), num_tokens, **options)
    return None if pair is None else (pair.prefill.url, pair.decode.url)


def test_nobody_without_pairs():
    assert choose([], 1) is None
    assert not is_held_back([], 1)


def test_prefill_by_queued_tokens_and_decode_by_load_are_chosen_apart():
    prefills = [prefill("p1", 50), prefill("p2", 20, 20), prefill("p3", 60)]
    decodes = [decode("d1", requests=3), decode("d2", requests=1), decode("d3", requests=2)]
    assert chosen(prefills, decodes) == ("p2", "d2")


def test_decode_counts_what_is_scarcer_seats_or_blocks():
    few_blocks, few_seats = decode("d1", requests=1, free=3), decode("d2", requests=4)
    assert chosen([prefill()], [few_blocks, few_seats]) == ("p", "d2")
    assert chosen([prefill()], [few_blocks, decode("d2", requests=7)]) == ("p", "d1")


def test_decode_of_another_size_takes_its_share():
    assert chosen([prefill()], [decode("d1", requests=3, seats=4), decode("d2", requests=5, seats=16)]) == ("p", "d2")


def test_decode_without_blocks_for_the_prompt_is_asked_last():
    tight, busy = decode("d1", free=2), decode("d2", requests=7)
    assert chosen([prefill()], [tight, busy], 31) == ("p", "d1")  # 32 tokens with the first output: two blocks
    assert chosen([prefill()], [tight, busy], 32) == ("p", "d2")
    assert chosen([prefill()], [tight, busy], 32, full={"d2"}) == ("p", "d1")


@pytest.mark.parametrize(
    ("prompts", "num_tokens", "has_room"),
    [
        ((10**6,), 10**6, True),  # one long one ahead
        ((10**6, 10**6), 10**6, False),
        ((99, 99), 10**6, True),  # less than two chunks
        ((10**6, 10**6), 50, True),  # half a chunk: it is done in the next
        ((10**6, 10**6), 51, False),
        ((10**6, 10**6, 30), 20, True),
        ((10**6, 10**6, 30), 21, False),  # the half is taken
        ((10**6, 20, 20), 10**6, True),  # short ones don't count as long ones ahead
        ((1,) * 10, 1, False),  # seats
    ],
)
def test_room_at_prefill_is_counted_in_tokens(prompts, num_tokens, has_room):
    assert prefill("p", *prompts).has_room(num_tokens) == has_room
    assert is_held_back(pairs([prefill("p", *prompts)], [decode()]), num_tokens) != has_room


def test_short_prompt_behind_long_ones_goes_where_they_are_shortest():
    assert chosen([prefill("p1", 900, 900), prefill("p2", 300, 300)], [decode()], 40) == ("p2", "d")


def test_full_workers_are_left_out():
    assert chosen([prefill()], [decode()], full={"d"}) is None
    assert chosen([prefill()], [decode(), decode("e")], full={"d"}) == ("p", "e")
    assert not is_held_back(pairs([prefill()], [decode()]), 10)


def test_workers_that_failed_are_taken_last():
    assert chosen([prefill("p1"), prefill("p2", 90)], [decode()], avoid={"p1"}) == ("p2", "d")
    assert chosen([prefill("p1")], [decode()], avoid={"p1"}) == ("p1", "d")


def test_with_one_decode_worker_the_other_prefill_worker_is_tried():
    """Both workers of a failed pair are under suspicion, and one of them is in every pair."""
    assert chosen([prefill("p1"), prefill("p2", 90)], [decode()], avoid={"p1", "d"}) == ("p2", "d")


def test_requests_that_come_one_after_the_other_are_spread_evenly():
    given: dict[str, list[int]] = {"p1": [], "p2": [], "p3": []}
    running = {"d1": 0, "d2": 0}
    for _ in range(6):
        p, d = chosen([prefill(u, *g) for u, g in given.items()], [decode(u, requests=n) for u, n in running.items()])
        given[p].append(10)
        running[d] += 1
    assert {u: len(g) for u, g in given.items()} == {"p1": 2, "p2": 2, "p3": 2}
    assert running == {"d1": 3, "d2": 3}
