"""A pair or a cluster started for a benchmark, waited for, measured over HTTP and ended: `python -m bench.pair`.

    python -m bench.pair --prefill "--port 8001 ..." --decode "--port 8002 ..." --router "--port 8000 ..." \\
        --prefill-gpus 0 --decode-gpus 1 --runs short,long --json pair.json       the roles by hand, no Ray
    python -m bench.pair --up cluster.yaml --runs short,long --json pair.json     by `isthmus up`

Runs: `ttft`: --long prompts one at a time; `wave`: as many requests at once as --concurrency says, all decode together;
`short`, `long`: `isthmus bench serve` over --concurrency. `longest`: --longest prompts, one and four at a time.
`answers`: greedy answers to --answer-prompts with their log probabilities, for bench.answers. `faults`: SIGKILL of
either role while it pushes or is pushed to, by hand only: the workers need --test-seams true. Reports of bench serve
are written beside FILE.

In FILE: conditions, pairs, runs (medians and means of bench serve), splits (where TTFT goes, means of /metrics over a
run, milliseconds a request), itl (mean ITL over the step of --step's report at the same batch), answers, faults,
problems. Exit code 1 if there are problems: a request failed, it was not ready in time. bench.bars holds it to bars.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pair_answers import NoAnswer, ask
from bench.pair_faults import strike
from bench.pair_processes import Cluster, NotReady
from bench.report import write_json
from bench.step_flags import count, counts
from kernels.bench import current_commit
from kernels.table import counted

RUNS = ("ttft", "wave", "short", "long", "longest", "answers", "faults")
_LONGEST_AT_ONCE = {1: 3, 4: 8}  # requests by concurrency
_STATS_S = 1.5  # workers say theirs once a second


class Measurement:
    """What is measured of one running cluster."""

    def __init__(self, cluster: Cluster, args: argparse.Namespace) -> None:
        self.cluster, self._args = cluster, args
        self.runs: dict[str, Any] = {}
        self.splits: dict[str, Any] = {}
        self.answers: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def run(self, name: str) -> None:
        """Do one of RUNS."""
        args, each = self._args, [str(one) for one in self._args.concurrency]
        lengths = {"short": args.short, "long": args.long}
        match name:
            case "ttft":
                self._serve(name, "--concurrency", "1", *_lengths(args.long, 8), "--requests", "8")
            case "wave":
                for one in each:
                    words = (*_lengths(args.short, args.wave_output), "--requests", one)
                    self._serve(f"wave{one}", "--concurrency", one, *words)
            case "longest":
                for at_once, requests in _LONGEST_AT_ONCE.items():
                    words = (*_lengths(args.longest, args.longest_output), "--requests", str(requests))
                    self._serve(f"longest{at_once}", "--concurrency", str(at_once), *words)
            case "answers":
                self._answers()
            case "faults":
                self.faults = strike(self.cluster, prompt=args.fault_prompt, model=self.cluster.model_name())
                self.problems += [f"{one['what']}: {one['fault']}" for one in self.faults if one["fault"]]
            case _:
                self._serve(name, "--concurrency", ",".join(each), *_lengths(lengths[name], args.output))

    def _answers(self) -> None:
        args = self._args
        try:
            self.answers = ask(self.cluster, args.answer_prompts, output=args.answer_output)
        except (NoAnswer, OSError) as error:
            self.problems.append(f"answers: {error}")
        print(f"answers: {len(self.answers)}", flush=True)

    def _serve(self, name: str, *words: str) -> None:
        path = self._args.json.with_name(f"{self._args.json.stem}_{name}.json")
        before = self.cluster.metrics()
        asked = ["--url", self.cluster.url, "--json", str(path), "--html", str(path.with_suffix(".html")), *words]
        problem = self.cluster.command(["bench", "serve", *asked, "--quiet"], limit_s=self._args.limit)
        time.sleep(_STATS_S)
        self.splits[name] = split(before, self.cluster.metrics())
        if problem:
            self.problems.append(f"{name}: {problem}")
            return
        self.runs[name] = [_summary(run) for run in json.loads(path.read_text())["runs"]]
        failed = sum(run["failed"] for run in self.runs[name])
        if failed:
            self.problems.append(f"{name}: {counted(failed, 'request')} failed")
        print(f"{name}: " + "; ".join(_line(run) for run in self.runs[name]), flush=True)

    def against_step(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """Return mean ITL of the waves over the engine's step at the same batch."""
        steps = {run["batch"]: run["step_ms"] for run in step["runs"]}
        found = []
        for name, runs in self.runs.items():
            for run in runs:
                if name.startswith("wave") and run["concurrency"] in steps and run["itl_mean_ms"]:
                    engine = steps[run["concurrency"]]
                    ratio = run["itl_mean_ms"] / engine
                    row = {"concurrency": run["concurrency"], "itl_mean_ms": run["itl_mean_ms"], "step_ms": engine}
                    found.append(row | {"ratio": ratio})
        return found


def split(before: dict[str, float], after: dict[str, float]) -> dict[str, float | None]:
    """Return where the time to the first token went between two readings of /metrics: means, ms a request."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def mean(sum_of: str, count_of: str, unit: float) -> float | None:
        number = grown.get(count_of, 0.0)
        return round(unit * grown.get(sum_of, 0.0) / number, 3) if number > 0 else None

    router = {"ttft": "time_to_first_token", "router_queue": "request_queue_time"}
    router |= {"prefill_queue": "prefill_queue_time", "prefill_compute": "prefill_compute_time"}
    found: dict[str, float | None] = {"requests": grown.get("time_to_first_token_seconds_count")}
    for name, metric in router.items():
        found[f"{name}_ms"] = mean(f"{metric}_seconds_sum", f"{metric}_seconds_count", 1e3)
    for name, metric in (("transfer", "transfer"), ("exposed", "transfer_exposed"), ("post", "transfer_post")):
        found[f"{name}_ms"] = mean(f"prefill.{metric}_seconds", "prefill.handovers", 1e3)
    found["mb"] = mean("prefill.transfer_bytes", "prefill.handovers", 1e-6)
    found["pieces"] = mean("prefill.transfer_pieces", "prefill.handovers", 1)
    found["arrival_ms"] = mean("decode.arrival_seconds", "decode.timed_arrivals", 1e3)
    found["steps"], found["wasted_steps"] = grown.get("decode.num_steps"), grown.get("decode.wasted_steps")
    return found


def _lengths(prompt: int, output: int) -> tuple[str, ...]:
    return "--input-len", str(prompt), "--output-len", str(output)


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    def figure(name: str, which: str) -> Any:
        return (run.get(name) or {}).get(which)

    return {
        "concurrency": run["concurrency"],
        "requests": run["requests"],
        "failed": run["failed"],
        "tokens_per_s_average": figure("average", "output_tokens_per_s"),
        "tokens_per_s_steady": figure("steady", "output_tokens_per_s"),
        "tokens_per_s_sustained": figure("sustained", "output_tokens_per_s"),
        "ttft_p50_ms": figure("ttft_ms", "p50"),
        "ttft_p99_ms": figure("ttft_ms", "p99"),
        "itl_mean_ms": figure("itl_ms", "mean"),
        "itl_p50_ms": figure("itl_ms", "p50"),
        "itl_p99_ms": figure("itl_ms", "p99"),
    }


def _line(run: dict[str, Any]) -> str:
    figures = (("tokens_per_s_average", "tokens/s"), ("ttft_p50_ms", "ms TTFT"), ("itl_p50_ms", "ms ITL"))
    said = ", ".join(f"{run[name]:,.1f} {unit}" for name, unit in figures if run[name] is not None)
    return f"C={run['concurrency']} {said}"


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, end; return 1 if there are problems."""
    args = _arguments(argv)
    report: dict[str, Any] = {
        "conditions": {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "commit": current_commit(),
            "runs": args.runs,
            "concurrency": args.concurrency,
            "arguments": {k: str(v) for k, v in vars(args).items()},
        }
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _stop)  # `timeout` says so: workers must end, and what is known be written
    cluster = Cluster(args)
    measurement = Measurement(cluster, args)
    try:
        began = time.monotonic()
        topology = cluster.await_ready(args.ready)
        report["conditions"]["ready_s"] = round(time.monotonic() - began, 1)
        report["pairs"] = topology.get("pairs")
        report["workers"] = topology.get("workers")
        time.sleep(_STATS_S)  # the pair's canary is then in none of the runs
        for name in args.runs:
            measurement.run(name)
    except NotReady as error:
        measurement.problems.append(str(error))
    except _Stopped:
        measurement.problems.append("stopped by SIGTERM: its time was over; what was measured until then is here")
    finally:
        cluster.end()
    if args.step and args.step.exists():
        report["itl"] = measurement.against_step(json.loads(args.step.read_text()))
    report |= {name: getattr(measurement, name) for name in ("runs", "splits", "answers", "faults", "problems")}
    write_json(report, args.json)
    for problem in measurement.problems:
        print(f"problem: {problem}")
    return 1 if measurement.problems else 0


class _Stopped(Exception):
    """SIGTERM has come."""


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pair", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--up", default="", metavar="YAML", help="start it with `isthmus up`; else the three roles by hand")
    add("--prefill", default="", metavar="FLAGS", help="of `python -m prefill_worker`")
    add("--decode", default="", metavar="FLAGS", help="of `python -m decode_worker`")
    add("--common", default="", metavar="FLAGS", help="of both, in front of their own; of `up`, behind the YAML file")
    add("--model", default="dsv4-tiny", help="folder or published name (%(default)s)")
    add("--prefill-gpus", default="", metavar="0,1", help="CUDA_VISIBLE_DEVICES of prefill")
    add("--decode-gpus", default="", metavar="2,3", help="CUDA_VISIBLE_DEVICES of decode")
    add("--port", type=count, default=8000, help="of the router; the workers have the next two (%(default)s)")
    add("--runs", type=_runs, default=["ttft", "short"], metavar="NAME,..", help=f"of {', '.join(RUNS)}")
    add("--concurrency", type=counts, default=[1, 16, 64], metavar="C,..", help="(1,16,64)")
    add("--short", type=count, default=512, metavar="N", help="tokens of a short prompt (%(default)s)")
    add("--long", type=count, default=8192, metavar="N", help="tokens of a long prompt (%(default)s)")
    add("--output", type=count, default=256, metavar="N", help="tokens of an answer (%(default)s)")
    add("--wave-output", type=count, default=1024, metavar="N", help="tokens of an answer in a wave (%(default)s)")
    add("--longest", type=count, default=131_072, metavar="N", help="tokens of a very long prompt (%(default)s)")
    add("--longest-output", type=count, default=64, metavar="N", help="tokens of an answer to it (%(default)s)")
    add(
        "--answer-prompts", type=counts, default=[40, 300, 1000, 8192], metavar="N,..", help="tokens (40,300,1000,8192)"
    )
    add("--answer-output", type=count, default=32, metavar="N", help="tokens of an answer to them (%(default)s)")
    add("--fault-prompt", type=count, default=8192, metavar="N", help="tokens; several chunks (%(default)s)")
    add("--ready", type=float, default=240, metavar="S", help="longest wait until the pair is ready (%(default)s)")
    add("--limit", type=float, default=150, metavar="S", help="longest time of one bench serve (%(default)s)")
    add("--step", type=Path, metavar="FILE", help="a report of bench step, to compare ITL with")
    add("--json", type=Path, required=True, metavar="FILE", help="the report")
    return parser.parse_args(argv)


def _runs(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(RUNS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: wanted some of {', '.join(RUNS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
