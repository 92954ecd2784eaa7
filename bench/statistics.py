"""Rates of tokens over time, percentiles, and intervals by bootstrap.

Tokens are spread over the time in which they were made: a chunk's over the gap before it. A window then holds exactly
its part, wherever its edges fall between two steps. The first chunk of a stream counts at its moment, since the time
before it went into the prompt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.phases import Window
from bench.stream import Stream

Floats = NDArray[np.float64]

SEED = 20_240_613
NUM_RESAMPLES = 1_000
CONFIDENCE = 0.95
_MAX_SLICES = 60
_MIN_STEPS_A_SLICE = 4
PERCENTILES = (50, 90, 99)


class Production:
    """Tokens that streams brought up to a moment."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._curves: list[tuple[Floats, Floats]] = []
        for stream in streams:
            if stream.times:
                times, counts = np.asarray(stream.times), np.asarray(stream.counts, float)
                # chunks that were read at one moment: only the last sum is reached there
                last = np.append(np.diff(times) > 0, True)
                self._curves.append((times[last], np.cumsum(counts)[last]))

    def up_to(self, moments: Floats) -> Floats:
        total = np.zeros(len(moments))
        for times, sums in self._curves:
            total += np.interp(moments, times, sums, left=0.0)
        return total

    def tokens(self, begin: float, end: float) -> float:
        before, after = self.up_to(np.array([begin, end]))
        return float(after - before)

    def rates(self, edges: Floats) -> Floats:
        """Return tokens a second between each two edges."""
        return np.asarray(np.diff(self.up_to(edges)) / np.diff(edges))


def slices(windows: Sequence[Window], *, step: float) -> list[Window]:
    """Cut windows into pieces of some steps each: the units of a bootstrap, since streams share their steps."""
    total = sum(end - begin for begin, end in windows)
    length = max(total / _MAX_SLICES, _MIN_STEPS_A_SLICE * step)
    pieces: list[Window] = []
    for begin, end in windows:
        num = max(1, math.floor((end - begin) / length))
        edges = np.linspace(begin, end, num + 1)
        pieces += [(float(a), float(b)) for a, b in itertools.pairwise(edges)]
    return pieces


def percentiles(values: Sequence[float] | Floats) -> dict[str, float | int | None]:
    """Return mean, percentiles and number of what is not NaN; None for what there is none of."""
    array = np.asarray(values, float)
    array = array[~np.isnan(array)]
    result: dict[str, float | int | None] = {"count": len(array)}
    result["mean"] = float(array.mean()) if len(array) else None
    for percentile in PERCENTILES:
        result[f"p{percentile}"] = float(np.percentile(array, percentile)) if len(array) else None
    return result


def bootstrap(
    groups: Sequence[Floats], statistic: Callable[[Floats], float], *, num_resamples: int = NUM_RESAMPLES
) -> Floats:
    """Return `statistic` of resamples with replacement: of the groups, if there are several, and of each one's rows.

    groups: one array a run; its rows are the units. The seed is fixed: the same data give the same interval.
    """
    rng = np.random.default_rng(SEED)
    results = np.empty(num_resamples)
    for at in range(num_resamples):
        chosen = rng.integers(len(groups), size=len(groups)) if len(groups) > 1 else [0]
        rows = [groups[group][rng.integers(len(groups[group]), size=len(groups[group]))] for group in chosen]
        results[at] = statistic(np.concatenate(rows))
    return results


def interval(values: Floats) -> tuple[float, float] | None:
    """Return the middle 95 % of a bootstrap."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def rate_of(rows: Floats) -> float:
    """Return the rate of rows of (tokens, seconds)."""
    return float(rows[:, 0].sum() / rows[:, 1].sum())
