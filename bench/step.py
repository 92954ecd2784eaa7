"""`isthmus bench step`: what a decode step costs over batch and context, beside its floor, and the law it follows."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.progress import Progress
from bench.report import number, read_stored, step_law_lines, write_json
from bench.step_flags import add_flags, count, counts
from bench.step_law import Experts, Point, StepLaw
from bench.step_plot import draw, require_matplotlib
from bench.step_projection import project, show_projection
from engine.flags import engine_config, parse_flags
from engine.steady_batch import SPAN, StepFailed
from kernels.table import counted

if TYPE_CHECKING:
    from bench.in_process import InProcessEngine
    from engine.parallel import Rank
    from engine.steady_batch import SteadyBatch, Step

WARM_STEPS = 20
WIDTH = 180  # of a table that goes to a file

_EXAMPLES = """\
examples
  isthmus bench step --model dsv4-tiny --device cpu --batch 1,4 --context 256 --steps 20
  isthmus bench step --model ./DeepSeek-V4-Flash --load-format synthetic --simulate-rank 0/4 --device cuda \\
      --context 8192,131072 --json step.json --png step.png
  isthmus bench step --model ./DeepSeek-V4-Flash --load-format synthetic --ranks 2 --device cuda --batch 1,16,64
  isthmus bench step --from step.json --png step.png          draw what was measured before, elsewhere
  isthmus bench step --from step.json --project               what such steps would take on four RTX PRO 6000

what is measured
  One rank in this process: plans go to its runner as a leader's would, each before the tokens of the one before have
  been read. No leader, no HTTP, no exchange with other ranks. With --ranks N a group of N processes that do exchange,
  a GPU for each; figures are the first one's.
  step        milliseconds from one step's tokens to the next one's, on the host: median, and the 10th and 90th of 100
  device      of it, what the device took from the step's first to its last kernel
  gap         share of the step in which the device waited for the host
  floor       the weights and cache rows that such a step must read, at the device's bandwidth (or their products)
  x floor     step / floor
  with sums   with --ranks: floor and the group's sums over the ranks, each as measured alone; and its share of the step
  nodes       kernels and copies in the captured graph

A synthetic model needs its folder's config.json only. The form a + c U(N) + d N of the law wants four batches or more.
"""


def main(argv: Sequence[str], *, prog: str = "isthmus bench step") -> int:
    """Run the benchmark: 0 well, 1 a sequence failed, 2 wrong usage. Raises ConfigError."""
    parser = _parser(prog)
    args = parse_flags(parser, argv)
    if args.png:
        require_matplotlib()
    report = stored_or_measured(args, measure, prog=prog, command="bench step", wanted="step_ms")
    if isinstance(report, int):
        return report
    show(report)
    if args.json:
        write_json(report, args.json)
    if args.project:
        report["projection"] = project(report)
        show_projection(report["projection"], wide_console(Console(highlight=False, soft_wrap=True)))
        if args.json:
            write_json(report, args.json)
    if args.png:
        draw(report, args.png)
    return 0


def stored_or_measured(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Progress], dict[str, Any]],
    *,
    prog: str,
    command: str,
    wanted: str,
) -> dict[str, Any] | int:
    """Return the report of --from, or a new one; or, having said why, 1 if a step failed, 2 for wrong usage."""
    try:
        if args.stored:
            return read_stored(args.stored, command=command, wanted=wanted)
        return measure(args, Progress(quiet=args.quiet))
    except (StepFailed, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1 if isinstance(error, StepFailed) else 2


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the report of a sweep over args.context and args.batch, of one rank or of a group's first."""
    # as a whole, environment included: a bad setting is told here, once
    config = engine_config(args, role="decode", yaml_section=None, environ=os.environ)
    if config.ranks == 1:
        return _sweep(args, progress)
    from bench.ranks import RanksFailed, run_in_ranks

    try:
        report: dict[str, Any] = run_in_ranks(
            config.ranks,
            _sweep_of_rank,
            args,
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            all_reduce=config.all_reduce,
        )
    except RanksFailed as error:
        raise StepFailed(str(error)) from error
    return report


def _sweep_of_rank(group: Rank, args: argparse.Namespace) -> dict[str, Any]:
    return _sweep(args, Progress(quiet=args.quiet or group.index > 0), group)


def _sweep(args: argparse.Namespace, progress: Progress, group: Rank | None = None) -> dict[str, Any]:
    """Return what this rank measures. Every rank of a group sweeps alike; only the first one talks."""
    from bench.in_process import InProcessEngine

    longest = max(args.context) + SPAN
    engine = InProcessEngine(args, sequences=max(args.batch), longest=longest, say=progress.say, group=group)
    sums = {} if group is None else _sums(engine, group, args.batch)
    runs = []
    for context in args.context:
        for batch in args.batch:
            steady = engine.steady(batch, context)
            runs.append(_with_sums(_figures(engine, steady, steps=args.steps), sums.get(batch)))
            steady.end()
            progress.say(
                f"batch {batch:>3}, context {context:>7,}: {runs[-1]['step_ms']:.3f} ms a step, floor "
                f"{runs[-1]['floor_ms']:.3f}"
            )
    model = engine.floor.model
    experts = Experts(model.n_routed_experts, model.num_experts_per_tok)
    laws = {context: _law([run for run in runs if run["context"] == context], experts) for context in args.context}
    return {
        "conditions": engine.conditions() | {"steps": args.steps, "warm_steps": WARM_STEPS},
        "runs": runs,
        "step_law": laws[args.context[0]],
        "step_laws": {str(context): law for context, law in laws.items()},
    }


def _sums(engine: InProcessEngine, group: Rank, batches: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return by batch what the sums over ranks of a step take, measured alone: two a layer, [batch, hidden] each."""
    from bench.all_reduce import CHOSEN, sum_times
    from engine.runner import DTYPES

    model, dtype = engine.floor.model, DTYPES[engine.config.dtype]
    sizes = {batch: batch * model.hidden_size * dtype.itemsize for batch in batches}
    times = sum_times(group, sorted(set(sizes.values())), dtype)[CHOSEN]
    calls = 2 * model.num_hidden_layers
    return {
        batch: {"calls": calls, "bytes": size, "us": times[size], "ms": calls * times[size] / 1000}
        for batch, size in sizes.items()
    }


def _with_sums(run: dict[str, Any], sums: dict[str, Any] | None) -> dict[str, Any]:
    """Return the run with `sums`, the floor that has them in it, and that floor's share of the step; null if alone."""
    if sums is None:
        return run | {"sums": None, "floor_with_sums_ms": None, "share_of_floor": None}
    floor_ms = run["floor_ms"] + sums["ms"]
    return run | {"sums": sums, "floor_with_sums_ms": floor_ms, "share_of_floor": floor_ms / run["step_ms"]}


def _figures(engine: InProcessEngine, steady: SteadyBatch, *, steps: int) -> dict[str, Any]:
    """Measure one batch at one context; return its entry in `runs`."""
    steady.run(WARM_STEPS)
    found = steady.run(steps)
    step_ms = statistics.median(step.ms for step in found)
    low, high = np.percentile([step.ms for step in found], [10, 90])
    device_ms, gap_ms = _median(found, "device_ms"), _median(found, "gap_ms")
    floor_ms = engine.floor.ms(steady.batch, steady.context, engine.device)
    return {
        "batch": steady.batch,
        "context": steady.context,
        "steps": len(found),
        "step_ms": step_ms,
        "p10_ms": float(low),
        "p90_ms": float(high),
        "device_ms": device_ms,
        "gap_ms": gap_ms,
        "gap": None if gap_ms is None else gap_ms / step_ms,
        "tokens_per_s": 1000 * steady.batch / step_ms,
        "floor_ms": floor_ms,
        "over_floor": step_ms / floor_ms,
        "nodes": engine.nodes(steady.batch),
        "expected_experts": engine.floor.distinct_experts(steady.batch),
        "floor_parts": {
            part.name: {"us": part.floor_us(engine.device), "bytes": part.num_bytes, "flops": part.flops}
            for part in engine.floor.parts(steady.batch, steady.context)
        },
    }


def _median(steps: Sequence[Step], name: str) -> float | None:
    values = [value for step in steps if (value := getattr(step, name)) is not None]
    return statistics.median(values) if values else None


def _law(runs: Sequence[dict[str, Any]], experts: Experts) -> dict[str, Any]:
    """Return both fits of the runs of one context, or why there are none."""
    points = [Point(run["batch"], run["step_ms"] / 1000, run["steps"]) for run in runs]
    try:
        return StepLaw(points, experts=experts).to_json(2 * points[-1].num_streams) | {"problem": ""}
    except ValueError:
        return {"a_ms": None, "problem": "two batches far apart are needed, four for both forms: --batch 1,4,16,64"}


def show(report: dict[str, Any]) -> None:
    """Print table and laws."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(conditions_line(report["conditions"]), markup=False)
    table = Table("batch", "context", box=None, header_style="bold")
    for head in ("step ms", "10 %", "90 %", "device ms", "gap", "tokens/s", "floor ms", "x floor", "nodes"):
        table.add_column(head, justify="right")
    has_sums = any(run.get("sums") for run in report["runs"])
    for head in ("sums ms", "floor with sums", "of step") if has_sums else ():
        table.add_column(head, justify="right")
    for column in table.columns[:2]:
        column.justify = "right"
    for run in report["runs"]:
        table.add_row(
            f"{run['batch']}",
            f"{run['context']:,}",
            *(number(run[name], 3) for name in ("step_ms", "p10_ms", "p90_ms", "device_ms")),
            number(None) if run["gap"] is None else f"{run['gap']:.1%}",
            number(run["tokens_per_s"], 0),
            number(run["floor_ms"], 3),
            number(run["over_floor"], 2),
            number(run["nodes"], 0),
            *(_sums_cells(run) if has_sums else ()),
        )
    wide_console(console).print(table)
    for context, law in report["step_laws"].items():
        console.print(f"context {int(context):,}", markup=False)
        console.print("\n".join(step_law_lines(law)), markup=False)


def _sums_cells(run: dict[str, Any]) -> tuple[str, str, str]:
    return number(run["sums"]["ms"], 3), number(run["floor_with_sums_ms"], 3), f"{run['share_of_floor']:.0%}"


def conditions_line(conditions: dict[str, Any]) -> str:
    """Return what a measurement depends on, as InProcessEngine.conditions has it, in a line."""
    ceilings = conditions["ceilings"]
    return (
        f"{conditions['device']}, commit {conditions['commit']}, {conditions['date']}: rank {conditions['shard']}, "
        f"{counted(conditions['layers'], 'layer')}; floor at {ceilings['bytes_per_s'] / 1e9:,.0f} GB/s and "
        f"{ceilings['flops_per_s'] / 1e12:,.3g} TFLOP/s ({ceilings['source']})"
    )


def wide_console(console: Console) -> Console:
    """Return the console, or one that does not fold tables to 80 columns where it writes to a file."""
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure decode steps of one rank over batch and context, beside their floor.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("sweep and report").add_argument
    add("--batch", type=counts, default=[1, 2, 4, 8, 16, 32, 64], metavar="B,B,...", help="(1,2,4,8,16,32,64)")
    add("--context", type=counts, default=[8192], metavar="L,L,...", help="tokens that a sequence has (8192)")
    add("--steps", type=count, default=200, metavar="N", help="measured of each, behind some to warm up (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="all figures: runs[], step_law, conditions")
    add("--png", type=Path, metavar="FILE", help="a plot of steps over batch with floors and fits (needs matplotlib)")
    add("--from", type=Path, dest="stored", metavar="FILE", help="show and draw a report of --json, measure nothing")
    add("--project", action="store_true", help="project steps of rank 0/4 on an H200 to four RTX PRO 6000")
    add("--quiet", action="store_true", help="no progress on stderr")
    add_flags(parser, has_ranks=True)
    return parser
