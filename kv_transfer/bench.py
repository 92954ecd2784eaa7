"""Measure the KV cache's way between two processes: `isthmus bench transfer`, = `python -m kv_transfer.bench`.

Two fresh processes allocate pools in a model's cache layout, as prefill and decode ranks do. One writes prompts of
random bytes into the other's pool; every repetition is proven by checksums of what landed, so that a wrong lane can't
shine. For each length, with blocks that are neighbours on both sides (merged: few pieces) and in random order on both
(fragmented: a piece per block and group):

    post      inside the call that starts the write. On shared-memory lanes that call copies.
    done      from the post to the end of the write, as its writer sees it
    arrival   from the post until the receiver's poll has returned the notification: decode can start

    GB/s      bytes in `done`; beside it the same bytes in one piece over the same lane, and a plain copy of them within
              one process's memory

With --chunk-tokens prompts are also pushed chunk by chunk, as prefill does while it computes. Those lines give post,
done and arrival of the last chunk alone, from the moment it could be planned: what stays exposed; GB/s is of the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kv_transfer.bench_layouts import BLOCK_TOKENS, LAYOUTS
from kv_transfer.bench_receiver import Setting, receive
from kv_transfer.bench_run import End, Run, Step
from kv_transfer.bench_writer import write

TRANSPORTS = ("nixl", "host", "ucxx")
_PATIENCE_S = 10.0
_EXAMPLES = """\
examples:
  isthmus bench transfer                                           every transport that starts here, on the CPU
  isthmus bench transfer --transport nixl --lengths 8192 --repetitions 30
  isthmus bench transfer --device cuda --chunk-tokens 8192         two processes on one GPU
  isthmus bench transfer --device cuda --device-ids 0,1            from one GPU to another
  UCX_TLS=tcp isthmus bench transfer --transport nixl              what a fall to TCP would cost

Host memory it takes: for 131,072 tokens of V4-Flash 1.1 GB in the target and 1.6 GB in the source, on the GPU with
--device cuda. The machine should be idle. The bar on CPUs: fragmented at least 60 % of one piece.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one transport. error: "" if all was measured.  has_failed: it started, and then went wrong."""

    transport: str
    runs: list[Run]
    error: str
    has_failed: bool


def measure(setting: Setting, show: Callable[[Step], None]) -> Outcome:
    """Run the two processes of one transport to their end."""
    context = multiprocessing.get_context("spawn")
    results, results_end = context.Pipe(duplex=False)
    receiver, receiver_end = context.Pipe()
    target = context.Process(target=receive, args=(setting, receiver_end), daemon=True)
    source = context.Process(target=write, args=(setting, results_end, receiver), daemon=True)
    runs: list[Run] = []
    end: End | None = None
    try:
        for process in (target, source):
            process.start()
        for connection in (receiver, receiver_end, results_end):
            connection.close()  # else nobody would see the other's end
        with contextlib.suppress(EOFError):
            while end is None:
                match results.recv():
                    case Step() as step:
                        show(step)
                    case Run() as run:
                        runs.append(run)
                    case End() as end:
                        pass
        for process in (source, target):
            process.join(_PATIENCE_S)
        codes = {"source": source.exitcode, "target": target.exitcode}
    finally:
        for process in (source, target):
            if process.is_alive():
                process.kill()
    end = end or End("it ended before its time")
    errors = [f"the {name} process ended with code {code}" for name, code in codes.items() if code != 0]
    has_failed = bool(errors or (end.error and end.has_started))
    return Outcome(setting.transport, runs, "; ".join([end.error] * bool(end.error) + errors), has_failed)


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m kv_transfer.bench") -> int:
    """Measure; return 0 well, 1 if what was asked for failed, landed corrupt, or could not run at all."""
    args = _arguments(argv, prog)
    names = TRANSPORTS if args.transport == "all" else (args.transport,)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    outcomes: list[Outcome] = []
    for name in names:
        setting = Setting(
            transport=name,
            device=args.device,
            device_ids=args.device_ids,
            layout=args.model_layout,
            lengths=args.lengths,
            chunk_tokens=args.chunk_tokens,
            repetitions=args.repetitions,
            nap_us=args.nap_us,
            seed=args.seed,
        )
        with Progress(console=console, transient=True) as progress:
            outcomes.append(measure(setting, _shown(progress, name)))
        console.print(f"{name}: {outcomes[-1].error or 'measured, every byte verified'}", markup=False)
        if args.json:
            args.json.write_text(json.dumps(_document(args, outcomes), indent=1) + "\n")
    runs = [run for outcome in outcomes for run in outcome.runs]
    if runs:
        out = Console(highlight=False)
        Console(highlight=False, width=out.width if out.is_terminal else 200).print(_table(runs))
    has_failed = any(o.has_failed or (o.error and args.transport != "all") for o in outcomes)
    return 1 if has_failed or not runs else 0


def _shown(progress: Progress, name: str) -> Callable[[Step], None]:
    """Return what shows steps: as a bar on a terminal, as a line for each length elsewhere."""
    bar = progress.add_task(f"{name}: starting", total=None)
    last = ""

    def show(step: Step) -> None:
        nonlocal last
        if not progress.console.is_terminal and step.what != last:
            progress.console.print(f"{name}: {step.what}")
        last = step.what
        progress.update(bar, description=f"{name}: {step.what}", total=step.total, completed=step.done)

    return show


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption="p50 / best; rates in GB/s", caption_justify="left")
    for head in ("transport, lane", "tokens", "blocks"):
        table.add_column(head, justify="right" if head == "tokens" else "left", no_wrap=True)
    columns = ("MB", "pieces", "post us", "done us", "arrival us", "GB/s", "one piece", "of one piece", "memcpy")
    for head in columns:
        table.add_column(head, justify="right")
    for run in runs:
        table.add_row(
            f"{run.transport}, {run.lane}",
            f"{run.tokens:,}",
            run.order + (f", last of {run.chunk_tokens:,}" if run.chunk_tokens else ""),
            f"{run.num_bytes / 1e6:.1f}",
            f"{run.num_pieces:,}",
            f"{run.post_us:,.0f}",
            f"{run.done_us:,.0f} / {run.best_done_us:,.0f}",
            f"{run.arrival_us:,.0f} / {run.best_arrival_us:,.0f}",
            f"{run.gb_per_s:.1f} / {run.best_gb_per_s:.1f}",
            f"{run.one_piece_gb_per_s:.1f} / {run.best_one_piece_gb_per_s:.1f}",
            f"{run.share_of_one_piece:.0%} / {run.best_share_of_one_piece:.0%}",
            f"{run.memcpy_gb_per_s:.1f}",
        )
    return table


def _document(args: argparse.Namespace, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "conditions": _conditions(args),
        "runs": [
            {k: round(v, 3) if isinstance(v, float) else v for k, v in dataclasses.asdict(run).items()}
            for outcome in outcomes
            for run in outcome.runs
        ],
        "not_measured": {outcome.transport: outcome.error for outcome in outcomes if outcome.error},
    }


def _conditions(args: argparse.Namespace) -> dict[str, Any]:
    said = {k: v for k, v in vars(args).items() if k not in ("json", "transport")}
    versions = {}
    for name in ("nixl-cu13", "nixl-cu12", "ucxx-cu13", "torch", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return said | {
        "ucx": {name: value for name, value in os.environ.items() if name.startswith("UCX_")},
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpus": _gpu_names(args),
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpu_names(args: argparse.Namespace) -> list[str]:
    if args.device == "cpu":
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in args.device_ids if i < torch.cuda.device_count()]


def _commit() -> str:
    here = str(Path(__file__).parent)
    try:
        said = [
            subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "."])
        ]
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ISTHMUS_COMMIT", "unknown")
    return said[0] + ("+" if said[1] else "")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word.replace("_", "")) for word in text.split(","))


def _arguments(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--transport", choices=(*TRANSPORTS, "all"), default="all", help="which one (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pools lie (cpu)")
    parser.add_argument(
        "--device-ids", type=_numbers, default=(0, 0), metavar="A,B", help="GPUs of source and target (0,0)"
    )
    parser.add_argument("--model-layout", choices=LAYOUTS, default="v4-flash", help="whose cache (v4-flash)")
    parser.add_argument(
        "--lengths", type=_numbers, default=(512, 8192, 131072), metavar="N,..", help="tokens (512,8192,131072)"
    )
    parser.add_argument("--chunk-tokens", type=int, default=0, metavar="N", help="push by such chunks, too (0: don't)")
    parser.add_argument("--repetitions", type=int, default=10, metavar="N", help="of each, after one unmeasured (10)")
    parser.add_argument(
        "--nap-us", type=float, default=100.0, metavar="US", help="the receiver's pause between polls, 0: spin (100)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of contents and block orders (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    args = parser.parse_args(argv)
    if min(args.lengths) < 1:
        parser.error(f"--lengths {min(args.lengths)}: a prompt has at least one token")
    if args.chunk_tokens < 0 or args.chunk_tokens % BLOCK_TOKENS:
        parser.error(f"--chunk-tokens {args.chunk_tokens}: must be a multiple of the block, {BLOCK_TOKENS} tokens")
    if len(args.device_ids) != 2 or min(args.device_ids) < 0:
        parser.error("--device-ids: two numbers, of the source's and of the target's GPU")
    if args.repetitions < 1 or args.nap_us < 0:
        parser.error("--repetitions must be at least 1, --nap-us at least 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
