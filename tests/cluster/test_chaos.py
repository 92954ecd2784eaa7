"""Random deaths under load: every answer is right or says that it failed, and the cluster mends itself."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MODEL = "oracle-tiny"
NUM_CLIENTS = 16
POOL_SIZE = 60
NUM_TRIES, PHASES_S = 3, (30, 10, 20, 20, 20)  # max_retries + 1; queue, reserve, prefill, transfer, decode: see CONFIG
DEADLINE_S = float(NUM_TRIES * sum(PHASES_S))
FULL_S = 600.0
LONG_S = float(os.environ.get("ISTHMUS_CHAOS_SECONDS", FULL_S))
SEED = int(os.environ.get("ISTHMUS_CHAOS_SEED", "1"))

CONFIG = """
device: cpu
dtype: float32
kv_cache_dtype: fp32
max_num_batched_tokens: 256
max_num_seqs: 8
kv_cache_memory_gib: 0.1
pool_poison: true
transport: nixl
prefill: {numa_node: 0}
decode: {numa_node: 1}
router:
  {queue_timeout_s: 30, reserve_timeout_s: 10, prefill_timeout_s: 20, transfer_timeout_s: 20, decode_timeout_s: 20}
supervisor: {max_restarts: 10000, restart_window_s: 5, restart_backoff_s: 0.2}
"""


def _module(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name.removeprefix('cluster_')}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


load, chaos, baseline = _module("cluster_load"), _module("cluster_chaos"), _module("cluster_baseline")


def _answers_of(cluster: Any, pool: list[Any]) -> list[Any]:
    """Send every request once, undisturbed; return their outcomes."""
    answers: list[Any] = [None] * len(pool)
    numbers = iter(range(len(pool)))
    lock = threading.Lock()

    def work() -> None:
        client = load.Client(cluster.port, MODEL, deadline_s=DEADLINE_S)
        while True:
            with lock:
                n = next(numbers, None)
            if n is None:
                return client.close()
            for _ in range(NUM_TRIES):  # a machine that is busy with other things may disturb it as well
                answers[n] = client.send(pool[n], f"reference-{n}", stream=n % 2 == 0)
                if answers[n].kind == "whole":
                    break
                time.sleep(5.0)

    _in_threads([work] * 4)
    assert [answer for answer in answers if answer.kind != "whole"] == []
    return answers


def _in_threads(functions: list[Any]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return threads


def _resumed_requests(cluster: Any) -> set[str]:
    """Return the ids of requests that the router took up again after it had tokens of them."""
    log = Path(cluster.environ["XDG_STATE_HOME"]) / "isthmus" / str(cluster.port) / "logs" / "router.log"
    return set(re.findall(r"request (\S+): .*, [1-9]\d* resumes", log.read_text(errors="replace")))


def run_chaos(cluster: Any, *, seconds: float, pool: list[Any], seed: int, say: Any) -> dict[str, Any]:
    """Serve 16 clients for `seconds` while processes die; fails on anything but right answers and clear errors."""
    cluster.await_ready()
    answers = _answers_of(cluster, pool)
    before = baseline.await_idle(cluster)
    say(f"{len(pool)} reference answers, {sum(len(a.tokens) for a in answers)} tokens")

    killer = chaos.Killer(cluster, seed, say=say)
    end = time.monotonic() + seconds
    outcomes: list[tuple[int, Any]] = []
    numbers = itertools.count()

    def client_thread(own: random.Random) -> None:
        client = load.Client(cluster.port, MODEL, deadline_s=DEADLINE_S)
        while time.monotonic() < end and cluster.process.poll() is None:
            n = own.randrange(len(pool))
            leaves = own.expovariate(1.0) if own.random() < chaos.LEAVERS else None
            outcome = client.send(pool[n], f"chaos-{next(numbers)}", stream=own.random() < 0.5, leaves_after_s=leaves)
            outcomes.append((n, outcome))
            if outcome.kind in ("closed", "error"):
                time.sleep(1.0 + own.random())  # as a client that tries again would
        client.close()

    killer.start()
    threads = [threading.Thread(target=client_thread, args=(random.Random(seed + k),)) for k in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end and not killer.faults:
        time.sleep(0.1)
    killer.stop()
    for thread in threads:
        thread.join()
    over = time.monotonic()
    assert cluster.process.poll() is None, f"the cluster ended: {cluster.output}"
    cluster.await_ready()

    report = chaos.Report(faults=killer.faults)
    outages = chaos.router_outages(killer.strikes, until=over)
    resumed = _resumed_requests(cluster)
    for n, outcome in outcomes:
        chaos.judge(report, outcome, answers[n], router_outages=outages, resumed=resumed)
    counts = chaos.table(report, killer.strikes)
    say(json.dumps(counts, indent=2))
    assert report.faults == [], "\n".join(report.faults[:20])
    client = load.Client(cluster.port, MODEL, deadline_s=DEADLINE_S)
    again = [client.send(pool[n], f"after-{n}") for n in range(4)]
    client.close()
    assert [outcome.tokens for outcome in again] == [answer.tokens for answer in answers[:4]]
    baseline.assert_same(before, baseline.await_idle(cluster))
    return counts


@pytest.fixture
def chaos_cluster(launch, oracle_model: Path, tmp_path: Path) -> Any:
    config = tmp_path / "chaos.yaml"
    config.write_text(CONFIG)
    return launch(str(config), "--model", str(oracle_model))


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    began = time.monotonic()

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    return say


EXPECTED = load.Outcome("whole", "r", 0.0, 1.0, [5, 6, 7], "length")
NEVER_RIGHT = {
    "wrong token": ("whole", [5, 9, 7], "length", ""),
    "fake stop": ("whole", [5, 6], "stop", ""),
    "wrong token before an error": ("error", [9], None, "event worker_lost"),
    "wrong token before the client left": ("left", [9], None, ""),
    "finish reason and then an error": ("error", [5, 6, 7], "length", "event internal"),
    "blame on the client": ("error", [], None, "400 None"),
    "connection cut by a router that was not struck": ("closed", [5], None, "cut"),
    "hang": ("hang", [5], None, ""),
}


@pytest.mark.parametrize("name", NEVER_RIGHT)
def test_judgement_lets_nothing_wrong_pass(name: str) -> None:
    kind, tokens, finish_reason, detail = NEVER_RIGHT[name]
    report = chaos.Report()
    outcome = load.Outcome(kind, "r", 10.0, 11.0, tokens, finish_reason, detail)
    chaos.judge(report, outcome, EXPECTED, router_outages=[(0.0, 9.0), (12.0, 13.0)], resumed=set())
    assert len(report.faults) == report.num_requests == 1


def test_random_deaths_under_load_give_right_answers_or_clear_errors(chaos_cluster) -> None:
    rng = random.Random(3)
    pool = [load.random_request(rng, prompt_tokens=(1, 300), max_tokens=(1, 40)) for _ in range(16)]
    counts = run_chaos(chaos_cluster, seconds=15, pool=pool, seed=3, say=lambda text: None)
    assert counts["right"] > 0 and counts["strikes"] > 0


@pytest.mark.long
def test_ten_minutes_of_random_deaths_under_load(chaos_cluster, say) -> None:
    rng = random.Random(SEED)
    pool = [load.random_request(rng) for _ in range(POOL_SIZE)]
    counts = run_chaos(chaos_cluster, seconds=LONG_S, pool=pool, seed=SEED, say=say)
    assert counts["right"] > 0 and counts["right_after_resume"] > 0
    if LONG_S >= FULL_S:
        conditions = {
            "seconds": LONG_S,
            "seed": SEED,
            "clients": NUM_CLIENTS,
            "distinct_requests": POOL_SIZE,
            "prompt_tokens": [1, 700],
        }
        conditions |= {
            "max_tokens": [1, 60],
            "leavers": chaos.LEAVERS,
            "model": "tests/oracle/tiny",
            "transport": "nixl",
        }
        conditions |= {"load_average_at_end": [round(n) for n in os.getloadavg()]}
        baseline.write_result("chaos_cpu.json", conditions | baseline.machine(), counts)
