"""How long a decode step takes with N streams in it, from the gaps between their tokens.

Two forms. `a + b N`: each sequence adds the same, on top of what a step costs anyway. `a + c U(N) + d N`: a mixture of
experts reads every expert that any of N tokens chose, U(N) = E (1 - (1 - k/E)^N) of E if each token takes k at random.
Which of the two holds is decided by leaving one N out and predicting it from the others.

A gap counts if the same N streams decoded all through it and through the one before: a stream that joins brings its
prefill or its transfer into that step. Gaps in which no prompt waited are preferred, since on servers that compute
prompts and tokens with the same GPU they are the only ones that show decode alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.phases import decoding, waiting
from bench.stream import Stream

_MAX_WEIGHT_STEPS = 100  # more steps than that at one N say nothing new beside other Ns
_SURE_STEPS = 4  # fewer at one N, as in a quick drain, are left out unless there is nothing else
_MIN_SPREAD = 1.5  # largest N over smallest: below that a line through the points is a guess
_HOLDS = 0.1  # error at points left out, beyond which a form is not called a description
_INNER = (0.3, 0.7)  # of a gap: ends of streams fall on its edges, a little before or after

_BLOCK = 8  # gaps whose mean is one sample: what comes late makes the next gap shorter, timers tick in milliseconds

Samples = dict[int, list[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class Experts:
    """total, chosen: routed experts of a layer and how many each token takes. DeepSeek-V4-Flash: 256 and 6."""

    total: int = 256
    chosen: int = 6

    def distinct(self, num_streams: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(self.total * (1 - (1 - self.chosen / self.total) ** num_streams))


@dataclass(frozen=True, slots=True)
class Point:
    """step_s: median of means of blocks of gaps, so that neither ticks of timers nor a few stalls show in it.

    num_steps: seen, on average over the streams in them.
    """

    num_streams: int
    step_s: float
    num_steps: float


@dataclass(frozen=True, slots=True)
class Fit:
    """terms: coefficients in seconds, none negative.   left_out: relative error of each point predicted without it."""

    form: str
    terms: dict[str, float]
    step_s: Callable[[float], float]
    left_out: tuple[float, ...]

    @property
    def error(self) -> float:
        """Return the root mean square of left_out; infinity if there was nothing to leave out."""
        return float(np.sqrt(np.mean(np.square(self.left_out)))) if self.left_out else float("inf")


def sample(streams: Sequence[Stream], *, with_waiting: bool) -> Samples:
    """Return means of clean gaps in seconds, and of how many, by the number of streams that decoded."""
    samples: Samples = defaultdict(list)
    occupancy, prompts = decoding(streams), waiting(streams)
    starts = np.sort([stream.joined for stream in streams if stream.times])
    for stream in streams:
        times = np.unique(stream.times)
        if len(times) < 3:
            continue
        before, begin, end = times[:-2], times[1:-1], times[2:]
        gap = end - begin
        early, late = (occupancy.at(begin + part * gap) for part in _INNER)
        joined = np.searchsorted(starts, end, side="right") - np.searchsorted(starts, before, side="right")
        is_clean = (early == late) & (joined == 0)
        if not with_waiting:
            is_clean &= prompts.at(begin + gap / 2) == 0
        keys = np.where(is_clean, early, 0)
        edges = np.flatnonzero(np.diff(keys)) + 1
        for first, last in itertools.pairwise([0, *edges.tolist(), len(keys)]):
            if keys[first] == 0:
                continue
            for at in range(first, last, _BLOCK):
                block = gap[at : min(at + _BLOCK, last)]
                samples[int(keys[first])].append((float(block.mean()), len(block)))
    return samples


def points_of(runs: Iterable[Samples]) -> list[Point]:
    """Merge the samples of several runs."""
    merged: Samples = defaultdict(list)
    for samples in runs:
        for num_streams, blocks in samples.items():
            merged[num_streams] += blocks
    points = [
        Point(n, _weighted_median(blocks), sum(count for _, count in blocks) / n)
        for n, blocks in sorted(merged.items())
    ]
    sure = [point for point in points if point.num_steps >= _SURE_STEPS]
    return sure if len(sure) >= 2 else points


def _weighted_median(blocks: Sequence[tuple[float, int]]) -> float:
    values, weights = np.array(sorted(blocks), float).T
    sums = np.cumsum(weights) - weights / 2
    return float(np.interp(sums[-1] / 2 + weights[-1] / 4, sums, values))


class StepLaw:
    """Both forms through the same points. Raises ValueError if the points say too little, and why."""

    def __init__(self, points: Sequence[Point], *, experts: Experts) -> None:
        if len(points) < 2 or points[-1].num_streams < _MIN_SPREAD * points[0].num_streams:
            seen = ", ".join(str(point.num_streams) for point in points) or "none"
            raise ValueError(
                f"streams decoding together: {seen}; two numbers far apart are needed: add to --concurrency"
            )
        self.points = list(points)
        self.line = _fit("a + b N", "ab", points, lambda n: np.stack([np.ones_like(n), n], axis=1))
        self.expert_form = (
            _fit(
                "a + c U(N) + d N", "acd", points, lambda n: np.stack([np.ones_like(n), experts.distinct(n), n], axis=1)
            )
            if len(points) >= 4
            else None
        )
        self._experts = experts

    @property
    def better(self) -> Fit:
        """The form that predicts what it has not seen; the line if that can't be told."""
        other = self.expert_form
        return other if other is not None and other.error < self.line.error else self.line

    @property
    def verdict(self) -> str:
        if self.expert_form is None or not self.expert_form.left_out:
            return "too few different numbers of streams to tell the two forms apart"
        if min(self.line.error, self.expert_form.error) > _HOLDS:
            return (
                f"neither form describes these steps: {self.line.error:.0%} and {self.expert_form.error:.0%} off at "
                "points left out"
            )
        errors = f"{self.line.error:.1%} against {self.expert_form.error:.1%} off at points left out"
        return (
            f"{self.better.form} holds better: a + b N {errors}"
            if self.line.error > 0.002
            else f"a + b N holds ({errors})"
        )

    def predict(self, num_streams: int) -> dict[str, Any]:
        step_s = self.better.step_s(num_streams)
        return {
            "concurrency": num_streams,
            "form": self.better.form,
            "step_ms": step_s * 1000,
            "output_tokens_per_s": num_streams / step_s if step_s > 0 else None,
        }

    def to_json(self, next_concurrency: int) -> dict[str, Any]:
        def fields(fit: Fit) -> dict[str, Any]:
            values = {f"{name}_ms": value * 1000 for name, value in fit.terms.items()}
            residuals = [point.step_s / fit.step_s(point.num_streams) - 1 for point in self.points]
            return values | {
                "form": fit.form,
                "max_residual": max(map(abs, residuals)),
                "residuals": residuals,
                "left_out_error": fit.error if fit.left_out else None,
            }

        return fields(self.line) | {
            "experts": None
            if self.expert_form is None
            else fields(self.expert_form) | {"total": self._experts.total, "chosen": self._experts.chosen},
            "points": [
                {"streams": point.num_streams, "step_ms": point.step_s * 1000, "steps": point.num_steps}
                for point in self.points
            ],
            "verdict": self.verdict,
            "prediction": self.predict(next_concurrency),
        }


def _fit(
    form: str,
    names: str,
    points: Sequence[Point],
    columns: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    leaves_out: bool = True,
) -> Fit:
    n = np.array([float(point.num_streams) for point in points])
    steps = np.array([point.step_s for point in points])
    # a relative error of one per cent counts the same at any N; more steps make a point surer, up to a limit
    weights = np.sqrt(np.minimum([point.num_steps for point in points], _MAX_WEIGHT_STEPS)) / steps
    terms = _non_negative(columns(n) * weights[:, None], steps * weights)

    def step_s(num_streams: float) -> float:
        return float((columns(np.array([float(num_streams)])) @ terms)[0])

    left_out = []
    if leaves_out and len(points) > len(names) + 1:
        for at, point in enumerate(points):
            rest = [*points[:at], *points[at + 1 :]]
            fit = _fit(form, names, rest, columns, leaves_out=False)
            left_out.append(fit.step_s(point.num_streams) / point.step_s - 1)
    return Fit(form, dict(zip(names, map(float, terms), strict=True)), step_s, tuple(left_out))


def _non_negative(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least-squares solution without negative terms: the best of all choices of terms that are zero."""
    num = matrix.shape[1]
    best, best_error = np.zeros(num), float("inf")
    for size in range(1, num + 1):
        for kept in itertools.combinations(range(num), size):
            solution, *_ = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)
            error = float(np.sum((matrix[:, kept] @ solution - wanted) ** 2))
            if np.all(solution >= 0) and error < best_error:
                best, best_error = np.zeros(num), error
                best[list(kept)] = solution
    return best
