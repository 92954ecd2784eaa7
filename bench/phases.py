"""Ramp, steady state and drain of a run, found from its streams.

A stream decodes from the step that makes its second chunk to its last chunk: a first token may come from elsewhere, and
its stream then wait for a place in the batch. In a run of C streams at a time:

    steady     all C decode and none waits; one window or several. Their first step is left out,
               since what a prefill did to it shows there. When C is never reached for long, the most streams that the
               server does decode at once for a good part of the run; `level` says how many that is.
    ramp       before the first of these windows: prompts are computed, some streams decode
    refill     between the windows: streams end and others take their places
    drain      from the first end of a stream that nothing replaced
    sustained  steady and refill together: what C users get who always have something to ask

An open loop has no C. Its sustained part begins when as many streams are under way as later on in the middle, and ends
with the last request; it is its steady state too, if the number under way does not go on growing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.stream import Stream

Window = tuple[float, float]

MIN_STEPS = 16  # of steady state, in all windows together: below that, one step more or less is too much
_MIN_STEPS_A_WINDOW = 4
_MIN_SHARE_BELOW = 0.25  # of the time with any decoding, for a level below C
_MAX_ABOVE = 1.5  # times a level below C that decode on average there: more is a ramp and no level
_MIN_REQUESTS = 16  # of an open loop
_GROWTH = 1.5  # from the second quarter to the last: more is no steady state


@dataclass(frozen=True, slots=True)
class Phases:
    """begin, end: first request due and last stream ended.   steady: empty if none was found, and `problem` says why.

    level: how many streams decode in the steady windows, at least.
    """

    begin: float
    end: float
    steady: tuple[Window, ...]
    sustained: Window | None
    level: int
    problem: str

    @property
    def steady_s(self) -> float:
        return sum(end - begin for begin, end in self.steady)

    def spans(self) -> list[tuple[str, float, float]]:
        """Return all of the run, in order, as named spans."""
        if self.sustained is None:
            return [("ramp", self.begin, self.end)]
        first, last = self.sustained
        spans = [("ramp", self.begin, first)]
        at = first
        for begin, end in self.steady:
            spans += [("refill", at, begin)] if begin > at else []
            spans.append(("steady", begin, end))
            at = end
        spans += [("refill", at, last)] if last > at else []
        return [*spans, ("drain", last, self.end)]


class Occupancy:
    """How many of some intervals hold a moment: a step function of time."""

    def __init__(self, begins: Sequence[float], ends: Sequence[float]) -> None:
        moments = np.concatenate([np.asarray(begins, float), np.asarray(ends, float)])
        changes = np.concatenate([np.ones(len(begins), int), -np.ones(len(ends), int)])
        order = np.lexsort((changes, moments))  # at one moment, ends come before begins
        self.moments: NDArray[np.float64] = moments[order]
        self.values: NDArray[np.int64] = np.cumsum(changes[order])

    def at(self, moment: float | NDArray[np.float64]) -> NDArray[np.int64]:
        where = np.searchsorted(self.moments, moment, side="right") - 1
        return np.where(where >= 0, self.values[where], 0)

    def windows(self, level: int) -> list[Window]:
        """Return the maximal intervals with at least `level`."""
        if not len(self.values):
            return []
        above = self.values >= level
        flips = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(int)))
        pairs = [(self.moments[a], self.moments[min(b, len(self.moments) - 1)]) for a, b in flips.reshape(-1, 2)]
        return [(float(begin), float(end)) for begin, end in pairs if end > begin]

    def mean(self, begin: float, end: float) -> float:
        """Return the average over time."""
        edges = np.unique(np.clip(np.concatenate([[begin], self.moments, [end]]), begin, end))
        return float(np.sum(self.at(edges[:-1]) * np.diff(edges)) / (end - begin)) if end > begin else math.nan


def decoding(streams: Sequence[Stream]) -> Occupancy:
    seen = [stream for stream in streams if stream.times]
    return Occupancy([stream.joined for stream in seen], [stream.times[-1] for stream in seen])


def under_way(streams: Sequence[Stream]) -> Occupancy:
    return Occupancy([stream.sent for stream in streams], [stream.ended for stream in streams])


def waiting(streams: Sequence[Stream]) -> Occupancy:
    """Streams that are sent and don't decode yet, with a first token or without."""
    return Occupancy(
        [stream.sent for stream in streams], [stream.joined if stream.times else stream.ended for stream in streams]
    )


def find_phases(streams: Sequence[Stream], *, concurrency: int | None) -> Phases:
    """Find the phases of one run, closed (with its concurrency) or open (None). Streams never sent must be left out."""
    begin = min((stream.due for stream in streams), default=0.0)
    end = max((stream.ended for stream in streams), default=begin)
    gaps = np.concatenate([np.diff(stream.times) for stream in streams] or [np.empty(0)])
    gaps = gaps[gaps > 0]
    if not len(gaps):
        return Phases(begin, end, (), None, 0, "no stream brought tokens at two different moments")
    if concurrency is None:
        return _of_open_loop(streams, begin, end)
    step = float(np.median(gaps))
    occupancy = decoding(streams)
    decoded_s = sum(b - a for a, b in occupancy.windows(1))
    for level in range(min(concurrency, int(occupancy.values.max())), 0, -1):
        windows = _settled(occupancy.windows(level), streams, step)
        total = sum(b - a for a, b in windows)
        if total < MIN_STEPS * step:
            continue
        mean = sum(occupancy.mean(a, b) * (b - a) for a, b in windows) / total
        is_level = total >= _MIN_SHARE_BELOW * decoded_s and mean <= _MAX_ABOVE * level + 1
        if level == concurrency or is_level:
            drain = max(windows[-1][1], _first_unreplaced_end(streams))
            return Phases(begin, end, tuple(windows), (windows[0][0], min(drain, end)), level, "")
    return Phases(begin, end, (), None, 0, f"fewer than {MIN_STEPS} steps in a row with as many streams decoding")


def _settled(windows: Sequence[Window], streams: Sequence[Stream], step: float) -> list[Window]:
    """Begin each window when its streams have had a token since; drop those that are too short then."""
    kept = []
    seen = [(stream.joined, stream.times) for stream in streams if stream.times]
    for begin, end in windows:
        if end - begin < _MIN_STEPS_A_WINDOW * step:
            continue
        nexts = [times[bisect.bisect_right(times, begin)] for joined, times in seen if joined <= begin < times[-1]]
        # not the very last: one stream that stalls must not hide the state of all others
        settled = float(np.quantile(nexts, 0.95)) if nexts else begin
        if end - settled >= _MIN_STEPS_A_WINDOW * step:
            kept.append((settled, end))
    return kept


def _first_unreplaced_end(streams: Sequence[Stream]) -> float:
    last_sent = max(stream.sent for stream in streams)
    return min((stream.ended for stream in streams if stream.ended >= last_sent), default=last_sent)


def _of_open_loop(streams: Sequence[Stream], begin: float, end: float) -> Phases:
    flow = under_way(streams)
    last_sent = max(stream.sent for stream in streams)
    middle = (begin + last_sent) / 2
    samples = np.linspace(middle, last_sent, 200)
    level = int(np.median(flow.at(samples)))
    if len(streams) < _MIN_REQUESTS:
        return Phases(begin, end, (), None, level, f"{len(streams)} requests are too few: {_MIN_REQUESTS} are needed")
    reached = flow.moments[flow.values >= max(1, level)]
    first = float(reached[0]) if len(reached) else begin
    if last_sent - first < 0.2 * (last_sent - begin) or last_sent <= first:
        return Phases(begin, end, (), None, level, "the number of streams under way never settled")
    quarter = (last_sent - begin) / 4
    early, late = flow.mean(begin + quarter, middle), flow.mean(last_sent - quarter, last_sent)
    if late > _GROWTH * early + 2:
        problem = (
            f"streams under way grow on, from {early:.0f} to {late:.0f}: the rate is more than the server can do, "
            "or the run is too short"
        )
        return Phases(begin, end, (), (first, last_sent), level, problem)
    return Phases(begin, end, ((first, last_sent),), (first, last_sent), level, "")
