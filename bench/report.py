"""The report as a person reads it on a terminal, and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.table import counted, format_table

_DASH = "-"
_THROUGHPUT = ("run", "ok", "failed", "tokens/s steady", "95 %", "sustained", "average")
_TIMES = ("TTFT p50", "p90", "p99", "TPOT p50", "p99", "ITL p50", "p90", "p99")


def number(value: float | None, digits: int = 1) -> str:
    """Return a number as people read it; a dash for none."""
    return _DASH if value is None else f"{value:,.{digits}f}"


def read_stored(path: Path, *, command: str, wanted: str) -> dict[str, Any]:
    """Return what `command` --json has written. wanted: a figure of each run. Raises ValueError if it is not that."""
    try:
        report: dict[str, Any] = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--from {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--from {path}: no JSON: {error}") from None
    is_one = isinstance(report, dict) and "conditions" in report and bool(report.get("runs"))
    if not is_one or any(wanted not in run for run in report["runs"]):
        raise ValueError(f"--from {path}: was not written by `isthmus {command} --json`")
    return report


def is_failed(report: dict[str, Any]) -> bool:
    return any(run["failure"] for run in report["runs"])


def table(report: dict[str, Any]) -> str:
    """Return the whole report as text."""
    conditions = report["conditions"]
    lines = [
        f"{conditions['model'] or 'unknown model'} at {conditions['url']}, {conditions['date']}",
        f"{conditions['input_lengths']} tokens in, {conditions['output_lengths']} out, {conditions['prompts']}; "
        f"{conditions['api']}, seed {conditions['seed']}, "
        f"{counted(conditions['warmup'], 'request')} to warm up each run",
        _counting(report["runs"]),
    ]
    if conditions["refused"]:
        lines.append(f"not taken by the server: {', '.join(conditions['refused'])}")
    lines += ["", format_table([*_THROUGHPUT, *_TIMES], [_row(run) for run in report["runs"]]), "times in ms"]
    lines += ["", *_phase_lines(report["runs"])]
    for run in report["runs"]:
        lines += [f"{run['label']}: FAILED: {run['failure']}"] if run["failure"] else []
        lines += [f"{run['label']}: {count}x {error}" for count, error in _errors(run)]
        lines += [f"{run['label']}: {note}" for note in run["notes"]]
        lines += [f"{run['label']}: {_goodput(run['goodput'])}"] if run["goodput"] else []
    lines += ["", *step_law_lines(report["step_law"]), *_predictions(report["runs"]), *_cost(report["runs"])]
    return "\n".join(lines)


def _row(run: dict[str, Any]) -> list[str]:
    steady, bounds = run["steady"], run["steady"]["interval"]
    itl = steady["itl_ms"] or run["itl_ms"]
    return [
        run["label"] + (" FAILED" if run["failure"] else ""),
        str(run["completed"]),
        str(run["failed"]) + (f"+{run['cancelled']} cancelled" if run["cancelled"] else ""),
        number(steady["output_tokens_per_s"]),
        _DASH if bounds is None else f"{number(bounds[0])}..{number(bounds[1])}",
        number(run["sustained"]["output_tokens_per_s"]),
        number(run["average"]["output_tokens_per_s"]),
        *(number(run["ttft_ms"][name]) for name in ("p50", "p90", "p99")),
        *(number(run["tpot_ms"][name]) for name in ("p50", "p99")),
        *(number(itl[name]) for name in ("p50", "p90", "p99")),
    ]


def _phase_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return ramp, steady state, refill and drain of each run: seconds, and tokens a second in them."""
    names = ("ramp", "steady", "refill", "drain")
    rows = []
    for run in runs:
        phases = {phase["phase"]: phase for phase in run["phases"]}
        cells = [
            f"{phases[name]['seconds']:.1f} s, {number(phases[name]['output_tokens_per_s'])}/s"
            if name in phases
            else _DASH
            for name in names
        ]
        steady = run["steady"]
        rows.append([run["label"], *cells, number(steady.get("decoding")), number(steady.get("waiting"))])
    return [
        format_table(("run", *names, "decoding", "waiting"), rows),
        "decoding, waiting: streams in the steady state",
    ]


def _counting(runs: Sequence[dict[str, Any]]) -> str:
    sources = sorted({source for run in runs for source in run["tokens"]["counted_by"]})
    reasoning = sum(run["tokens"]["reasoning"] for run in runs)
    total = sum(run["tokens"]["output"] for run in runs)
    text = (
        f"output tokens counted by {', '.join(sources) or 'nothing'}; reasoning included ({reasoning:,} of {total:,})"
    )
    seen = {round(run["tokens"]["input_by_usage"], 1) for run in runs if run["tokens"]["input_by_usage"] is not None}
    return text + (
        f"; the server counts {', '.join(f'{n:,.0f}' for n in sorted(seen))} tokens in on average" if seen else ""
    )


def _errors(run: dict[str, Any]) -> list[tuple[int, str]]:
    """Return the kinds of errors where one line could not say them all."""
    kinds = [(kind["count"], kind["error"]) for kind in run["errors"]]
    return kinds if len(kinds) > 1 else []


def _goodput(goodput: dict[str, Any]) -> str:
    bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in goodput["slo_ms"].items())
    share = _DASH if goodput["share"] is None else f"{goodput['share']:.1%}"
    return (
        f"goodput at {bounds}: {number(goodput['requests_per_s'], 2)} requests/s, "
        f"{number(goodput['output_tokens_per_s'])} tokens/s ({share} of requests)"
    )


def step_law_lines(law: dict[str, Any]) -> list[str]:
    if law["a_ms"] is None:
        return [f"step law: not fitted: {law['problem']}"]
    lines = [f"step law: {law['a_ms']:.2f} + {law['b_ms']:.3f} N ms, residuals up to {law['max_residual']:.1%}"]
    if law["experts"] is not None:
        other = law["experts"]
        lines.append(
            f"     or: {other['a_ms']:.2f} + {other['c_ms']:.3f} U(N) + {other['d_ms']:.3f} N ms, residuals up to "
            f"{other['max_residual']:.1%}; U(N): distinct experts of {other['total']}, {other['chosen']} a token"
        )
    told = law["prediction"]
    lines.append(f"     {law['verdict']}")
    lines.append(
        f"     at C={told['concurrency']} it would be {told['step_ms']:.1f} ms a step, "
        f"{number(told['output_tokens_per_s'])} tokens/s"
    )
    return lines


def _predictions(runs: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for run in runs:
        told, got = run.get("predicted"), None if run["failure"] else run["steady"]["output_tokens_per_s"]
        if told and told["output_tokens_per_s"]:
            seen = (
                "not measured"
                if got is None
                else f"{number(got)} measured ({got / told['output_tokens_per_s'] - 1:+.1%})"
            )
            lines.append(
                f"     {run['label']}: {number(told['output_tokens_per_s'])} tokens/s expected before it, {seen}"
            )
    return lines


def _cost(runs: Sequence[dict[str, Any]]) -> list[str]:
    costs = [run["client"] for run in runs if run.get("client") and run["client"]["events"]]
    if not costs:
        return []
    cpu_s, events = sum(cost["cpu_s"] for cost in costs), sum(cost["events"] for cost in costs)
    per_core = f"{events / cpu_s:,.0f} events/s a core" if cpu_s > 0 else "too little to measure"
    return [
        f"client: {cpu_s:.2f} s of CPU for {events:,} events ({per_core}), "
        f"at most {max(cost['share_of_core'] for cost in costs):.0%} of a core, "
        f"{max(cost['late_p99_ms'] for cost in costs):.1f} ms late (p99)"
    ]


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def write_json(report: dict[str, Any], path: Path) -> None:
    write_atomically(path, json.dumps(report, allow_nan=False) + "\n")
