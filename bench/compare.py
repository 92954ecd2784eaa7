"""`isthmus bench compare A B`: what differs between two reports, and whether that is more than chance.

Intervals are of the ratio B / A, by bootstrap with a fixed seed. Units that are resampled: streams for TTFT, TPOT and
latency, slices of the steady state for throughput and ITL, since streams share their steps. Several runs of the same
load (--repeat) are resampled as runs first; with one run each, how runs vary is not in the interval, which is said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import number, write_atomically
from bench.statistics import Floats, bootstrap, interval, rate_of
from kernels.table import format_table

_CONDITIONS = ("model", "api", "input_lengths", "output_lengths", "prompts", "seed", "extras", "fields")


@dataclass(frozen=True, slots=True)
class Metric:
    """key: of a run's samples.   statistic: of all its rows.   more_is_better: what a ratio above 1 means."""

    name: str
    key: str
    statistic: Callable[[Floats], float]
    more_is_better: bool = False


METRICS = (
    Metric("tokens/s steady", "steady_slices", rate_of, more_is_better=True),
    Metric("ITL p50, ms", "itl_sketches_ms", lambda rows: float(np.median(rows))),
    Metric("ITL p99, ms", "itl_sketches_ms", lambda rows: float(np.percentile(rows, 99))),
    Metric("TPOT p50, ms", "tpot_ms", lambda rows: float(np.median(rows))),
    Metric("TTFT p50, ms", "ttft_ms", lambda rows: float(np.median(rows))),
    Metric("TTFT p90, ms", "ttft_ms", lambda rows: float(np.percentile(rows, 90))),
    Metric("latency p50, ms", "latency_ms", lambda rows: float(np.median(rows))),
)
_FEW = 5  # units, below which an interval would pretend


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return differing conditions, and for each load and metric both values, their ratio and its interval."""
    rows, notes = [], []
    loads = {_load_of(run): None for run in [*a["runs"], *b["runs"]]}
    for load in loads:
        sides = [[run for run in report["runs"] if _load_of(run) == load] for report in (a, b)]
        failures = [
            f"{name}: {run['failure']}"
            for name, runs in zip("AB", sides, strict=True)
            for run in runs
            if run["failure"]
        ]
        missing = [name for name, runs in zip("AB", sides, strict=True) if not runs]
        if missing or failures:
            notes.append(
                f"{load}: not compared: " + "; ".join([f"{name} has no such run" for name in missing] + failures)
            )
            continue
        rows += [_row(load, metric, *sides) for metric in METRICS]
        if min(map(len, sides)) < 2:
            notes.append(
                f"{load}: one run a side: how much runs vary is not in the intervals and may be more: --repeat 3"
            )
    differing = {
        key: [a["conditions"].get(key), b["conditions"].get(key)]
        for key in _CONDITIONS
        if a["conditions"].get(key) != b["conditions"].get(key)
    }
    return {"differing_conditions": differing, "rows": rows, "notes": notes}


def _load_of(run: dict[str, Any]) -> str:
    return f"C={run['concurrency']}" if run["concurrency"] else str(run["label"]).split(" #")[0]


def _row(load: str, metric: Metric, of_a: Sequence[dict[str, Any]], of_b: Sequence[dict[str, Any]]) -> dict[str, Any]:
    groups = [[np.asarray(run["samples"][metric.key], float) for run in runs] for runs in (of_a, of_b)]
    groups = [[rows for rows in side if len(rows)] for side in groups]
    row: dict[str, Any] = {"load": load, "metric": metric.name, "a": None, "b": None, "ratio": None, "interval": None}
    if not all(groups):
        return row | {"verdict": "not measured"}
    row["a"], row["b"] = (metric.statistic(np.concatenate(side)) for side in groups)
    row["ratio"] = row["b"] / row["a"]
    if min(sum(map(len, side)) for side in groups) < _FEW:
        return row | {"verdict": "too few to tell"}
    resampled_a, resampled_b = (bootstrap(side, metric.statistic) for side in groups)
    # each side's resamples come in the order of one seed: shuffled, so that the sides are independent
    shuffled = np.random.default_rng(1).permutation(resampled_b)
    bounds = interval(shuffled / resampled_a)
    row["interval"] = bounds
    if bounds is None or bounds[0] <= 1 <= bounds[1]:
        return row | {"verdict": "no difference shown"}
    verdict = "B better" if (row["ratio"] > 1) == metric.more_is_better else "B worse"
    # two runs of one server differ by more than either's scatter: one run a side proves nothing about the servers
    return row | {"verdict": verdict if min(map(len, groups)) > 1 else f"{verdict} in this one run"}


def table(result: dict[str, Any], name_a: str, name_b: str) -> str:
    """Return the comparison as text."""
    lines = [f"A: {name_a}", f"B: {name_b}"]
    lines += [f"differs: {key}: {a!r} and {b!r}" for key, (a, b) in result["differing_conditions"].items()]
    rows = [
        [
            row["load"],
            row["metric"],
            number(row["a"], 2),
            number(row["b"], 2),
            "-" if row["ratio"] is None else f"{row['ratio'] - 1:+.1%}",
            "-" if row["interval"] is None else " .. ".join(f"{bound - 1:+.1%}" for bound in row["interval"]),
            row["verdict"],
        ]
        for row in result["rows"]
    ]
    if rows:
        lines += ["", format_table(("load", "metric", "A", "B", "B over A", "95 %", ""), rows, left=2)]
    return "\n".join([*lines, *([""] if result["notes"] else []), *result["notes"]])


def main(argv: Sequence[str], *, prog: str = "isthmus bench compare") -> int:
    """Compare two files: 0 compared, 1 something could not be, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare two reports of `isthmus bench serve --json`, load by load, with 95 %% intervals.",
        epilog="An interval that holds 0 %% shows no difference. Runs that failed are named; the exit code is 1 then.",
        allow_abbrev=False,
    )
    parser.add_argument("a", type=Path, metavar="A", help="JSON of the one to compare with")
    parser.add_argument("b", type=Path, metavar="B", help="JSON of the other")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the comparison as JSON")
    args = parser.parse_args(argv)
    try:
        a, b = read_report(args.a), read_report(args.b)
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    result = compare(a, b)
    print(table(result, str(args.a), str(args.b)))
    if args.json:
        write_atomically(args.json, json.dumps(result) + "\n")
    return int(any("not compared" in note for note in result["notes"]))


def read_report(path: Path) -> dict[str, Any]:
    """Read a report. Raises ValueError if the file is none."""
    try:
        report = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(report, dict) or report.get("benchmark") != "isthmus bench serve" or report.get("version") != 1:
        raise ValueError(f"{path}: was not written by `isthmus bench serve --json` of this version")
    return report
