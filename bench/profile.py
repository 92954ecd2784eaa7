"""`isthmus profile`: the kernel bill of decode steps or a prompt's chunk, of a running worker or an engine here."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.progress import Progress
from bench.report import number, write_json
from bench.step import WARM_STEPS, wide_console
from bench.step_flags import add_flags, add_prompt_flags, count
from engine.flags import parse_flags
from engine.kernel_bill import make_bill
from engine.steady_batch import SPAN, StepFailed
from kernels.table import counted

_KERNELS = 5  # of a line, in the table
_SMALL = 0.001  # of the step: lines below are shown together, and apart in the JSON

_EXAMPLES = """\
examples
  isthmus profile --url http://127.0.0.1:8002 --steps 20 --trace steps.json     a decode worker, while requests run
  isthmus profile --model dsv4-tiny --device cpu --batch 4 --context 256        an engine of its own, here
  isthmus profile --model ./DeepSeek-V4-Flash --load-format synthetic --simulate-rank 0/4 --device cuda --batch 16
  isthmus profile --model ./DeepSeek-V4-Flash --load-format synthetic --simulate-rank 0/4 --device cuda --prompt 8192

what the table says
  part        of the step; a kernel that is in no table stands under its own name
  share, us   of a step; lines add up to the step. Where kernels overlap, an instant is the one's that runs longest:
              a line says what the part adds behind what came before it
  calls       launches a step, and microseconds of each
  kernels     calls, name, grid and microseconds of each, the dearest first
  floor, x    bytes that the part must read over bandwidth (or its products over their rate), and how many times that
  TFLOP/s     of the products of a query or a token with keys or weights, two operations each
  if free     how many times faster the step would be without the part: what there is to gain at most
  idle        instants at which the device ran nothing, inside a step and between two

Steps take longer under the profiler, between kernels above all; the step's true length stands above the table. The
trace opens in https://ui.perfetto.dev. No root is needed. A worker stands still for a second or more when it ends.
"""


def main(argv: Sequence[str], *, prog: str = "isthmus profile") -> int:
    """Profile and print: 0 well, 1 nothing to show, 2 wrong usage. Raises ConfigError."""
    parser = _parser(prog)
    args = parse_flags(parser, argv)
    if args.url and args.prompt:
        parser.error("--prompt runs in an engine in this process: give --model in place of --url")
    try:
        report = ask(args) if args.url else measure(args, Progress(quiet=args.quiet))
    except (httpx.HTTPError, httpx.InvalidURL, StepFailed, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json:
        write_json(report, args.json)
    return 0


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report of a running worker, whose trace is copied to args.trace if this host can read it."""
    url, wanted = f"{args.url.rstrip('/')}/profile", {"steps": args.steps, "timeout_s": args.timeout}
    response = httpx.post(url, json=wanted, timeout=args.timeout + 60, trust_env=False)
    if response.status_code != 200:
        raise httpx.HTTPError(f"{url} answered {response.status_code}: {response.text}")
    report: dict[str, Any] = response.json()
    if args.trace:
        shutil.copyfile(report["trace"], args.trace)
        report["trace"] = str(args.trace)
    return report


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the report of an engine in this process."""
    from bench.in_process import InProcessEngine
    from engine.step_profiler import StepProfiler, report_of

    if args.prompt:
        return measure_prompt(args, progress)
    engine = InProcessEngine(args, sequences=args.batch, longest=args.context + SPAN, say=progress.say)
    steady = engine.steady(args.batch, args.context)
    steady.run(WARM_STEPS)
    step_ms = statistics.median(step.ms for step in steady.run(max(args.steps, 50)))
    with tempfile.TemporaryDirectory(prefix="isthmus-profile-") as folder:
        profiler = StepProfiler(engine.runner.device, args.trace or Path(folder) / "trace.json")
        profiler.start()
        steady.run(args.steps)
        trace = profiler.stop()
    floor = engine.floor.parts(args.batch, args.context)
    bill = make_bill(trace, steps=args.steps + 1, floor=floor, device=engine.device if trace.is_device else None)
    report = report_of(bill, engine.device, floor, batch=args.batch, context=args.context, step_ms=step_ms)
    nodes = engine.nodes(args.batch)
    return report | {"conditions": engine.conditions(), "nodes": nodes, "trace": str(args.trace or "")}


def measure_prompt(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the report of the last chunk of a prompt in an engine in this process."""
    from bench.in_process import InProcessEngine
    from engine.step_profiler import StepProfiler, report_of

    chunk = min(args.chunk_tokens, args.prompt)
    engine = InProcessEngine(args, sequences=1, longest=args.prompt, chunk_tokens=chunk, say=progress.say)
    prompt = engine.prompt(args.prompt)
    prompt.warm()
    step_ms = statistics.median(prompt.run_last().ms for _ in range(3))
    with tempfile.TemporaryDirectory(prefix="isthmus-profile-") as folder:
        profiler = StepProfiler(engine.runner.device, args.trace or Path(folder) / "trace.json")
        profiler.start()
        last = prompt.run_last()
        trace = profiler.stop()
    floor = engine.floor.chunk_parts(last.start, last.tokens, logits=1)
    bill = make_bill(trace, steps=1, floor=floor, device=engine.device if trace.is_device else None)
    report = report_of(bill, engine.device, floor, batch=1, context=args.prompt, step_ms=step_ms)
    chunks = {"chunk_tokens": last.tokens, "trace": str(args.trace or "")}
    return report | {"conditions": engine.conditions(), "nodes": None} | chunks


def show(report: dict[str, Any]) -> None:
    """Print the bill, with the ceilings."""
    bill = report["bill"]
    console = Console(highlight=False, soft_wrap=True)
    chunk, context = report.get("chunk_tokens", 0), f"{report['context']:,.0f} tokens"
    what = f"{bill['steps']:g} steps of {report['batch']:.4g} sequences at {context}"
    if chunk:
        what = f"the last {chunk:,} tokens of a prompt of {context}"
    console.print(
        f"{report['device']}: {what}: "
        f"{report['step_ms']:.3f} ms a step, {bill['step_us'] / 1000:.3f} in the trace"
        + (f"; floor {bill['floor_us'] / 1000:.3f}" if bill["floor_us"] else ""),
        markup=False,
    )
    table = Table("part", box=None, header_style="bold")
    for head in ("share", "us", "calls", "us a call", "floor us", "x", "TFLOP/s", "if free", "kernels"):
        table.add_column(head, justify="left" if head == "kernels" else "right", overflow="fold")
    shown = [line for line in bill["lines"] if line["share"] >= _SMALL or line["floor_us"]]
    for line in shown:
        table.add_row(
            escape(line["part"]),
            f"{line['share']:.1%}",
            number(line["us"], 1),
            number(line["calls"], 0) if line["calls"] else number(None),
            number(line["us_per_call"], 2),
            number(line["floor_us"], 1),
            number(line["over_floor"], 1),
            number(_tflops(line, report["floor_parts"]), 1),
            "all" if line["speedup_if_free"] is None else f"{line['speedup_if_free']:.2f}x",
            escape(_kernels(line)),
        )
    rest = [line for line in bill["lines"] if line not in shown]
    if rest:
        us = sum(line["us"] for line in rest)
        share, calls = us / bill["step_us"], sum(line["calls"] for line in rest)
        table.add_row(
            f"{counted(len(rest), 'other')} below {_SMALL:.1%}", f"{share:.1%}", number(us, 1), number(calls, 0)
        )
    wide_console(console).print(table)
    if report["trace"]:
        console.print(f"trace: {report['trace']}", markup=False)


def _tflops(line: dict[str, Any], floor_parts: dict[str, Any]) -> float | None:
    """Return at what rate a part does the multiplications that it can't do without; None where that says nothing."""
    part = floor_parts.get(line["part"])
    return part["flops"] / line["us"] / 1e6 if part and line["us"] else None


def _kernels(line: dict[str, Any]) -> str:
    """Return the dearest kernels of a line with their grids, if they say more than its name does."""
    kernels = list(line["kernels"].items())
    if [name for name, _ in kernels] == [line["part"]]:
        return ""
    told = [
        f"{kernel['calls']:.3g} {name} at {kernel['us'] / kernel['calls']:.1f}" for name, kernel in kernels[:_KERNELS]
    ]
    more = [f"{len(kernels) - _KERNELS} more"] if len(kernels) > _KERNELS else []
    return ", ".join(told + more)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show where the time of a decode step or of a prompt's chunk goes, and what could be gained.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what and how much").add_argument
    add("--url", help="of a worker, as `isthmus status` and /topology show it; without it, an engine in this process")
    add("--steps", type=count, default=20, metavar="N", help="(%(default)s)")
    add("--timeout", type=float, default=60.0, metavar="S", help="for so many steps of a worker to run (%(default)g)")
    add("--batch", type=count, default=16, metavar="B", help="sequences of an engine in this process (%(default)s)")
    add("--context", type=count, default=8192, metavar="L", help="tokens that each of them has (%(default)s)")
    add(
        "--prompt",
        type=count,
        default=0,
        metavar="L",
        help="the last chunk of a prompt of L tokens, in place of decode",
    )
    add_prompt_flags(add)
    add("--trace", type=Path, metavar="FILE", help="keep the Chrome trace")
    add("--json", type=Path, metavar="FILE", help="all figures")
    add("--quiet", action="store_true", help="no progress on stderr")
    add_flags(parser)
    return parser
