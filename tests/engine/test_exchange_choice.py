"""Which way sums over ranks go, decided from times: figures here are made up."""

import pytest

from engine.exchange_choice import ONE_SHOT, SIZES, Choice, choose, describe
from kernels.one_shot import CAPACITY_BYTES


def line(latency, gb_per_s, sizes=SIZES):
    """Return times of a way: a latency, and bytes over a rate."""
    return {size: latency + size / gb_per_s / 1e3 for size in sizes}


SMALL = tuple(size for size in SIZES if size <= CAPACITY_BYTES)


def test_one_shot_sums_are_taken_up_to_where_another_way_is_faster():
    timings = {"auto": line(20, 30), ONE_SHOT: line(8, 12, SMALL)}
    assert choose(timings) == Choice(128 << 10, "auto", "auto", 0)
    assert choose({**timings, ONE_SHOT: line(25, 12, SMALL)}).one_shot_bytes == 0
    assert choose({**timings, ONE_SHOT: line(1, 100, SMALL)}).one_shot_bytes == SMALL[-1]


def test_a_way_that_is_fast_again_after_it_was_not_is_not_taken_there():
    one_shot = {**line(8, 12, SMALL), 32 << 10: 1000.0}
    assert choose({"auto": line(20, 30), ONE_SHOT: one_shot}).one_shot_bytes == 8 << 10


def test_no_one_shot_sums_where_there_are_none():
    assert choose({"auto": line(20, 30)}).one_shot_bytes == 0


def test_small_and_large_sums_may_take_different_settings():
    choice = choose({"auto": line(40, 30), "LL, Ring": line(10, 10), "Simple, Ring": line(40, 40)})
    assert (choice.small, choice.large) == ("LL, Ring", "Simple, Ring")
    # 512 KiB take 62 and 53 us, 128 KiB 23 and 43.
    assert choice.large_bytes == 512 << 10


def test_settings_that_gain_little_are_not_worth_a_communicator():
    choice = choose({"auto": line(20, 30), "Simple, Ring": line(20.2, 30.5)})
    assert choice.small == choice.large and choice.large_bytes == 0


def test_one_way_that_is_best_throughout_serves_alone():
    choice = choose({"auto": line(20, 30), "LL, Ring": line(10, 60)})
    assert choice == Choice(0, "LL, Ring", "LL, Ring", 0)


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="no settings of NCCL were measured"):
        choose({ONE_SHOT: line(1, 1, SMALL)})


def test_the_choice_is_told_in_words():
    assert describe(Choice(128 << 10, "LL, Ring", "auto", 2 << 20)) == (
        "one-shot up to 128 KiB; NCCL LL, Ring below 2048 KiB, auto from there on"
    )
    assert describe(Choice(0, "auto", "auto", 0)) == "no one-shot sums; NCCL auto"


def test_one_shot_sums_that_are_asked_for_are_made_at_every_size_they_have_room_for():
    timings = {"auto": line(20, 30), ONE_SHOT: line(25, 12, SMALL)}
    assert choose(timings, asked="one-shot") == Choice(CAPACITY_BYTES, "auto", "auto", 0)
    with pytest.raises(ValueError, match="all_reduce = 'one-shot': no one-shot sums were measured"):
        choose({"auto": line(20, 30)}, asked="one-shot")


def test_nccl_that_is_asked_for_leaves_faster_one_shot_sums_alone():
    assert choose({"auto": line(20, 30), ONE_SHOT: line(1, 100, SMALL)}, asked="nccl").one_shot_bytes == 0
