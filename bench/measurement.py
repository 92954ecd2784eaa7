"""One run's log as figures: what the JSON shows and everything else is drawn from."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.grouping import Grouping, find_grouping
from bench.load import RunLog
from bench.phases import Phases, Window, decoding, find_phases, waiting
from bench.slo import Slo
from bench.statistics import Floats, Production, bootstrap, interval, percentiles, rate_of, slices
from bench.step_law import Samples, sample
from bench.stream import Outcome, Stream
from kernels.table import counted

_TIMELINE_BINS = 240
_HELD = 4.0  # times a stream's own pace: a second token that late, in a quarter of the streams, is worth a note
_SKETCH = 41  # quantiles that stand for the gaps of one slice, for comparisons later


class Measurement:
    """Figures of one run. `figures` is its entry in the JSON's `runs`; times are milliseconds there.

    samples: gaps by the number of streams decoding, for the step law; without_prefills says in which nothing waited.
    """

    def __init__(self, log: RunLog, *, label: str, slo: Slo | None) -> None:
        self.label = label
        self.streams = log.streams
        sent = [stream for stream in log.streams if not math.isnan(stream.sent)]
        self.phases: Phases = find_phases(sent, concurrency=log.concurrency)
        self.grouping: Grouping = find_grouping(sent)
        is_measurable = not self.grouping.is_buffered
        self.samples: Samples = {}
        self.samples_without_prefills: Samples = {}
        if is_measurable and not self.grouping.is_grouped:
            self.samples = sample(sent, with_waiting=True)
            self.samples_without_prefills = sample(sent, with_waiting=False)
        self._production = Production(sent)
        self.figures = self._figures(log, sent, slo, is_measurable)

    @property
    def is_sound(self) -> bool:
        """Whether all requests were answered, as streams."""
        return not self.figures["failure"]

    def _figures(self, log: RunLog, sent: Sequence[Stream], slo: Slo | None, is_measurable: bool) -> dict[str, Any]:
        phases = self.phases
        outcomes = collections.Counter(stream.outcome for stream in log.streams)
        good = [stream for stream in sent if stream.outcome is Outcome.OK]
        seconds = phases.end - phases.begin
        tokens = sum(stream.num_tokens for stream in sent)
        steady = phases.steady if is_measurable else ()
        timed = sent if is_measurable else []
        gaps, moments = _gaps(timed)
        failure = self._failure(log)
        return {
            "label": self.label,
            "concurrency": log.concurrency,
            "rate": log.rate,
            "requests": len(log.streams),
            "completed": outcomes[Outcome.OK],
            "failed": outcomes[Outcome.FAILED],
            "cancelled": outcomes[Outcome.CANCELLED],
            "not_sent": log.num_unsent,
            "failure": failure,
            "errors": _errors(log.streams),
            "buffered": self.grouping.is_buffered,
            "tokens_a_group": self.grouping.tokens_a_group,
            "seconds": seconds,
            "average": {"output_tokens_per_s": tokens / seconds if seconds > 0 else None},
            "steady": self._steady(sent, steady, gaps, moments),
            "sustained": self._sustained(is_measurable),
            "phases": self._phases(is_measurable),
            "ttft_ms": percentiles(_ms([stream.ttft for stream in timed])),
            "tpot_ms": percentiles(_ms([stream.tpot for stream in timed])),
            "second_token_ms": percentiles(_ms([stream.gaps[0] for stream in timed if len(stream.times) > 1])),
            "itl_ms": percentiles(gaps * 1000),
            "latency_ms": percentiles(_ms([stream.latency for stream in good])),
            "goodput": slo.goodput(log.streams, seconds) if slo is not None else None,
            "tokens": _tokens(sent),
            "notes": self._notes(sent, steady, log),
            "timeline": self._timeline(sent),
            "spans": [[name, begin - phases.begin, end - phases.begin] for name, begin, end in phases.spans()],
            "samples": self._samples(timed, good, steady, gaps, moments),
        }

    def _failure(self, log: RunLog) -> str:
        """Return what went wrong with the run, in one line; nothing if all was well."""
        failed = [stream for stream in log.streams if stream.outcome is Outcome.FAILED]
        parts = []
        if failed:
            first = min(failed, key=lambda stream: stream.ended)
            at = first.ended - self.phases.begin
            parts.append(
                f"{len(failed)} of {len(log.streams)} requests failed, the first after {at:.1f} s: {first.error}"
            )
        if log.gave_up:
            parts.append(f"{log.num_unsent} not sent any more")
        if log.interrupted:
            parts.append("stopped by hand")
        if self.grouping.is_buffered:
            parts.append(self.grouping.describe())
        return "; ".join(parts)

    def _steady(
        self, sent: Sequence[Stream], steady: Sequence[Window], gaps: Floats, moments: Floats
    ) -> dict[str, Any]:
        if not steady:
            problem = self.phases.problem or "not measured, see failure"
            return {"output_tokens_per_s": None, "interval": None, "seconds": 0.0, "itl_ms": None, "problem": problem}
        tokens = sum(self._production.tokens(begin, end) for begin, end in steady)
        seconds = self.phases.steady_s
        inside = gaps[_is_inside(moments, steady)]
        occupancy, prompts = decoding(sent), waiting(sent)
        shares = [(end - begin) / seconds for begin, end in steady]
        means = [
            sum(share * flow.mean(*window) for share, window in zip(shares, steady, strict=True))
            for flow in (occupancy, prompts)
        ]
        return {
            "output_tokens_per_s": tokens / seconds,
            "interval": interval(bootstrap([self._rate_rows(steady)], rate_of)),
            "seconds": seconds,
            "windows": len(steady),
            "level": self.phases.level,
            "decoding": means[0],
            "waiting": means[1],
            "itl_ms": percentiles(inside * 1000),
            "problem": "",
        }

    def _rate_rows(self, steady: Sequence[Window]) -> Floats:
        """Return (tokens, seconds) of each slice of the steady state."""
        pieces = np.array(slices(steady, step=self._step(steady)))
        begins, ends = pieces.T
        return np.stack([self._production.up_to(ends) - self._production.up_to(begins), ends - begins], axis=1)

    def _step(self, steady: Sequence[Window]) -> float:
        gaps, moments = _gaps(self.streams)
        inside = gaps[_is_inside(moments, steady)]
        return float(np.median(inside)) if len(inside) else 0.0

    def _sustained(self, is_measurable: bool) -> dict[str, Any]:
        window = self.phases.sustained if is_measurable else None
        if window is None or window[1] <= window[0]:
            return {"output_tokens_per_s": None, "seconds": 0.0}
        seconds = window[1] - window[0]
        return {"output_tokens_per_s": self._production.tokens(*window) / seconds, "seconds": seconds}

    def _phases(self, is_measurable: bool) -> list[dict[str, Any]]:
        """Return each phase's time, tokens and rate; phases that occur several times are added up."""
        totals: dict[str, list[float]] = {}
        for name, begin, end in self.phases.spans() if is_measurable else []:
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += end - begin
            total[1] += self._production.tokens(begin, end)
        return [
            {"phase": name, "seconds": s, "tokens": tokens, "output_tokens_per_s": tokens / s if s > 0 else None}
            for name, (s, tokens) in totals.items()
        ]

    def _notes(self, sent: Sequence[Stream], steady: Sequence[Window], log: RunLog) -> list[str]:
        """Return what a reader must know to read the figures rightly."""
        notes = []
        if sent and not steady and self.phases.problem and not self.grouping.is_buffered:
            notes.append(f"no steady state: {self.phases.problem}")
        if steady and log.concurrency is not None and self.phases.level < log.concurrency:
            notes.append(
                f"never long {counted(log.concurrency, 'stream')} decoding: steady means at least {self.phases.level}, "
                "while others wait"
            )
        held = [stream.gaps[0] / stream.tpot for stream in sent if len(stream.times) > 2 and stream.tpot > 0]
        held_ms = percentiles(_ms([stream.gaps[0] for stream in sent if len(stream.times) > 2]))
        if (
            held
            and not self.grouping.is_buffered
            and float(np.median(np.sort(held)[-max(1, len(held) // 4) :])) > _HELD
        ):
            notes.append(
                f"second tokens come late: p50 {held_ms['p50']:.0f}, p90 {held_ms['p90']:.0f} ms behind the first. "
                "TTFT looks better than the wait is: streams wait for a place in the batch, or for others' prompts"
            )
        if self.grouping.is_grouped:
            notes.append(self.grouping.describe())
        good = [stream for stream in sent if stream.outcome is Outcome.OK]
        short = sum(stream.num_tokens < stream.wanted_tokens for stream in good)
        if short:
            notes.append(f"{counted(short, 'answer')} ended before the wanted length")
        undone = sum(not stream.has_done for stream in good)
        if undone:
            notes.append(f"{counted(undone, 'stream')} ended without data: [DONE]")
        off = [s for s in good if s.completion_usage is not None and s.completion_usage != s.num_tokens]
        if off:
            notes.append(
                f"{counted(len(off), 'stream')} showed other numbers of tokens than their usage says "
                f"(first: {off[0].num_tokens} and {off[0].completion_usage})"
            )
        return notes

    def _timeline(self, sent: Sequence[Stream]) -> dict[str, list[float]]:
        """Return rate and numbers of streams over the run, for plots."""
        phases = self.phases
        if phases.end <= phases.begin:
            return {"s": [], "output_tokens_per_s": [], "decoding": [], "waiting": []}
        edges = np.linspace(phases.begin, phases.end, _TIMELINE_BINS + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        return {
            "s": _rounded(middles - phases.begin),
            "output_tokens_per_s": _rounded(self._production.rates(edges)),
            "decoding": _rounded(decoding(sent).at(middles).astype(float)),
            "waiting": _rounded(waiting(sent).at(middles).astype(float)),
        }

    def _samples(
        self,
        timed: Sequence[Stream],
        good: Sequence[Stream],
        steady: Sequence[Window],
        gaps: Floats,
        moments: Floats,
    ) -> dict[str, Any]:
        """Return what a later comparison resamples: values a stream, and slices of the steady state."""
        sketches = []
        pieces = slices(steady, step=self._step(steady)) if steady else []
        for piece in pieces:
            inside = gaps[_is_inside(moments, [piece])] * 1000
            if len(inside):
                sketches.append(_rounded(np.quantile(inside, (np.arange(_SKETCH) + 0.5) / _SKETCH)))
        return {
            "ttft_ms": _rounded(_ms([stream.ttft for stream in timed])),
            "tpot_ms": _rounded(_ms([stream.tpot for stream in timed])),
            "latency_ms": _rounded(_ms([stream.latency for stream in good])),
            "steady_slices": [[*_rounded(row)] for row in self._rate_rows(steady)] if steady else [],
            "itl_sketches_ms": sketches,
        }


def _ms(seconds: Sequence[float]) -> Floats:
    values: Floats = np.asarray(seconds, float) * 1000
    return np.asarray(values[~np.isnan(values)])


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _gaps(streams: Sequence[Stream]) -> tuple[Floats, Floats]:
    """Return all gaps between chunks, and the moment in the middle of each."""
    times = [np.asarray(stream.times) for stream in streams if len(stream.times) > 1]
    if not times:
        return np.empty(0), np.empty(0)
    return np.concatenate([np.diff(t) for t in times]), np.concatenate([(t[1:] + t[:-1]) / 2 for t in times])


def _is_inside(moments: Floats, windows: Sequence[Window]) -> Any:
    inside = np.zeros(len(moments), bool)
    for begin, end in windows:
        inside |= (moments > begin) & (moments <= end)
    return inside


def _errors(streams: Sequence[Stream]) -> list[dict[str, Any]]:
    """Return the different errors, most frequent first; numbers of tokens are left out so that alike ones meet."""
    kinds = collections.Counter(
        stream.error.split(", after ")[0].split(", before ")[0] for stream in streams if stream.error
    )
    return [{"count": count, "error": error} for error, count in kinds.most_common()]


def _tokens(sent: Sequence[Stream]) -> dict[str, Any]:
    sources = collections.Counter(str(stream.source) for stream in sent if stream.times)
    prompts = [stream.prompt_usage for stream in sent if stream.prompt_usage is not None]
    return {
        "output": sum(stream.num_tokens for stream in sent),
        "reasoning": sum(stream.reasoning_tokens for stream in sent),
        "counted_by": dict(sources.most_common()),
        "input_asked": float(np.mean([stream.input_tokens for stream in sent])) if sent else None,
        "input_by_usage": float(np.mean(prompts)) if prompts else None,
    }
