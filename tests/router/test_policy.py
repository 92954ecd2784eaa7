"""The choice of a pair."""

from __future__ import annotations

from router.policy import DecodeSnapshot, PairSnapshot, PrefillSnapshot, choose


def pair(prefill="p", decode="d", *, prefills=0, tokens=0, requests=0, free=10):
    return PairSnapshot(
        PrefillSnapshot(prefill, prefills, tokens, max_num_seqs=8, max_num_batched_tokens=100),
        DecodeSnapshot(decode, requests, free),
    )


def test_nobody_without_pairs():
    assert choose([]) is None


def test_least_prompt_tokens_first_then_least_requests_then_most_room():
    busy, idle = pair("p1", tokens=50, prefills=1), pair("p2")
    assert choose([busy, idle]) is idle
    crowded, light, roomy = (
        pair(decode="d1", requests=3),
        pair(decode="d2", requests=1),
        pair(decode="d3", requests=1, free=20),
    )
    assert choose([crowded, light, roomy]) is roomy


def test_a_prefill_worker_gets_two_ahead_and_more_only_while_they_are_short():
    assert choose([pair(prefills=1, tokens=10**6)]) is not None
    assert choose([pair(prefills=2, tokens=199)]) is not None
    assert choose([pair(prefills=2, tokens=200)]) is None
    assert choose([pair(prefills=10, tokens=10)]) is None


def test_full_workers_are_left_out():
    assert choose([pair()], full={"d"}) is None
    assert choose([pair(), pair(decode="e")], full={"d"}).decode.url == "e"


def test_workers_that_failed_are_taken_last():
    assert choose([pair("p1"), pair("p2", tokens=90, prefills=1)], avoid={"p1"}).prefill.url == "p2"
    assert choose([pair("p1")], avoid={"p1"}).prefill.url == "p1"


def test_with_one_decode_worker_the_other_prefill_worker_is_tried():
    """Both workers of a failed pair are under suspicion, and one of them is in every pair."""
    pairs = [pair("p1"), pair("p2", tokens=90, prefills=1)]
    assert choose(pairs, avoid={"p1", "d"}).prefill.url == "p2"
