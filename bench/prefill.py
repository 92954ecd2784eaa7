"""`isthmus bench prefill`: what prompts cost, chunk by chunk, beside the floor of each part."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.progress import Progress
from bench.report import number, write_json
from bench.step import conditions_line, stored_or_measured, wide_console
from bench.step_flags import add_flags, add_prompt_flags, count, counts
from engine.flags import parse_flags

if TYPE_CHECKING:
    from bench.in_process import InProcessEngine
    from engine.prompt_run import Chunk

_MIB = 2**20

_EXAMPLES = """\
examples
  isthmus bench prefill --model dsv4-tiny --device cpu --prompt 128,300 --chunk-tokens 128
  isthmus bench prefill --model ./DeepSeek-V4-Flash --load-format synthetic --simulate-rank 0/4 --device cuda \\
      --prompt 8192,131072 --json prefill.json
  isthmus bench prefill --from prefill.json                   show what was measured before, elsewhere

what is measured
  One rank in this process: chunks go to its runner as a leader's would, each when the one before has ended. No leader,
  no HTTP, no pushes, no exchange with other ranks. The first and the last chunk of a prompt run once before.
  ttft        milliseconds from the first chunk's plan to the first token: the sum of the chunks
  first, last milliseconds of the first and of the last chunk of full length
  floor       what multiplications and bytes of all chunks take at the device's rates, part by part
  x floor     ttft / floor
  workspace   memory that the chunks took beyond weights and cache

Of several runs of a prompt (--repeats) the median one counts. `isthmus profile --prompt N` bills a chunk's kernels.
"""


def main(argv: Sequence[str], *, prog: str = "isthmus bench prefill") -> int:
    """Run the benchmark: 0 well, 1 a chunk failed, 2 wrong usage. Raises ConfigError."""
    args = parse_flags(_parser(prog), argv)
    report = stored_or_measured(args, measure, prog=prog, command="bench prefill", wanted="chunk_ms")
    if isinstance(report, int):
        return report
    show(report)
    if args.json:
        write_json(report, args.json)
    return 0


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the report of prompts of all lengths in args.prompt."""
    from bench.in_process import InProcessEngine

    chunk = min(args.chunk_tokens, max(args.prompt))
    engine = InProcessEngine(args, sequences=1, longest=max(args.prompt), chunk_tokens=chunk, say=progress.say)
    runs = []
    for tokens in args.prompt:
        run = _figures(engine, tokens, repeats=args.repeats)
        progress.say(f"prompt {tokens:>7,}: {run['tokens_per_s']:,.0f} tokens/s, floor x {run['over_floor']:.2f}")
        runs.append(run)
    return {"conditions": engine.conditions() | {"chunk_tokens": chunk, "repeats": args.repeats}, "runs": runs}


def _figures(engine: InProcessEngine, tokens: int, *, repeats: int) -> dict[str, Any]:
    """Measure one length; return its entry in `runs`."""
    prompt = engine.prompt(tokens)
    prompt.warm()
    held = engine.held_bytes(reset=True)
    found = sorted((prompt.run() for _ in range(repeats)), key=lambda chunks: sum(c.ms for c in chunks))
    chunks = found[len(found) // 2]
    peak = engine.held_bytes(peak=True)
    ttft_ms = sum(chunk.ms for chunk in chunks)
    parts = floor_parts(engine, chunks)
    floor_ms = sum(part["us"] for part in parts.values()) / 1000
    full = [chunk.ms for chunk in chunks if chunk.tokens == chunks[0].tokens]
    return {
        "prompt": tokens,
        "chunks": len(chunks),
        "ttft_ms": ttft_ms,
        "tokens_per_s": 1000 * tokens / ttft_ms,
        "chunk_ms": [chunk.ms for chunk in chunks],
        "ms_per_chunk": statistics.mean(full),
        "first_ms": full[0],
        "last_ms": full[-1],
        "floor_ms": floor_ms,
        "over_floor": ttft_ms / floor_ms,
        "flops_per_s": sum(part["flops"] for part in parts.values()) / (ttft_ms / 1000),
        "workspace_bytes": None if held is None or peak is None else peak - held,
        "planned_workspace_bytes": engine.planned_workspace,
        "floor_parts": parts,
    }


def floor_parts(engine: InProcessEngine, chunks: Sequence[Chunk]) -> dict[str, dict[str, float]]:
    """Return microseconds, bytes and multiplications of each part of the last prompt's chunks, by name."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "bytes": 0.0, "flops": 0.0})
    for chunk in chunks:
        for part in engine.floor.chunk_parts(chunk.start, chunk.tokens, logits=int(chunk is chunks[-1])):
            figures = found[part.name]
            figures["us"] += part.floor_us(engine.device)
            figures["bytes"] += part.num_bytes
            figures["flops"] += part.flops
    return dict(found)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    conditions = report["conditions"]
    console = Console(highlight=False, soft_wrap=True)
    console.print(conditions_line(conditions) + f"; chunks of {conditions['chunk_tokens']:,}", markup=False)
    table = Table(box=None, header_style="bold")
    heads = ("prompt", "tokens/s", "ttft ms", "ms a chunk", "first", "last", "floor ms", "x floor", "TFLOP/s")
    for head in (*heads, "workspace MiB", "planned"):
        table.add_column(head, justify="right")
    for run in report["runs"]:
        table.add_row(
            f"{run['prompt']:,}",
            number(run["tokens_per_s"], 0),
            *(number(run[name], 1) for name in ("ttft_ms", "ms_per_chunk", "first_ms", "last_ms", "floor_ms")),
            number(run["over_floor"], 2),
            number(run["flops_per_s"] / 1e12, 1),
            *(number(None if (n := run[name]) is None else n / _MIB, 0) for name in _WORKSPACES),
        )
    wide_console(console).print(table)


_WORKSPACES = ("workspace_bytes", "planned_workspace_bytes")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure prompts of one rank, chunk by chunk, beside their floor.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("prompts and report").add_argument
    add("--prompt", type=counts, default=[8192], metavar="L,L,...", help="tokens of the prompts (8192)")
    add_prompt_flags(add)
    add("--repeats", type=count, default=1, metavar="N", help="runs of each prompt (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="all figures: runs[], conditions")
    add("--from", type=Path, dest="stored", metavar="FILE", help="show a report of --json, measure nothing")
    add("--quiet", action="store_true", help="no progress on stderr")
    add_flags(parser)
    return parser
