"""Every part killed, stopped or restarted at every moment of a request's life, under load: real processes over NIXL.

The request that is at the moment, and those beside it, end right (resumed where it must be) or with a clear error in
time; then everything is as it was, without help. Right means tokens, and the logits behind every one of them, as of one
runner that serves alone; what a rank computed for a request that failed later is compared as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent


def _module(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


faults = _module("faults")
logits = _module("logits")

ROLES = ("prefill", "decode", "router")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "restart": signal.SIGTERM}
# which time that the point is passed: the second push of three, the fifth token
POINTS = {
    "router_queued": 0,
    "prefill_queued": 0,
    "prefill_mid": 2,
    "prefill_done_untold": 0,
    "kv_mid": 2,
    "kv_done_unnotified": 0,
    "kv_notified_before_first_token": 0,
    "decode_step": 5,
}
VICTIM = 701  # tokens of its prompt: six chunks, five pushes before the last
MAX_TOKENS = 16


@dataclass(frozen=True)
class Case:
    role: str
    how: str
    point: str
    index: int

    @property
    def id(self) -> str:
        return f"{self.how}-{self.role}-at-{self.point}"

    @property
    def target(self) -> str:
        """Leader and rank take turns, and swap them from one signal to the next."""
        return ("leader", "rank")[(self.index + self.index // 8) % 2]

    @property
    def stream(self) -> bool:
        return (self.index // 2) % 2 == 0

    @property
    def seed(self) -> int | None:
        return (None, 11)[(self.index + self.index // 4) % 2]

    @property
    def release_after_s(self) -> float:
        """Let the request go on before the fault is noticed, or after."""
        return (0.0, 1.5)[(self.index // 3) % 2]


CASES = [
    Case(role, how, point, index)
    for index, (role, how, point) in enumerate((r, h, p) for r in ROLES for h in SIGNALS for p in POINTS)
]
SAMPLES = {
    ("prefill", "kill"): "kv_mid",
    ("prefill", "stop"): "prefill_done_untold",
    ("prefill", "restart"): "prefill_queued",
    ("decode", "kill"): "decode_step",
    ("decode", "stop"): "kv_notified_before_first_token",
    ("decode", "restart"): "prefill_mid",
    ("router", "kill"): "kv_done_unnotified",
    ("router", "stop"): "router_queued",
    ("router", "restart"): "decode_step",
}


# Over ucxx UCX takes TCP inside a host too, which has to be allowed.
LANES: dict[str, dict[str, Any]] = {"nixl": {}, "host": {}, "ucxx": {"allow_tcp": True}}
# of the samples, the one that strikes while bytes move
SAMPLES_OF_OTHER_LANES = ("kill-prefill-at-kv_mid",)


def parameters() -> list[Any]:
    return [
        pytest.param(lane, case, id=f"{lane}-{case.id}", marks=[] if is_sample(lane, case) else pytest.mark.long)
        for lane in LANES
        for case in CASES
    ]


def is_sample(lane: str, case: Case) -> bool:
    if lane == "nixl":
        return SAMPLES[case.role, case.how] == case.point
    return lane == "host" and case.id in SAMPLES_OF_OTHER_LANES


@dataclass
class Bench:
    """The module's cluster, and what it answered before anything was struck."""

    site: Any
    victims: dict[int | None, tuple[Any, list[int]]]
    load: list[tuple[Any, list[int]]]
    check: Any


@pytest.fixture(scope="module")
def bench_of(
    tmp_path_factory: pytest.TempPathFactory, oracle_model: Path, start: Any
) -> Iterator[Callable[[str], Bench]]:
    """A function of a lane to its cluster; the one before is ended."""
    benches: dict[str, Bench] = {}
    with contextlib.ExitStack() as running:

        def bench(lane: str) -> Bench:
            if lane not in benches:
                running.close()
                benches.clear()
                benches[lane] = running.enter_context(
                    _bench(lane, tmp_path_factory.mktemp("matrix"), oracle_model, start)
                )
            return benches[lane]

        yield bench


@contextlib.contextmanager
def _bench(lane: str, folder: Path, model: Path, start: Any) -> Iterator[Bench]:
    if lane == "ucxx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("needs the package ucxx-cu13: pip install '.[ucxx]'")
    log = folder / "logits"
    config = faults.write_config(folder, model, logits_log=str(log), transport=lane, **LANES[lane])
    options = {"dtype": "float32", "kv_cache_dtype": "fp32", "block_size": 128, "max_num_batched_tokens": 128}
    check = logits.LogitsCheck(log, model, **options)
    with start(folder, str(config)) as cluster:
        assert [pair["transport"] for pair in cluster.topology()["pairs"]] == [lane]
        yield asyncio.run(measure(cluster, check))


async def measure(cluster: Any, check: Any) -> Bench:
    site = faults.Site(cluster)
    victims = [faults.golden_ask(VICTIM, MAX_TOKENS, seed) for seed in (None, 11)]
    beside = [
        faults.golden_ask(129, 24),
        faults.golden_ask(5, 40, 3),
        faults.golden_ask(300, 12, 4),
        faults.golden_ask(257, 10),
    ]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=faults.ANSWER_WITHIN_S) as client:
        known = {wanted: (await faults.ask(client, wanted.body())).token_ids for wanted in victims + beside}
    for wanted in known:
        assert known[wanted] == check.learn(wanted.prompt, wanted.max_tokens, **wanted.sampling)
    for length, wanted in ((VICTIM, victims[0]), (129, beside[0]), (257, beside[3])):
        golden = faults.GOLDEN[f"gen_{length}"].tolist()
        assert known[wanted][: len(golden)] == golden[: wanted.max_tokens]
    return Bench(
        site,
        {wanted.seed: (wanted, known[wanted]) for wanted in victims},
        [(wanted, known[wanted]) for wanted in beside],
        check,
    )


@pytest.mark.parametrize(("lane", "case"), parameters())
def test_fault_ends_right_or_clearly_and_everything_comes_back(
    bench_of: Callable[[str], Bench], lane: str, case: Case, record_property: Any
) -> None:
    bench = bench_of(lane)
    bench.check.compare()
    ready_s, outcome, counts = asyncio.run(strike(bench, case))
    num_rows, distance = bench.check.compare()
    record_property("outcome", outcome)
    record_property("ready_s", round(ready_s, 1))
    print(
        f"FAULT {case.id} {case.target}: {outcome}, load {counts}, {num_rows} rows of logits within {distance:.1e}, "
        f"ready after {ready_s:.1f} s"
    )
    assert counts["complete"] > 0, "nothing beside it was served"
    assert num_rows >= counts["complete"] * min(wanted.max_tokens for wanted, _ in bench.load), "logits are missing"
    assert distance < logits.TOLERANCE, "a token was computed from cache that is not its own"
    assert ready_s < faults.READY_WITHIN_S


async def strike(bench: Bench, case: Case) -> tuple[float, str, dict[str, int]]:
    """Run one case; returns the seconds to ready, how the struck request ended, and how the others did."""
    site, name = bench.site, f"victim-{case.index}-{time.monotonic_ns()}"
    wanted, expected = bench.victims[case.seed]
    before, urls = site.identity(case.role), [site.url, *(worker["url"] for worker in site.workers().values())]
    pids = site.pids(case.role)
    chosen = list(pids.values()) if case.how == "restart" else [pids.get(case.target, pids["leader"])]
    async with httpx.AsyncClient(base_url=site.url, timeout=faults.ANSWER_WITHIN_S) as client:
        load = faults.Load(client, bench.load)
        try:
            site.hold(case.point, name, n=POINTS[case.point])
            victim = asyncio.create_task(faults.ask(client, wanted.body(stream=case.stream), name=name))
            await site.await_held(case.point, name, num_queued=load.num_clients + 1)
            with faults.struck(chosen, SIGNALS[case.how]) as struck_at:
                await asyncio.sleep(case.release_after_s)
                await site.release(urls)
                answer = await victim
                ready_s = await await_ready_again(client, site, case.role, before) - struck_at
            # afterwards the same request, and one of the others, are served as ever
            for again, right in ((wanted, expected), bench.load[case.index % len(bench.load)]):
                assert faults.judge(await faults.ask(client, again.body()), right, struck_at=struck_at) == "complete"
        finally:
            await site.release(urls)
            await load.finish()
    may_close = case.role == "router"
    outcome = faults.judge(answer, expected, struck_at=struck_at, may_close=may_close)
    counts = load.judge(struck_at=struck_at, may_close=may_close)
    site.await_idle()
    return ready_s, outcome, counts


async def await_ready_again(client: httpx.AsyncClient, site: Any, role: str, before: Any) -> float:
    """Return when the struck part is another one and the cluster is ready."""
    deadline = time.monotonic() + 2 * faults.READY_WITHIN_S
    while time.monotonic() < deadline:
        try:
            if site.identity(role) != before and (await client.get("/ready")).status_code == 200:
                return time.monotonic()
        except (httpx.TransportError, ValueError, KeyError):
            pass
        await asyncio.sleep(0.05)
    pytest.fail(f"{role} was not back after {2 * faults.READY_WITHIN_S} s:\n{site.cluster.output}")
