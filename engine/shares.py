"""How sequences share the tokens of a step: old ones go on, and short ones need not wait for long ones.

A sequence that has at most half as much left as an older one overtakes it. With s and l tokens left they end after s
and l + s tokens then, or at 2 s and l + s if the older one gets half of each step meanwhile, as it does; if the shorter
one waited, after l + s and l. Half is where the first sum stops being less than the second.

    oldest      half of the step, all of it if nobody overtakes; and what those who do leave over
    who overtakes it    the other half, shared among them in the same way
    all others          what is left then, in the same way

So nobody starves: the oldest is done in twice its own time, whatever comes after it, then the next is the oldest. And a
short one behind any number of long ones has its share of each step: of l tokens and s, the log2(l / s)th half at least
of what the oldest as short as itself leaves it. Those of about one length are done one by one, in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def share(left: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens of a step of at most `budget` each sequence runs; all of them, if there is room.

    left: tokens that each has left, oldest first.
    """
    shares = [0] * len(left)
    _share(left, range(len(left)), budget, shares)
    return shares


def _share(left: Sequence[int], among: Sequence[int], budget: int, shares: list[int]) -> int:
    """Set the shares of `among`, some of the sequences, in order; return what nobody needs of the budget."""
    first, shortest = 0, _shortest_from(left, among)
    while first < len(among) and budget:
        oldest = among[first]
        if 2 * shortest[first] > left[oldest]:  # nobody overtakes it; not asked of each, which would be quadratic
            shares[oldest] = min(left[oldest], budget)
            budget -= shares[oldest]
            first += 1
            continue
        others = among[first + 1 :]
        own = min(left[oldest], budget - budget // 2)
        rest = _share(left, [i for i in others if 2 * left[i] <= left[oldest]], budget - own, shares)
        shares[oldest] = min(left[oldest], own + rest)
        budget = own + rest - shares[oldest]
        among = [i for i in others if 2 * left[i] > left[oldest]]
        first, shortest = 0, _shortest_from(left, among)
    return budget


def _shortest_from(left: Sequence[int], among: Sequence[int]) -> list[int]:
    """Return of each place in `among` the least that anybody from there on has left."""
    return list(itertools.accumulate((left[i] for i in reversed(among)), min))[::-1]
