"""Bars of the runs on several GPUs, held against the reports that their steps have left: `python -m bench.bars`.

    python -m bench.bars step=step.json transfer=transfer_0.json transfer=transfer_1.json
    python -m bench.bars --dry pair=pair.json            figures of time are shown and not judged, as on a CPU

Each report gains a list `bars`: {"bar", "wanted", "measured", "met"}; measured is null for what the report lacks, and
met null for what is not judged. Prints them as a table; exit code 1 if one is not met, or a report is missing.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import write_json
from kernels.table import format_table

STEP_SHARES = {1: 0.30, 16: 0.40, 64: 0.45}  # of a step's time, by batch: its bytes and its sums over ranks
ONE_SHOT_BYTES = 64 << 10  # up to here one-shot sums are no slower than NCCL's
MERGED_SHARE = 0.60  # of one piece of the same bytes
EXPOSED_MS = 1.0
SLOWED = 0.03
ITL_RATIO = 1.18  # cluster over engine, while no prefill runs
_SIGNS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}

Report = dict[str, Any]


class Bar(NamedTuple):
    """measured: None if the report lacks it.   sign: what it must be to `limit`.   is_time: means nothing on a CPU."""

    name: str
    measured: float | None
    sign: str
    limit: float
    is_time: bool = True

    def row(self, *, dry: bool) -> dict[str, Any]:
        """Return it as reports have it. dry: what is_time is not judged."""
        met = (
            None if dry and self.is_time else self.measured is not None and _SIGNS[self.sign](self.measured, self.limit)
        )
        return {"bar": self.name, "wanted": f"{self.sign} {self.limit:g}", "measured": self.measured, "met": met}


def of_step(report: Report) -> Iterator[Bar]:
    """Of `bench step --ranks`: the share of a step that its floor takes, sums over ranks in it."""
    found = {run["batch"]: run["share_of_floor"] for run in report["runs"]}
    for batch, share in STEP_SHARES.items():
        yield Bar(f"floor with sums, of a step at B = {batch}", found.get(batch), ">=", share)


def of_all_reduce(report: Report) -> Iterator[Bar]:
    """Of bench.all_reduce: one-shot sums over the fastest by NCCL, whenever that was measured."""
    sums, met = report["sums_us"], report["exchange"]["timings"]
    nccl = [found for way, found in sums.items() if way not in ("one-shot", "chosen")]
    for size in (str(size) for size in _doubling(8 << 10, ONE_SHOT_BYTES)):
        times = [found[size] for found in nccl if size in found]
        times += [one["us"] for one in met if str(one["num_bytes"]) == size and one["way"] != "one-shot"]
        one_shot = sums.get("one-shot", {}).get(size)
        ratio = one_shot / min(times) if one_shot is not None and times else None
        yield Bar(f"one-shot over NCCL, {int(size) >> 10} KiB", ratio, "<=", 1.0)


def of_transfer(report: Report) -> Iterator[Bar]:
    """Of `bench transfer`: prompts whose blocks are neighbours."""
    chunk = report["conditions"]["chunk_tokens"]
    merged = {(run["tokens"], run["chunk_tokens"]): run for run in report["runs"] if run["order"] == "merged"}
    for tokens in report["conditions"]["lengths"]:
        share = merged.get((tokens, 0), {}).get("share_of_one_piece")
        yield Bar(f"of one piece, {tokens:,} tokens", share, ">=", MERGED_SHARE)
        if chunk and tokens > chunk:
            arrival_us = merged.get((tokens, chunk), {}).get("arrival_us")
            exposed = None if arrival_us is None else arrival_us / 1000
            yield Bar(f"exposed of the last chunk, {tokens:,} tokens, ms", exposed, "<=", EXPOSED_MS)


def of_push(report: Report) -> Iterator[Bar]:
    """Of bench.push: what prefill loses to the pushes beside it."""
    for run in report["runs"]:
        if run["order"] == "merged":
            yield Bar(f"prefill slowed by pushes, {run['prompt']:,} tokens", run["slowed_share"], "<=", SLOWED)
            yield Bar(f"exposed beside prefill, {run['prompt']:,} tokens, ms", run["exposed_ms"], "<=", EXPOSED_MS)


def of_pair(report: Report) -> Iterator[Bar]:
    """Of bench.pair, as far as what it ran goes."""
    asked = report["conditions"]["runs"]
    runs = [run for found in report.get("runs", {}).values() for run in found]
    if "wave" in asked:
        found = {row["concurrency"]: row["ratio"] for row in report.get("itl", [])}
        for concurrency in report["conditions"]["concurrency"]:
            yield Bar(f"ITL over the engine's step, C = {concurrency}", found.get(concurrency), "<=", ITL_RATIO)
    alone = {"ttft": ("ttft", "a long"), "longest": ("longest1", "a very long")}
    for run, words in (each for asked_run, each in alone.items() if asked_run in asked):
        exposed = report.get("splits", {}).get(run, {}).get("exposed_ms")
        yield Bar(f"exposed of {words} prompt, ms", exposed, "<=", EXPOSED_MS)
    if set(asked) - {"faults", "answers"}:
        failed = sum(run["failed"] for run in runs) if runs else None
        yield Bar("failed requests", failed, "=", 0, is_time=False)
    if "faults" in asked:
        faults = report.get("faults") or None
        yield Bar("strikes with a fault", faults and sum(bool(one["fault"]) for one in faults), "=", 0, is_time=False)
    yield Bar("problems", len(report["problems"]), "=", 0, is_time=False)


def of_correctness(report: Report) -> Iterator[Bar]:
    """Of tests/gpu/tensor_parallel.py: trials by the way that sums took."""
    trials = report["trials"]
    for way in sorted({trial["all_reduce"] for trial in trials}):
        of_way = [trial for trial in trials if trial["all_reduce"] == way]
        rows = sum(trial.get("rows", 0) for trial in of_way)
        equal = sum(trial.get("equal_argmax", 0) for trial in of_way)
        yield Bar(f"geo, sums {way}: of {rows} rows, those of another argmax", rows - equal, "=", 0, is_time=False)
        faults = sum(bool(trial["fault"]) for trial in of_way)
        yield Bar(f"geo, sums {way}: of {len(of_way)} trials, those with a fault", faults, "=", 0, is_time=False)


def of_answers(report: Report) -> Iterator[Bar]:
    """Of bench.answers: what a cluster has answered beside one runner."""
    total, bounds = report["total"], report["bounds"]
    names = {"wrong_share": f"share of {total['rows']} rows of another token that is no tie"}
    names |= {"median": "distance of log probabilities, median", "p95": "distance of log probabilities, 95 % of rows"}
    for name, words in names.items():
        yield Bar(words, total[name], "<=", bounds[name], is_time=False)
    # else the comparison would not see a wrong cache
    yield Bar("distance to another step's row, median", total["control"], ">=", 3 * bounds["median"], is_time=False)


KINDS: dict[str, Callable[[Report], Iterable[Bar]]] = {
    "step": of_step,
    "all_reduce": of_all_reduce,
    "transfer": of_transfer,
    "push": of_push,
    "pair": of_pair,
    "correctness": of_correctness,
    "answers": of_answers,
}


def judge(kind: str, path: Path, *, dry: bool) -> list[dict[str, Any]]:
    """Return the bars of a report and write them into it; of one that can't be read a single one, which is not met."""
    try:
        report = json.loads(path.read_bytes())
        rows = [bar.row(dry=dry) for bar in KINDS[kind](report)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        bar = f"no report of {kind} ({type(error).__name__})"
        return [{"bar": bar, "wanted": "a report", "measured": None, "met": False}]
    write_json(report | {"bars": rows}, path)
    return rows


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Judge what the arguments name; return 1 if something is not met."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.bars", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", metavar="KIND=FILE", help=f"kinds: {', '.join(KINDS)}")
    parser.add_argument("--dry", action="store_true", help="don't judge what is time")
    args = parser.parse_args(argv)
    rows, cells = [], []
    words = {True: "met", False: "NOT MET", None: "not judged"}
    for text in args.reports:
        kind, sign, name = text.partition("=")
        if not sign or kind not in KINDS:
            parser.error(f"{text}: wanted KIND=FILE, with a kind of {', '.join(KINDS)}")
        for row in judge(kind, Path(name), dry=args.dry):
            rows.append(row | {"report": Path(name).stem})
            cells.append([Path(name).stem, row["bar"], row["wanted"], _cell(row["measured"]), words[row["met"]]])
    print(format_table(["report", "bar", "wanted", "measured", ""], cells, left=2))
    missed = [f"{row['report']}: {row['bar']}" for row in rows if row["met"] is False]
    if missed:
        print(f"not met: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
