"""`isthmus bench serve`: load for an OpenAI-compatible server, and a report that keeps its phases apart."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench import lengths
from bench.html import page
from bench.ladder import Ladder, Plan
from bench.lengths import Lengths
from bench.progress import Progress
from bench.prompts import Prompts, TextPrompts, TokenPrompts
from bench.report import is_failed, table, write_atomically, write_json
from bench.slo import NAMES, Slo
from bench.step_law import Experts
from bench.workload import Workload, read_trace
from router.tokenizer import Tokenizer

_T = TypeVar("_T")

_EXAMPLES = """\
examples
  isthmus bench serve --url http://127.0.0.1:8000 --concurrency 1,16,64 --input-len 512 --output-len 256
  isthmus bench serve --url http://host:8000 --rate 2,4,8 --duration 60 --slo ttft=2000,tpot=50
  isthmus bench serve --url http://host:8000 --trace requests.jsonl --json b.json --html b.html
  isthmus bench compare a.json b.json

what the table says
  steady      while all C streams decode and none waits: what decoding at C does
  sustained   from there until no request is left to replace one that ended: what C users get
  average     all tokens by all seconds, ramp and drain included: what most tools print. It depends on how long you ran.
  TTFT        from when a request was due to its first token      TPOT   milliseconds a token behind it, of each stream
  ITL         gaps between chunks, those of the steady state
  step law    milliseconds of a decode step against the number of streams in it; what it says of the next concurrency

Answers are made as long as asked (ignore_eos) where the server can; token ids or usage count them, reasoning included.
A run fails if one request does, or if the server buffers its stream: its line stays, the exit code is 1.
"""


def main(argv: Sequence[str], *, prog: str = "isthmus bench serve") -> int:
    """Run the benchmark: 0 well, 1 a run failed, 2 wrong usage, 130 stopped by hand, with a report even so."""
    parser = _parser(prog)
    args = parser.parse_args(argv)
    try:
        plan = plan_of(args)
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    progress = Progress(quiet=args.quiet)

    async def run() -> dict[str, Any]:
        return await Ladder(plan, progress=progress).run()

    report = asyncio.run(run())
    print(table(report))
    if args.json:
        write_json(report, args.json)
    if args.html:
        write_atomically(args.html, page(report))
    return 130 if report["interrupted"] else int(is_failed(report))


def plan_of(args: argparse.Namespace) -> Plan:
    """Check flags against each other. Raises ValueError naming the flag."""
    if args.concurrency and args.rate:
        raise ValueError("--concurrency and --rate: give one of them")
    rows = read_trace(args.trace) if args.trace else []
    replay = args.trace_speed if rows and not args.concurrency and not args.rate else None
    concurrency = args.concurrency or ([] if args.rate or replay else [1, 16])
    kind = args.prompts or ("text" if args.api == "chat" else "ids")
    if kind == "ids" and args.api == "chat":
        raise ValueError("--prompts ids: chat takes text only; use --api completions")
    tokenizer = Tokenizer.from_folder(args.tokenizer) if args.tokenizer else None
    if args.tokenizer and tokenizer is None:
        raise ValueError(f"--tokenizer {args.tokenizer}: has no tokenizer.json")
    of_ids = TokenPrompts.of(tokenizer) if tokenizer else TokenPrompts()
    prompts: Prompts = TextPrompts(tokenizer) if kind == "text" else of_ids
    workload = Workload(args.input_len, args.output_len, prompts, args.seed, rows)
    if replay is not None:
        workload.replay(label="check", speed=replay)
    return Plan(
        url=args.url,
        workload=workload,
        model=args.model,
        api=args.api,
        concurrencies=concurrency,
        rates=args.rate or [],
        replay_speed=replay,
        poisson=args.arrivals == "poisson",
        num_requests=args.requests,
        duration_s=args.duration,
        repeat=args.repeat,
        warmup=args.warmup,
        stall_timeout_s=args.stall_timeout,
        ignore_eos=not args.let_stop,
        slo=args.slo,
        experts=Experts(args.experts, args.experts_per_token),
        fields=args.body,
        headers=dict(args.header),
    )


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Send load to an OpenAI-compatible server and measure ramp, steady state and drain apart.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("server").add_argument
    add("--url", default="http://127.0.0.1:8000", help="with or without /v1 (%(default)s)")
    add("--model", help="name in the API; default: the first that /v1/models lists")
    add("--api", choices=["completions", "chat"], default="completions", help="(%(default)s)")
    add("--header", type=_header, action="append", default=[], metavar="NAME:VALUE", help="sent with every request")
    add("--body", type=_object, default={}, metavar="JSON", help="further fields, as '{\"temperature\": 0}'")
    add(
        "--stall-timeout",
        type=_positive,
        default=120.0,
        metavar="S",
        help="a stream that brings nothing for so long has failed (%(default)g)",
    )
    add = parser.add_argument_group("load").add_argument
    add(
        "--concurrency", type=_list_of(_count), metavar="C,C,...", help="so many streams at a time, one run each (1,16)"
    )
    add("--rate", type=_list_of(_positive), metavar="R,R,...", help="so many requests a second, one run each")
    add("--arrivals", choices=["poisson", "even"], default="poisson", help="of --rate (%(default)s)")
    add("--requests", type=_count, metavar="N", help="of each run; default: 2 C, at least 8; 64 with --rate")
    add("--duration", type=_positive, metavar="S", help="send no more after so long; streams under way finish")
    add(
        "--repeat",
        type=_count,
        default=1,
        metavar="N",
        help="each run so many times: `compare` needs 3 to see how runs vary",
    )
    add(
        "--warmup",
        type=_count_or_none,
        default=1,
        metavar="N",
        help="requests before each run, not measured (%(default)s)",
    )
    add = parser.add_argument_group("requests").add_argument
    add("--input-len", type=_checked(Lengths.parse), default="512", metavar="LENGTHS", help=f"{lengths.HELP} (512)")
    add(
        "--output-len",
        type=_checked(Lengths.parse),
        default="256",
        metavar="LENGTHS",
        help="the same for answers (256)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines with input_length, output_length and, to be replayed, timestamp in ms",
    )
    add(
        "--trace-speed",
        type=_positive,
        default=1.0,
        metavar="X",
        help="replay the trace's timestamps so many times as fast",
    )
    add(
        "--prompts",
        choices=["ids", "text"],
        help="token ids, exact in length (completions), or text (default with chat)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="the model's, for ids of its vocabulary and text of exact length",
    )
    add("--let-stop", action="store_true", help="let answers end where the model ends them: no ignore_eos")
    add("--seed", type=int, default=0, help="of lengths, prompts and arrivals (%(default)s)")
    add = parser.add_argument_group("report").add_argument
    add("--slo", type=_checked(Slo.parse), metavar="NAME=MS,...", help=f"bounds for goodput, of {', '.join(NAMES)}")
    add(
        "--experts",
        type=_count,
        default=256,
        metavar="N",
        help="routed experts a layer, for the step law (%(default)s)",
    )
    add("--experts-per-token", type=_count, default=6, metavar="N", help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="all figures, for `isthmus bench compare`")
    add("--html", type=Path, metavar="FILE", help="a page with plots, in one file")
    add("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _checked(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse` with its message shown by argparse, which hides that of a ValueError."""

    def checked(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _list_of(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [parse(part) for part in text.split(",")]


def _number(text: str, *, least: float, kind: Callable[[str], Any], what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf") or (kind is float and value == 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return value


def _count(text: str) -> int:
    return int(_number(text, least=1, kind=int, what="whole number of at least 1"))


def _count_or_none(text: str) -> int:
    return int(_number(text, least=0, kind=int, what="whole number"))


def _positive(text: str) -> float:
    return float(_number(text, least=0, kind=float, what="number above 0"))


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME:VALUE")
    return name.strip(), value.strip()


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("give a JSON object")
    return value
