"""Run after run against one server, and what they say together."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from bench.client import Client, base_url, in_words
from bench.cost import CostMeter
from bench.dialect import EXTRAS, Dialect, Unreachable, negotiate
from bench.load import RunLog, closed_loop, open_loop
from bench.measurement import Measurement
from bench.progress import Progress
from bench.slo import Slo
from bench.step_law import Experts, StepLaw, points_of
from bench.stream import Outcome, Stream
from bench.workload import Request, Workload

PROBE_TOKENS = 4
_PROBE_INPUT = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What `bench serve` is to do. One of concurrencies, rates and replays is given.

    num_requests: of each run; None: twice as many as streams, at least 8.   warmup: requests before each run.
    replay_speed: the trace's own times are followed, so many times as fast.   fields: further fields of every body.
    """

    url: str
    workload: Workload
    model: str | None = None
    api: str = "completions"
    concurrencies: Sequence[int] = ()
    rates: Sequence[float] = ()
    replay_speed: float | None = None
    poisson: bool = True
    num_requests: int | None = None
    duration_s: float | None = None
    repeat: int = 1
    warmup: int = 1
    stall_timeout_s: float = 120.0
    ignore_eos: bool = True
    slo: Slo | None = None
    experts: Experts = field(default_factory=Experts)
    fields: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def runs(self) -> list[tuple[str, int | None, float | None]]:
        """Return label, concurrency and rate of each run."""
        if self.replay_speed is not None:
            once: list[tuple[str, int | None, float | None]] = [(f"trace x{self.replay_speed:g}", None, None)]
        else:
            once = [(f"C={c}", c, None) for c in self.concurrencies] + [(f"{r:g}/s", None, r) for r in self.rates]
        if self.repeat == 1:
            return once
        return [(f"{label} #{turn}", c, r) for label, c, r in once for turn in range(1, self.repeat + 1)]


class Ladder:
    """Carries out a Plan. clock: seconds; by default that of the running event loop."""

    def __init__(self, plan: Plan, *, progress: Progress, clock: Callable[[], float] | None = None) -> None:
        self._plan = plan
        self._progress = progress
        self._clock = clock or asyncio.get_running_loop().time
        self._measurements: list[Measurement] = []
        self._model = plan.model or ""
        self._dialect: Dialect | None = None
        self._server = ""

    async def run(self) -> dict[str, Any]:
        """Do every run, also behind one that failed, and return the report (docs/benchmark.md describes it)."""
        runs: list[dict[str, Any]] = []
        interrupted = False
        for label, concurrency, rate in self._plan.runs():
            if interrupted:
                runs.append(_empty(label, concurrency, rate, "not started: stopped by hand"))
                continue
            try:
                measured = await self._one_run(label, concurrency, rate)
            except Unreachable as error:
                runs.append(_empty(label, concurrency, rate, f"the server does not answer: {error}"))
                self._progress.problem(f"{label}: {runs[-1]['failure']}")
                continue
            except asyncio.CancelledError:
                interrupted = True
                runs.append(_empty(label, concurrency, rate, "not begun: stopped by hand"))
                continue
            self._measurements.append(measured)
            measured.figures["predicted"] = self._prediction_for(concurrency)
            runs.append(measured.figures)
            interrupted = "stopped by hand" in measured.figures["failure"]
            if measured.is_sound:
                rate_now = measured.figures["steady"]["output_tokens_per_s"]
                self._progress.say(f"{label}: {'no steady state' if rate_now is None else f'{rate_now:,.1f} tokens/s'}")
            else:
                self._progress.problem(f"{label}: {measured.figures['failure']}")
        return {
            "benchmark": "isthmus bench serve",
            "version": 1,
            "interrupted": interrupted,
            "conditions": self._conditions(),
            "runs": runs,
            "step_law": self._step_law(runs),
        }

    async def _one_run(self, label: str, concurrency: int | None, rate: float | None) -> Measurement:
        plan = self._plan
        requests = self._requests(label, concurrency, rate)
        # a session of its own: no run inherits connections that the server has closed since
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        async with aiohttp.ClientSession(
            connector=connector, headers=plan.headers, auto_decompress=True, read_bufsize=1 << 20, trust_env=False
        ) as session:
            await self._prepare(session, label)
            assert self._dialect is not None
            client = self._client(session, self._dialect, on_tokens=self._progress.tokens)

            async def send(request: Request, stream: Stream) -> None:
                try:
                    await client.send(request, stream)
                finally:
                    self._progress.ended(failed=stream.outcome is Outcome.FAILED)

            meter = CostMeter(self._clock)
            async with self._progress.run(label, len(requests), clock=self._clock):
                meter.start()
                log = await self._load(send, requests, concurrency, rate)
                events, tokens, gap = _volume(log.streams)
                cost = await meter.stop(num_events=events, num_tokens=tokens, gap_ms=gap)
        measured = Measurement(log, label=label, slo=plan.slo)
        measured.figures["client"] = cost
        if cost["problem"]:
            measured.figures["notes"].append(cost["problem"])
        return measured

    async def _load(
        self, send: Any, requests: Sequence[Request], concurrency: int | None, rate: float | None
    ) -> RunLog:
        plan = self._plan
        if concurrency is not None:
            return await closed_loop(
                send, requests, concurrency=concurrency, clock=self._clock, duration_s=plan.duration_s
            )
        mean = len(requests) / max(requests[-1].due, 1e-9)
        return await open_loop(
            send, requests, rate=mean if rate is None else rate, clock=self._clock, duration_s=plan.duration_s
        )

    def _requests(self, label: str, concurrency: int | None, rate: float | None) -> list[Request]:
        plan = self._plan
        if plan.replay_speed is not None:
            return plan.workload.replay(label=label, speed=plan.replay_speed)
        count = plan.num_requests
        if count is None and rate is not None and plan.duration_s is not None:
            count = math.ceil(1.5 * rate * plan.duration_s) + 8
        if count is None:
            count = max(8, 2 * concurrency if concurrency is not None else 64)
        return plan.workload.requests(count, label=label, rate=rate, poisson=plan.poisson)

    async def _prepare(self, session: aiohttp.ClientSession, label: str) -> None:
        """Learn model and dialect on first use, see that the server answers, and warm it up. Raises Unreachable."""
        plan = self._plan
        if not self._model:
            self._model = await self._find_model(session)
        rng = random.Random(f"{plan.workload.seed}/probe/{label}")
        prompt = msgspec.json.encode(plan.workload.prompts.make(rng, _PROBE_INPUT))
        request = Request(-1, _PROBE_INPUT, PROBE_TOKENS, prompt)

        async def ask(dialect: Dialect) -> Stream:
            stream = Stream(-1, _PROBE_INPUT, PROBE_TOKENS, due=self._clock())
            await self._client(session, dialect).send(request, stream)
            return stream

        extras = (
            self._dialect.extras if self._dialect else tuple(e for e in EXTRAS if e != "ignore_eos" or plan.ignore_eos)
        )
        dialect = await negotiate(ask, extras=extras)
        if self._dialect is None and dialect.refused:
            self._progress.say(f"the server does not take {', '.join(dialect.refused)}: going on without")
        self._dialect = self._dialect or dialect
        client = self._client(session, dialect)
        for request in plan.workload.requests(plan.warmup, label=f"warm-up of {label}"):
            stream = Stream(-1, request.input_tokens, request.output_tokens, due=self._clock())
            await client.send(request, stream)
            if stream.outcome is not Outcome.OK:
                raise Unreachable(f"a warm-up request failed: {stream.error}")

    def _client(self, session: aiohttp.ClientSession, dialect: Dialect, **options: Any) -> Client:
        plan = self._plan
        return Client(
            session,
            plan.url,
            model=self._model,
            api=plan.api,
            dialect=dialect,
            clock=self._clock,
            stall_timeout_s=plan.stall_timeout_s,
            fields=plan.fields,
            **options,
        )

    async def _find_model(self, session: aiohttp.ClientSession) -> str:
        url = f"{base_url(self._plan.url)}/models"
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response:
                self._server = response.headers.get("Server", "")
                body = await response.json(content_type=None)
                return str(body["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{url}: {in_words(error)}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise Unreachable(f"{url} lists no model: name one with --model") from None

    def _prediction_for(self, concurrency: int | None) -> dict[str, Any] | None:
        """Return what the runs before this one say of it."""
        if concurrency is None:
            return None
        with contextlib.suppress(ValueError):
            return self._law(self._measurements[:-1]).predict(concurrency)
        return None

    def _law(self, measurements: Sequence[Measurement]) -> StepLaw:
        alone = points_of(measured.samples_without_prefills for measured in measurements)
        try:
            return StepLaw(alone, experts=self._plan.experts)
        except ValueError:
            return StepLaw(points_of(measured.samples for measured in measurements), experts=self._plan.experts)

    def _step_law(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        closed = [run for run in runs if run["concurrency"]]
        most = max((run["concurrency"] for run in closed if not run["failure"]), default=1)
        beyond = [run["concurrency"] for run in closed if run["failure"] and run["concurrency"] > most]
        following = min(beyond, default=2 * most)
        try:
            return self._law(self._measurements).to_json(following) | {"problem": ""}
        except ValueError as error:
            return {"a_ms": None, "b_ms": None, "problem": str(error)}

    def _conditions(self) -> dict[str, Any]:
        plan, workload = self._plan, self._plan.workload
        dialect = self._dialect
        return {
            "url": base_url(plan.url),
            "model": self._model or None,
            "server": self._server or None,
            "api": plan.api,
            "input_lengths": "from the trace" if workload.rows else str(workload.input_lengths),
            "output_lengths": "from the trace" if workload.rows else str(workload.output_lengths),
            "prompts": workload.prompts.description,
            "seed": workload.seed,
            "warmup": plan.warmup,
            "extras": list(dialect.extras) if dialect else None,
            "refused": list(dialect.refused) if dialect else None,
            "fields": plan.fields,
            "arrivals": ("Poisson" if plan.poisson else "even") if plan.rates else None,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "isthmus": _version(),
        }


def _version() -> str:
    """Return the package's version; a checkout that is not installed has none, which is no reason to lose a report."""
    try:
        return importlib.metadata.version("isthmus")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _volume(streams: Sequence[Stream]) -> tuple[int, int, float | None]:
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    median = gaps[len(gaps) // 2] * 1000 if gaps else None
    return sum(s.num_events for s in streams), sum(s.num_tokens for s in streams), median


def _empty(label: str, concurrency: int | None, rate: float | None, failure: str) -> dict[str, Any]:
    """Return the entry of a run that sent nothing: all its keys, so that no reader trips over a missing line."""
    nobody = Measurement(RunLog(concurrency, rate), label=label, slo=None)
    return nobody.figures | {"failure": failure, "client": None, "predicted": None}
