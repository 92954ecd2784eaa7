"""How sequences share steps: who overtakes whom, and that nobody starves. Plain integers."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.shares import share

LONG = 128 << 10
LEFTS = st.lists(st.integers(1, 50_000), max_size=12)
simulated = settings(max_examples=25, deadline=None)


def ends(left: list[int], budget: int, *, later: tuple[int, ...] = ()) -> list[int]:
    """Return in which step each sequence ends; one of each of `later` comes with every step."""
    left, done = list(left), [0] * len(left)
    count, step = len(left), 0
    while any(left[:count]):
        step += 1
        left += later
        active = [i for i, most in enumerate(left) if most]
        for i, given_ in zip(active, share([left[i] for i in active], budget), strict=True):
            left[i] -= given_
            if i < count and not left[i]:
                done[i] = step
    return done


@pytest.mark.parametrize(
    ("left", "budget", "wanted"),
    [
        pytest.param([LONG], 4096, [4096], id="alone"),
        pytest.param([LONG, 100], 4096, [3996, 100], id="a short one overtakes"),
        pytest.param([LONG, LONG], 4096, [4096, 0], id="as long as the other: in turn"),
        pytest.param([LONG, 50_000], 4096, [2048, 2048], id="half as long: evenly"),
        pytest.param([LONG, 9_000, 100], 4096, [2048, 1948, 100], id="each level keeps half"),
        pytest.param([LONG] + [100] * 60, 4096, [2048] + [100] * 20 + [48] + [0] * 39, id="many short ones"),
        pytest.param([30, 4000, 20, 900], 1000, [30, 485, 20, 465], id="those behind share in the same way"),
        pytest.param([10, 20, 30], 100, [10, 20, 30], id="room for all"),
        pytest.param([5, 5], 1, [1, 0], id="one token"),
        pytest.param([], 10, [], id="nobody"),
    ],
)
def test_shares_of_one_step(left: list[int], budget: int, wanted: list[int]) -> None:
    assert share(left, budget) == wanted


@given(LEFTS, st.integers(1, 10_000))
def test_a_step_is_full_and_nobody_runs_more_than_it_has(left: list[int], budget: int) -> None:
    found = share(left, budget)
    assert sum(found) == min(budget, sum(left))
    assert all(0 <= n <= most for n, most in zip(found, left, strict=True))


@given(LEFTS.filter(bool), st.integers(1, 10_000))
def test_the_oldest_has_half_of_every_step(left: list[int], budget: int) -> None:
    assert share(left, budget)[0] >= min(left[0], budget - budget // 2)


@given(LEFTS, st.integers(1, 50_000), st.integers(16, 10_000))
def test_who_comes_later_takes_half_at_most_from_those_before(left: list[int], newcomer: int, budget: int) -> None:
    before, after = share(left, budget), share([*left, newcomer], budget)
    assert all(a <= b for a, b in zip(after, before, strict=False))
    if left and 2 * newcomer > left[0]:
        assert after[0] == before[0]
    assert after[:1] >= [b // 2 for b in before[:1]]


@simulated
@given(st.lists(st.integers(400, LONG), max_size=6))
def test_a_short_one_behind_longer_ones_is_done_in_one_step(longer: list[int]) -> None:
    """100 tokens: 400, 800, .. 102,400 make nine levels at most, with 4,096 / 2^10 tokens for the last one and more."""
    assert ends([*longer, 100], 1 << 17)[-1] == 1
    alone = ends([LONG, 100], 4096)
    assert alone[-1] == 1


@simulated
@given(st.integers(1, 5_000), st.integers(1, 500), st.integers(256, 4096))
def test_a_stream_of_short_ones_doubles_the_time_of_a_long_one_at_most(long: int, short: int, budget: int) -> None:
    assert ends([long], budget, later=(short,))[0] <= math.ceil(2 * long / budget) + 1


@simulated
@given(st.integers(50, 400), st.integers(1, 50), st.integers(64, 512))
def test_a_stream_of_shorter_ones_does_not_starve_a_short_one_behind_a_long_one(
    short: int, shorter: int, budget: int
) -> None:
    left = [20_000, short]
    for step in range(math.ceil(4 * short / budget) + 2):
        given_ = share([*left, *[shorter] * 3 * (step + 1)], budget)
        left = [most - n for most, n in zip(left, given_, strict=False)]
        if not left[1]:
            return
    raise AssertionError(f"{left[1]} of {short} tokens are left")


@simulated
@given(st.integers(100, 1000), st.integers(2, 6), st.integers(16, 300))
def test_those_of_one_length_are_done_in_their_order(length: int, count: int, budget: int) -> None:
    done = ends([length] * count, budget)
    assert done == [math.ceil(length * (i + 1) / budget) for i in range(count)]


@pytest.mark.parametrize(
    "left",
    [
        pytest.param([1] * 2000, id="all of one length"),
        pytest.param([LONG] * 1000 + [1] * 1000, id="short ones behind long ones"),
        pytest.param(list(range(10, 2010)), id="ever longer"),
    ],
)
def test_many_that_wait_cost_a_few_looks_each(left: list[int]) -> None:
    class Counted(list[int]):
        looks = 0

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            Counted.looks += 1
            return super().__getitem__(index)

    share(Counted(left), 4096)
    assert Counted.looks < 10 * len(left)
