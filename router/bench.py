"""Measure the router alone: `isthmus bench router`, the same as `python -m router.bench --model FOLDER`.

The router runs as it does in production, in a process of its own, pinned to one core. Clients and workers share one
other process, and so one clock. The workers (router/loopback.py) answer at once with a token that costs nothing: all
the time between a request's last byte and its answer's first token is the router's, sockets included. Nothing is built
into the router for this, so nothing is paid when nobody measures; its stopwatches are put in from outside.

    own-time   requests arrive evenly at --rate, answers stream at a token per --step-ms. Own time is what the router
               adds: from the body received to the first call of a worker (parse, check, render, tokenize, queue), and
               from prefill's answer to the first byte (router/probe.py). Beside it, from outside: from the client's
               write of the request to its first token, sockets, both calls and the measuring process included.
    own-time-random   the same with random (Poisson) arrivals: bursts wait for each other.
    tokens     --batches times --streams answers at once; a frame has one token of each answer of a batch, and comes as
               soon as the clients have the batch's last one, so that no two tokens share an event. Tokens per second
               of wall time, and per second of the router's CPU time, which says the same where others use the core.
    memory     --requests short answers, streamed and not, a few refused, a few left by their client; the router's
               resident memory along the way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import functools
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from router.load import LoadClient, Setup, chat_body, running_router

BARS = {"own_time_p99_ms": 5.0, "tokens_per_s": 15_000.0, "growth_mib": 8.0}
Result = dict[str, Any]


# ---------------------------------------------------------------- what is measured


async def own_time(
    setup: Setup, args: argparse.Namespace, report: Callable[[float], None], *, is_random: bool = False
) -> Result:
    """Return the router's own time per request at `args.rate`, and its parts, in milliseconds."""
    rng = random.Random(0)
    arrived: dict[str, dict[str, float]] = {}
    setup.loopback.on_call = lambda path, message, now: arrived.setdefault(message.request_id[:32], {}).update(
        {path: now}
    )
    clients: list[tuple[float, float, str]] = []
    failed = 0

    async def ask(body: bytes) -> None:
        nonlocal failed
        client = await setup.client()
        status = await client.post("/v1/chat/completions", body)
        if status != 200 or client.num_tokens != args.answer_tokens:
            failed += 1
        else:
            start = client.head.find(b'"id":"chatcmpl-') + 15
            clients.append((client.sent, client.first_token, client.head[start : start + 32].decode()))
        setup.give_back(client)

    async def load(seconds: float) -> None:
        bodies = [chat_body(args.prompt_chars, args.answer_tokens, rng) for _ in range(int(seconds * args.rate))]
        begin = due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for body in bodies:
                due += rng.expovariate(args.rate) if is_random else 1 / args.rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(ask(body))
                report(min(1.0, (time.monotonic() - begin) / seconds))

    await load(min(2.0, args.seconds))  # connections, caches
    clients.clear()
    await setup.own_times()
    cpu, begin = setup.cpu_s(), time.monotonic()
    await load(args.seconds)
    took = time.monotonic() - begin
    own = await setup.own_times()
    setup.loopback.on_call = lambda path, message, now: None
    parts: dict[str, list[float]] = {"to_reserve": [], "to_prefill": [], "to_first_token": []}
    for sent, first, request_id in clients:
        at = arrived[request_id]
        parts["to_reserve"].append(at["/reserve"] - sent)
        parts["to_prefill"].append(at["/prefill"] - at["/reserve"])
        parts["to_first_token"].append(first - at["/prefill"])
    return {
        "arrivals": "random" if is_random else "even",
        "requests": len(clients),
        "failed": failed,
        "requests_per_s": round(len(clients) / took, 1),
        "prompt_chars": args.prompt_chars,
        "answer_tokens": args.answer_tokens,
        "own_time_ms": _spread([before + after for before, after in own]),
        "own_parts_ms": {
            "to_call": _spread([before for before, _ in own]),
            "to_first_byte": _spread([after for _, after in own]),
        },
        "outside_ms": _spread([first - sent for sent, first, _ in clients]),
        "parts_ms": {name: _spread(times) for name, times in parts.items()},
        "router_cpu": round((setup.cpu_s() - cpu) / took, 3),
    }


async def tokens(setup: Setup, args: argparse.Namespace, report: Callable[[float], None]) -> Result:
    """Return how many tokens a second the router forwards on `args.streams` answers at once."""
    rng = random.Random(1)
    loopback = setup.loopback
    loopback.is_held = True
    clients: list[LoadClient] = []
    posts: list[asyncio.Task[int]] = []
    for loopback.batch in range(args.batches):
        for _ in range(args.streams):
            client = await setup.client()
            client.on_tokens = functools.partial(loopback.note_received, loopback.batch)
            clients.append(client)
            body = chat_body(200, args.stream_tokens, rng)
            posts.append(asyncio.create_task(client.post("/v1/chat/completions", body)))
        while any(not c.num_tokens for c in clients):
            await asyncio.sleep(0.01)
    wanted = len(clients) * (args.stream_tokens - 1)
    events = sum(c.num_events for c in clients)
    cpu, own_cpu, begin = setup.cpu_s(), time.process_time(), time.monotonic()
    loopback.is_held = False
    loopback.wake()
    while any(not p.done() for p in posts):
        await asyncio.wait(posts, timeout=0.2)
        report(sum(c.num_tokens for c in clients) / wanted)
    took = time.monotonic() - begin
    cpu, own_cpu = setup.cpu_s() - cpu, time.process_time() - own_cpu
    received = sum(c.num_tokens for c in clients) - len(clients)
    return {
        "streams": args.streams,
        "batches": args.batches,
        "tokens": received,
        "lost": wanted - received,
        "failed": sum(p.result() != 200 for p in posts),
        # An answer's last chunk and [DONE] are events without a token.
        "tokens_per_event": round(received / (sum(c.num_events for c in clients) - events - 2 * len(clients)), 3),
        "tokens_per_s": round(received / took),
        "tokens_per_cpu_s": round(received / cpu),
        "router_cpu": round(cpu / took, 3),
        "load_cpu": round(own_cpu / took, 3),
    }


async def memory(setup: Setup, args: argparse.Namespace, report: Callable[[float], None]) -> Result:
    """Return the router's memory over `args.requests` requests, of which one in 50 is left and one in 50 refused."""
    rng = random.Random(2)
    warm_up = args.requests // 5
    left = num_done = failed = 0
    mib: dict[int, float] = {}
    begin, cpu = time.monotonic(), setup.cpu_s()

    async def ask(number: int) -> None:
        nonlocal left, failed
        kind = number % 50
        client = await setup.client()
        if kind == 0:
            status, wanted = await client.post("/v1/chat/completions", chat_body(100, -1, rng)), 400
        elif kind == 1:
            post = asyncio.create_task(client.post("/v1/chat/completions", chat_body(100, 100_000, rng)))
            while not client.num_tokens and not post.done():
                await asyncio.sleep(0.001)
            client.close()
            await asyncio.wait({post})
            post.exception()
            left += 1
            return
        else:
            body = chat_body(rng.randrange(20, 400), 4, rng, stream=bool(number % 2))
            status, wanted = await client.post("/v1/chat/completions", body), 200
        failed += status != wanted
        setup.give_back(client)

    numbers = iter(range(args.requests))

    async def work() -> None:
        nonlocal num_done
        for number in numbers:
            await ask(number)
            num_done += 1
            if num_done == warm_up or num_done % max(1, args.requests // 20) == 0:
                mib[num_done] = round(setup.rss_mib(), 1)
                report(num_done / args.requests)

    await asyncio.gather(*(work() for _ in range(args.clients)))
    took = time.monotonic() - begin
    return {
        "requests": args.requests,
        "left_by_client": left,
        "failed": failed,
        "requests_per_s": round(args.requests / took),
        "requests_per_cpu_s": round(args.requests / (setup.cpu_s() - cpu)),
        "mib_by_requests": mib,
        "warm_up": warm_up,
        "growth_mib": round(max(list(mib.values())[-3:]) - mib[warm_up], 1),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest, in milliseconds."""
    ms = sorted(1000 * s for s in seconds)
    cut = statistics.quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else ms * 99
    return {"p50": round(cut[49], 3), "p99": round(cut[98], 3), "max": round(ms[-1], 3)}


# ---------------------------------------------------------------- the command

_EXAMPLES = """\
examples:
  isthmus bench router                                 everything, four minutes
  isthmus bench router --only own-time --rate 400      twice the load of the bar
  isthmus bench router --only tokens --streams 256
  isthmus bench router --model ./checkpoint --json rows.json     with another tokenizer

The bars: own time p99 at most 5 ms at 200 even requests a second; 15,000 tokens a second; memory that stays. The
machine should be idle: clients and workers need a core of their own.
"""

SCENARIOS: dict[str, Callable[[Setup, argparse.Namespace, Callable[[float], None]], Awaitable[Result]]] = {
    "own-time": own_time,
    "own-time-random": functools.partial(own_time, is_random=True),
    "tokens": tokens,
    "memory": memory,
}


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m router.bench") -> int:
    """Measure; return 0 if every bar is met, 1 if one is missed or a request failed."""
    args = _arguments(argv, prog)
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if args.core is None else args.core
    if core not in cores:
        print(f"{prog}: --core {core}: this process may run on {cores} only", file=sys.stderr)
        return 2
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores) - {core})
    gc.disable()  # this process's pauses would count as the router's
    results: dict[str, Result] = {}
    console = Console(stderr=True)
    for name in args.only or SCENARIOS:
        with Progress(console=console, transient=True) as progress:
            report = functools.partial(_advance, progress, progress.add_task(name, total=1.0))
            results[name] = asyncio.run(_run(name, args, core, report))
        console.print(f"{name} measured", highlight=False)
        if args.json:
            args.json.write_text(json.dumps({"conditions": _conditions(args, core), **results}, indent=1) + "\n")
    rows = _rows(results)
    table = Table("what", "measured", "bar", "conditions")
    for what, measured, limit, conditions, _ in rows:
        table.add_row(what, measured, limit, conditions)
    Console().print(table)
    return 0 if all(is_met for *_, is_met in rows) else 1


def _advance(progress: Progress, bar: TaskID, done: float) -> None:
    progress.update(bar, completed=done)


async def _run(name: str, args: argparse.Namespace, core: int, report: Callable[[float], None]) -> Result:
    step_s = args.step_ms / 1000 if name.startswith("own-time") else 0.001 if name == "memory" else 0.0
    module = "router.probe" if name.startswith("own-time") else "router"
    async with running_router(args.model, step_s=step_s, core=core, module=module) as setup:
        return await SCENARIOS[name](setup, args, report)


def _rows(results: dict[str, Result]) -> list[tuple[str, str, str, str, bool]]:
    rows = []
    for found in (results[name] for name in ("own-time", "own-time-random") if name in results):
        p50, p99 = found["own_time_ms"]["p50"], found["own_time_ms"]["p99"]
        where = f"{found['requests_per_s']} requests/s of {found['prompt_chars']} characters, {found['failed']} failed"
        is_even = found["arrivals"] == "even"
        is_met = not found["failed"] and (p99 <= BARS["own_time_p99_ms"] or not is_even)
        what = f"own time, p50 / p99, {found['arrivals']} arrivals"
        rows.append((what, f"{p50:.2f} / {p99:.2f} ms", "p99 <= 5 ms" if is_even else "", where, is_met))
        outside = f"{found['outside_ms']['p50']:.2f} / {found['outside_ms']['p99']:.2f} ms"
        rows.append(("  from outside, p50 / p99", outside, "", "the client's write to its first token", True))
        parts = " + ".join(f"{part['p50']:.2f}" for part in found["parts_ms"].values())
        rows.append(("  to reserve + to prefill + to token", f"{parts} ms", "", "medians of that", True))
        rows.append(("  router's core", f"{found['router_cpu']:.0%}", "", "busy meanwhile", True))
    if "tokens" in results:
        found = results["tokens"]
        where = f"{found['batches']} x {found['streams']} streams, {found['tokens_per_event']} tokens an event, "
        where += f"{found['failed']} failed, {found['lost']} lost"
        is_met = found["tokens_per_s"] >= BARS["tokens_per_s"] and not found["failed"] and not found["lost"]
        rows.append(("tokens/s", f"{found['tokens_per_s']:,}", ">= 15,000", where, is_met))
        where = f"router's core {found['router_cpu']:.0%} busy, clients' and workers' {found['load_cpu']:.0%}"
        rows.append(("  per second of CPU", f"{found['tokens_per_cpu_s']:,}", "", where, True))
    if "memory" in results:
        found = results["memory"]
        mib = list(found["mib_by_requests"].values())
        where = f"{found['requests']:,} requests, {found['left_by_client']} left, {found['failed']} failed"
        is_met = found["growth_mib"] <= BARS["growth_mib"] and not found["failed"]
        rows.append(("memory", f"{mib[0]:.0f} -> {mib[-1]:.0f} MiB", "flat", where, is_met))
        rows.append(("  requests/s", f"{found['requests_per_s']:,}", "", "answers of 4 tokens", True))
    return rows


def _conditions(args: argparse.Namespace, core: int) -> dict[str, Any]:
    said = {k: v for k, v in vars(args).items() if k not in ("json", "only", "model", "core")}
    packages = ("uvicorn", "fastapi", "starlette", "httptools", "msgspec", "tokenizers")
    return said | {
        "model": args.model.name,
        "core": core,
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _arguments(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def number(name: str, default: float, text: str) -> None:
        parser.add_argument(name, type=type(default), default=default, metavar="N", help=f"{text} ({default:g})")

    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="whose tokenizer.json is used")
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="measure this alone; may be repeated")
    parser.add_argument("--core", type=int, metavar="N", help="the router's core (the last one)")
    number("--rate", 200.0, "own time: requests per second")
    number("--seconds", 30.0, "own time: how long")
    number("--prompt-chars", 500, "own time: characters of a prompt")
    number("--answer-tokens", 16, "own time: tokens of an answer")
    number("--step-ms", 20.0, "own time: time between an answer's tokens")
    number("--streams", 64, "tokens: answers at once")
    number("--stream-tokens", 4000, "tokens: tokens of an answer")
    number("--batches", 2, "tokens: of so many answers each")
    number("--requests", 100_000, "memory: requests in all")
    number("--clients", 32, "memory: clients at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if isinstance(value, int | float) and name != "core" and value <= 0:
            parser.error(f"--{name.replace('_', '-')}: {value} must be above 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
