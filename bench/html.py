"""The report as one page: no other file, no network, light or dark as the reader's system is."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.page_style import SCRIPT, STYLE
from bench.plot import Axis, Plot, Point
from bench.report import number, step_law_lines, table
from kernels.table import counted

_NUM_SERIES = 8


def page(report: dict[str, Any]) -> str:
    """Return the page of a report as `bench serve` makes it."""
    runs, conditions = report["runs"], report["conditions"]
    title = f"{conditions['model'] or 'unknown model'}: serving benchmark"
    facts = (
        f"{conditions['url']} · {conditions['api']} · {conditions['input_lengths']} tokens in, "
        f"{conditions['output_lengths']} out · seed {conditions['seed']} · {conditions['date']}"
    )
    figures = [
        _over_concurrency(runs),
        _law(report["step_law"]),
        _distribution(runs, "ttft"),
        _distribution(runs, "itl"),
    ]
    figures += [_latency(runs), _per_user(runs)]
    over_time = [_over_time(run, at) for at, run in enumerate(runs) if run["timeline"]["s"]]
    sections = [
        f'<header><h1>{html.escape(title)}</h1><p class="muted">{html.escape(facts)}</p></header>',
        f'<div class="cards">{"".join(_card(run, at) for at, run in enumerate(runs))}</div>',
        f'<div class="plots">{"".join(figure for figure in figures if figure)}</div>',
        "<h2>Over time</h2>",
        f'<div class="plots">{"".join(over_time)}</div>',
        f"<h2>All figures</h2><pre>{html.escape(table(report))}</pre>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head><body>{''.join(sections)}<div id='tip' hidden></div>"
        f"<script>{SCRIPT}</script></body></html>"
    )


def _card(run: dict[str, Any], series: int) -> str:
    """Return the few figures of a run that people ask for first."""
    steady = run["steady"]
    itl = steady["itl_ms"] or run["itl_ms"]
    if run["failure"]:
        state = f'<p class="bad">FAILED: {html.escape(run["failure"])}</p>'
    elif steady["problem"]:
        state = f'<p class="bad">{html.escape(steady["problem"])}</p>'
    else:
        state = (
            f'<p class="muted">steady for {steady["seconds"]:.1f} of {run["seconds"]:.1f} s; '
            f"average {number(run['average']['output_tokens_per_s'])}</p>"
        )
    return (
        f'<section class="card"><h3><i class="key s{series % _NUM_SERIES}"></i>{html.escape(run["label"])}</h3>'
        f'<p class="big">{number(steady["output_tokens_per_s"])} <small>tokens/s steady</small></p>'
        f"<p>TTFT {number(run['ttft_ms']['p50'])}&nbsp;ms · ITL {number(itl['p50'])}&nbsp;ms <small>(p50)</small></p>"
        f"{state}</section>"
    )


def _figure(caption: str, plot: Plot, legend: Sequence[tuple[int, str]] = ()) -> str:
    keys = "".join(f'<span><i class="key s{series}"></i>{html.escape(name)}</span>' for series, name in legend)
    return (
        f'<figure><figcaption>{html.escape(caption)}</figcaption>{plot.svg()}<div class="legend">{keys}</div></figure>'
    )


def _over_time(run: dict[str, Any], at: int) -> str:
    """Return throughput over time with the phases behind it, and the numbers of streams below."""
    series, timeline, steady = at % _NUM_SERIES, run["timeline"], run["steady"]
    seconds, rates = timeline["s"], timeline["output_tokens_per_s"]
    x = Axis(0, run["seconds"], "seconds")
    plot = Plot(x, Axis.around(rates, "tokens/s"), name=f"{run['label']}: tokens a second over time", height=220)
    streams = Axis.around([*timeline["decoding"], *timeline["waiting"]], "streams")
    below = Plot(x, streams, name=f"{run['label']}: streams over time", height=130)
    if not run["buffered"]:
        for name, begin, end in run["spans"]:
            plot.shade(begin, end, name)
            below.shade(begin, end, name)
    plot.line(list(zip(seconds, rates, strict=True)), series, "tokens/s", steps=True)
    for name, begin, end in run["spans"]:
        if name == "steady" and steady["output_tokens_per_s"] is not None:
            plot.level(steady["output_tokens_per_s"], begin, end, series)
    below.line(list(zip(seconds, timeline["decoding"], strict=True)), series, "decoding", steps=True)
    below.line(list(zip(seconds, timeline["waiting"], strict=True)), 7, "waiting", dashed=True, steps=True)
    phases = "".join(
        f'<span><i class="key phase {phase["phase"]}"></i>{phase["phase"]} {phase["seconds"]:.1f} s, '
        f"{number(phase['output_tokens_per_s'])}/s</span>"
        for phase in run["phases"]
    )
    failed = f'<p class="bad">FAILED: {html.escape(run["failure"])}</p>' if run["failure"] else ""
    return (
        f"<figure><figcaption>{html.escape(run['label'])}: throughput and streams (solid: decoding, dashed: waiting)"
        f'</figcaption>{plot.svg()}{below.svg()}<div class="legend">{phases}</div>{failed}</figure>'
    )


def _distribution(runs: Sequence[dict[str, Any]], what: str) -> str:
    """Return the share of streams (TTFT) or of gaps in the steady state (ITL) below each time."""
    curves: list[tuple[int, str, list[Point]]] = []
    for at, run in enumerate(runs):
        samples = run["samples"]
        values = samples["ttft_ms"] if what == "ttft" else [v for sketch in samples["itl_sketches_ms"] for v in sketch]
        values = np.sort([value for value in values if value > 0])
        if len(values):
            shares = (np.arange(len(values)) + 0.5) / len(values) * 100
            kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), 200)).astype(int))
            points = [(float(values[i]), float(shares[i])) for i in kept]
            curves.append((at % _NUM_SERIES, run["label"], points))
    if not curves:
        return ""
    x = Axis.around([x for _, _, points in curves for x, _ in points], "milliseconds", is_log=True)
    name = "Time to first token" if what == "ttft" else "Gaps between tokens (ITL), steady state"
    plot = Plot(x, Axis(0, 100, "% of streams" if what == "ttft" else "% of gaps"), name=name)
    for series, label, points in curves:
        plot.line(points, series, label)
        if len(points) == 1:
            plot.points(points, series, [label])
    return _figure(name, plot, [(series, label) for series, label, _ in curves])


def _law(law: dict[str, Any]) -> str:
    if law["a_ms"] is None:
        return ""
    told, measured = law["prediction"], law["points"]
    most = max(told["concurrency"], *(point["streams"] for point in measured))
    ns = np.linspace(1, most * 1.04, 60)
    line = [(float(n), float(law["a_ms"] + law["b_ms"] * n)) for n in ns]
    steps = [y for _, y in line] + [point["step_ms"] for point in measured]
    plot = Plot(Axis(0, most * 1.06, "streams decoding"), Axis.around(steps, "milliseconds a step"), name="Step law")
    plot.line(line, 0, "a + b N")
    legend = [(0, "a + b N")]
    if law["experts"] is not None:
        form = law["experts"]
        distinct = form["total"] * (1 - (1 - form["chosen"] / form["total"]) ** ns)
        values = form["a_ms"] + form["c_ms"] * distinct + form["d_ms"] * ns
        plot.line([(float(n), float(y)) for n, y in zip(ns, values, strict=True)], 1, "a + c U(N) + d N", dashed=True)
        legend.append((1, "a + c U(N) + d N, dashed"))
    plot.points(
        [(point["streams"], point["step_ms"]) for point in measured],
        2,
        [
            f"{counted(point['streams'], 'stream')}: {point['step_ms']:.2f} ms, {point['steps']:.0f} steps"
            for point in measured
        ],
    )
    name = f"C={told['concurrency']}: {told['step_ms']:.1f} ms expected"
    plot.points([(told["concurrency"], told["step_ms"])], 3, [name], hollow=True)
    legend += [(2, "measured (median)"), (3, name)]
    title, other = step_law_lines(law)[:2]
    if told["form"] != "a + b N":  # the one that the verdict prefers
        title = f"step law: {other.strip().removeprefix('or: ').partition(';')[0]}"
    return _figure(title, plot, legend)


def _closed(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((run for run in runs if run["concurrency"]), key=lambda run: int(run["concurrency"]))


def _over_concurrency(runs: Sequence[dict[str, Any]]) -> str:
    """Return tokens a second against concurrency, in the steady state and as the average has it."""
    kinds = (
        ("steady", "steady state"),
        ("sustained", "sustained"),
        ("average", "average of all, ramp and drain included"),
    )
    lines = []
    for series, (key, name) in enumerate(kinds):
        points = [
            (float(run["concurrency"]), run[key]["output_tokens_per_s"])
            for run in _closed(runs)
            if run[key]["output_tokens_per_s"] is not None and not run["failure"]
        ]
        lines.append((series, name, points))
    if not any(points for _, _, points in lines):
        return ""
    x = Axis.around([float(run["concurrency"]) for run in _closed(runs)], "concurrency", is_log=True)
    y = Axis.around([y for _, _, points in lines for _, y in points], "tokens/s")
    plot = Plot(x, y, name="Throughput against concurrency")
    for series, name, points in lines:
        plot.line(points, series, name, dashed=series > 0)
        plot.points(points, series, [f"C={x:g}: {y:,.1f} tokens/s, {name}" for x, y in points])
    for run in _closed(runs):
        if run["failure"]:
            plot.points(
                [(float(run["concurrency"]), 0.0)], 3, [f"{run['label']} FAILED: {run['failure']}"], hollow=True
            )
    legend = [(series, name) for series, name, _ in lines]
    legend += [(3, "failed (ring on the axis)")] if any(run["failure"] for run in _closed(runs)) else []
    return _figure("Throughput against concurrency", plot, legend)


def _latency(runs: Sequence[dict[str, Any]]) -> str:
    """Return TTFT and ITL against concurrency: medians, with a band up to the 99th percentile."""
    series: list[tuple[int, str, list[tuple[float, dict[str, float]]]]] = []
    for at, (name, key) in enumerate((("TTFT", "ttft_ms"), ("ITL", "itl_ms"))):
        found = [(float(run["concurrency"]), run[key]) for run in _closed(runs) if run[key]["p50"]]
        series.append((at, name, found))
    values = [value for _, _, found in series for _, times in found for value in (times["p50"], times["p99"])]
    if not values:
        return ""
    x = Axis.around([x for _, _, found in series for x, _ in found], "concurrency", is_log=True)
    plot = Plot(x, Axis.around(values, "milliseconds", is_log=True), name="Latency against concurrency")
    for at, name, found in series:
        middle = [(x, times["p50"]) for x, times in found]
        plot.band(middle, [(x, times["p99"]) for x, times in found], at)
        plot.line(middle, at, f"{name} p50")
        plot.points(middle, at, [f"C={x:g}: {name} p50 {t['p50']:.1f} ms, p99 {t['p99']:.1f} ms" for x, t in found])
    legend = [(at, f"{name}: median, band to p99") for at, name, _ in series]
    return _figure("Latency against concurrency, whole runs", plot, legend)


def _per_user(runs: Sequence[dict[str, Any]]) -> str:
    """Return what all users get together against what each of them gets, in the steady state."""
    found = [
        (1000 / run["steady"]["itl_ms"]["p50"], run["steady"]["output_tokens_per_s"], run["label"])
        for run in _closed(runs)
        if run["steady"]["itl_ms"] and run["steady"]["itl_ms"]["p50"]
    ]
    if not found:
        return ""
    x = Axis.around([x for x, _, _ in found], "tokens/s of one stream (1 / median ITL)")
    plot = Plot(x, Axis.around([y for _, y, _ in found], "tokens/s of all"), name="All users against one")
    plot.line([(x, y) for x, y, _ in found], 4, "all", dashed=True)
    plot.points([(x, y) for x, y, _ in found], 4, [f"{label}: {x:.1f} each, {y:.1f} all" for x, y, label in found])
    return _figure("What all get against what each gets, steady state", plot)
