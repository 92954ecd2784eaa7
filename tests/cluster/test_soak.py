"""Twenty thousand short requests, clients that leave and injected failures: nothing grows in any process."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

HERE = Path(__file__).parent
MODEL = "oracle-tiny"
FULL = 20_000
NUM_REQUESTS = int(os.environ.get("ISTHMUS_SOAK_REQUESTS", FULL))
NUM_CLIENTS = 24
WARM = NUM_REQUESTS // 10  # after so many every bounded table and allocator has met its usual size
NUM_SAMPLES = 9
POOL_SIZE = 128
DEADLINE_S = 60.0
LEAVERS = 0.2
FAIL_EVERY = 100
ERRORS_ALLOWED = 0.01  # a worker that a busy machine starves for seconds counts as out of reach: 503
IDLE_CONNECTIONS_KEPT = 64  # of router.client, for each worker
SETTLE_S = 6.0  # longer than any idle connection is kept
GROWTH_ALLOWED = 0.10
"""Of a process's memory after WARM. One leaked kilobyte a request would be 18 MB: 30 % of a router or leader, which
are 50 to 70 MB; what a fixed allowance of 30 MB would hide."""

CONFIG = """
device: cpu
dtype: float32
kv_cache_dtype: fp32
max_num_batched_tokens: 256
max_num_seqs: 16
kv_cache_memory_gib: 0.1
pool_poison: true
test_seams: true
transport: nixl
prefill: {numa_node: 0}
decode: {numa_node: 1}
"""


def _module(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name.removeprefix('cluster_')}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


load, baseline = _module("cluster_load"), _module("cluster_baseline")


class Soak:
    """Sends the pool's requests, counts what became of them, and reads what every process holds."""

    def __init__(self, cluster: Any) -> None:
        rng = random.Random(20)
        self.counts = {"right": 0, "client_left": 0, "failed_as_injected": 0, "errors": 0}
        self.faults: list[str] = []
        self._cluster = cluster
        self._pool = [load.random_request(rng, prompt_tokens=(1, 40), max_tokens=(2, 2)) for _ in range(POOL_SIZE)]
        self._doomed = load.Request(prompt=[7, 8, 9], max_tokens=4)
        self._decode_url = cluster.workers()["decode-0"]["url"]
        self._num_sent = 0
        self._lock = threading.Lock()
        client = load.Client(cluster.port, MODEL, deadline_s=DEADLINE_S)
        self._answers = [client.send(request, f"reference-{n}") for n, request in enumerate(self._pool)]
        client.close()
        assert {answer.kind for answer in self._answers} == {"whole"}

    def run(self, until: int) -> None:
        """Send requests until `until` have been sent in all; every connection is closed afterwards."""
        threads = [threading.Thread(target=self._client, args=(until, random.Random(k))) for k in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.faults == [], "\n".join(self.faults[:20])

    def _client(self, until: int, rng: random.Random) -> None:
        client = load.Client(self._cluster.port, MODEL, deadline_s=DEADLINE_S)
        while not self.faults:
            with self._lock:
                n = self._num_sent
                if n >= until:
                    break
                self._num_sent += 1
            if n % FAIL_EVERY == FAIL_EVERY // 2:
                self._fail_one(client, n)
                continue
            expected = self._answers[n % POOL_SIZE]
            leaves = rng.uniform(0, 0.5) if rng.random() < LEAVERS else None
            outcome = client.send(
                self._pool[n % POOL_SIZE], f"soak-{n}", stream=rng.random() < 0.5, leaves_after_s=leaves
            )
            if outcome.kind == "whole" and outcome.tokens == expected.tokens:
                self._count("right")
            elif outcome.kind == "error" and outcome.finish_reason is None:
                self._count("errors")
            elif outcome.kind == "left" and outcome.tokens == expected.tokens[: len(outcome.tokens)]:
                self._count("client_left")
            else:
                self.faults.append(f"{outcome}, expected {expected.tokens}")
        client.close()

    def _fail_one(self, client: Any, n: int) -> None:
        """Have decode fail the next request that goes beyond two tokens, and send one."""
        fault = {"point": "decode_step", "n": 1, "action": "fail"}
        httpx.post(f"{self._decode_url}/seams", json=fault).raise_for_status()
        outcome = client.send(self._doomed, f"doomed-{n}", stream=n % 200 < 100)
        if outcome.kind == "error" and outcome.finish_reason is None:
            self._count("failed_as_injected")
        else:
            self.faults.append(f"not failed: {outcome}")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


def processes(cluster: Any) -> dict[str, psutil.Process]:
    """Return the router, leaders and ranks by name."""
    found = {}
    for worker in cluster.workers().values():
        found[f"{worker['id']} leader"] = psutil.Process(worker["leader_pid"])
        for rank in worker["ranks"]:
            found[f"{worker['id']} rank {rank['rank']}"] = psutil.Process(rank["pid"])
    children = psutil.Process(cluster.process.pid).children()
    (found["router"],) = (child for child in children if "router" in child.cmdline())
    found["isthmus up"] = psutil.Process(cluster.process.pid)
    return found


def held(cluster: Any) -> dict[str, Any]:
    """Return counts that must be the same whenever nothing runs."""
    counts: dict[str, Any] = {"books": baseline.read(cluster)}
    for name, process in processes(cluster).items():
        states = collections.Counter(c.status for c in process.net_connections("inet"))
        # Idle connections that the other side has closed stay in a client's pool until it is used again.
        closed = states[psutil.CONN_CLOSE_WAIT]
        assert closed <= IDLE_CONNECTIONS_KEPT, f"{name} keeps {closed} connections that are closed"
        counts[name] = {
            "pid": process.pid,
            "descriptors": process.num_fds() - closed,
            "threads": process.num_threads(),
            "connections": states[psutil.CONN_ESTABLISHED],
        }
    text = httpx.get(f"{cluster.url}/metrics").text
    counts["metric series"] = sum(not line.startswith("#") for line in text.splitlines())
    return counts


def settled(cluster: Any) -> dict[str, Any]:
    """Return `held` once it has not changed for SETTLE_S."""
    deadline = time.monotonic() + 60
    known, since = held(cluster), time.monotonic()
    while time.monotonic() - since < SETTLE_S and time.monotonic() < deadline:
        time.sleep(0.5)
        if (now := held(cluster)) != known:
            known, since = now, time.monotonic()
    return known


def memory(cluster: Any) -> dict[str, float]:
    """Return the resident MiB of every process."""
    return {name: round(p.memory_info().rss / 2**20, 1) for name, p in processes(cluster).items()}


@pytest.mark.long
def test_twenty_thousand_requests_leave_every_process_as_it_was(
    launch, oracle_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    config = tmp_path / "soak.yaml"
    config.write_text(CONFIG)
    cluster = launch(str(config), "--model", str(oracle_model))
    cluster.await_ready()
    soak, began = Soak(cluster), time.monotonic()
    soak.run(WARM)
    before, samples = settled(cluster), {WARM: memory(cluster)}
    for k in range(1, NUM_SAMPLES + 1):
        until = WARM + (NUM_REQUESTS - WARM) * k // NUM_SAMPLES
        soak.run(until)
        samples[until] = memory(cluster)
        say(f"{until} requests, {time.monotonic() - began:.0f} s: {samples[until]}")
    seconds = time.monotonic() - began
    after = settled(cluster)
    samples[NUM_REQUESTS] = memory(cluster)

    first, last = samples[WARM], samples[NUM_REQUESTS]
    growth = {
        name: {
            "mib_after_warm_up": first[name],
            "mib_at_end": last[name],
            "bytes_per_request": round((last[name] - first[name]) * 2**20 / (NUM_REQUESTS - WARM)),
        }
        for name in first
    }
    result = soak.counts | {"seconds": round(seconds), "memory": growth, "mib_by_requests": samples}
    say(json.dumps(result, indent=2))
    assert soak.counts["errors"] <= ERRORS_ALLOWED * NUM_REQUESTS
    baseline.assert_same(before["books"], after["books"])
    assert after == before
    assert [name for name in first if last[name] > first[name] * (1 + GROWTH_ALLOWED)] == []
    if NUM_REQUESTS >= FULL:
        conditions = {"requests": NUM_REQUESTS, "warm_up": WARM, "clients": NUM_CLIENTS, "max_tokens": 2}
        conditions |= {"prompt_tokens": [1, 40], "leavers": LEAVERS, "injected_failures": 1 / FAIL_EVERY}
        conditions |= {"load_average_at_end": [round(n) for n in os.getloadavg()]}
        conditions |= {"model": "tests/oracle/tiny", "transport": "nixl", "growth_allowed": GROWTH_ALLOWED}
        baseline.write_result("soak_cpu.json", conditions | baseline.machine(), result)
