"""Many groups under load: some join, one drains, one dies. Nothing is lost, and what is resumed goes on as it was."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

HERE = Path(__file__).parent
GOLDEN = load_file(HERE.parent / "oracle" / "tiny" / "golden.safetensors")
LENGTHS = (5, 64, 129, 300)
MODEL = "oracle-tiny"
NUM_CLIENTS = 4
PAUSE_S = 0.5  # of a client between two requests: what joins must find time to load beside them
MAX_TOKENS = 64
DEADLINE_S = 90.0
LONG_S = float(os.environ.get("ISTHMUS_XPYD_SECONDS", "240"))
LONG_SEED = 7

CONFIG = """
device: cpu
dtype: float32
kv_cache_dtype: fp32
max_num_batched_tokens: 256
max_num_seqs: 8
kv_cache_memory_gib: 0.06
pool_poison: true
transport: nixl
prefill: [{numa_node: 0}, {numa_node: 0}]
decode: [{numa_node: 1}, {numa_node: 1}]
"""


def _module(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name.removeprefix('cluster_')}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


load, baseline = _module("cluster_load"), _module("cluster_baseline")


class Load:
    """Clients that send the golden prompts, one request after the other each, until told to stop."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._requests = [load.Request(GOLDEN[f"prompt_{n}"].tolist(), MAX_TOKENS) for n in LENGTHS]
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS)
        self.outcomes: list[tuple[int, Any]] = []
        # the oracle knows the first tokens of each; an undisturbed pass tells the rest
        self.answers = list(self._pool.map(self._ask_alone, self._requests))
        for length, answer in zip(LENGTHS, self.answers, strict=True):
            golden = GOLDEN[f"gen_{length}"].tolist()
            assert answer.tokens[: len(golden)] == golden and len(answer.tokens) == MAX_TOKENS

    def start(self) -> None:
        self._futures = [self._pool.submit(self._work) for _ in range(NUM_CLIENTS)]

    def stop(self) -> None:
        """Let what runs end; fails for any answer that is not whole and right."""
        self._stop.set()
        for future in self._futures:
            future.result()
        wrong = [
            outcome
            for n, outcome in self.outcomes
            if (outcome.kind, outcome.tokens, outcome.finish_reason) != ("whole", self.answers[n].tokens, "length")
        ]
        assert wrong == []

    def await_more(self, count: int) -> None:
        """Return when so many more requests have ended."""
        wanted = len(self.outcomes) + count
        self._cluster.await_true(lambda: len(self.outcomes) >= wanted, timeout_s=DEADLINE_S)

    def _ask_alone(self, request: Any) -> Any:
        with self._client() as client:
            return client.send(request, "reference")

    def _work(self) -> None:
        with self._client() as client:
            while not self._stop.is_set():
                number = next(self._numbers)
                n = number % len(self._requests)
                self.outcomes.append((n, client.send(self._requests[n], f"load-{number}", stream=number % 2 == 0)))
                self._stop.wait(PAUSE_S)

    def _client(self) -> Any:
        return contextlib.closing(load.Client(self._cluster.port, MODEL, deadline_s=DEADLINE_S))


def tried_again(cluster: Any) -> list[tuple[int, str]]:
    """Return, for each request that the router tried again, the tokens that its client had, and why."""
    log = Path(cluster.environ["XDG_STATE_HOME"]) / "isthmus" / str(cluster.port) / "logs" / "router.log"
    found = re.findall(r"request \S+: tried again after (\d+) tokens: (.*)", log.read_text(errors="replace"))
    return [(int(tokens), reason) for tokens, reason in found]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def run(cluster: Any, *words: str) -> None:
    done = cluster.run_command(*words)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.output


def change(cluster: Any, rng: random.Random) -> str:
    """Add, drain or kill something; return what it was, when the cluster has taken it in."""
    workers = cluster.workers()
    of_role = {role: [name for name in workers if name.startswith(role)] for role in ("prefill", "decode")}
    role = rng.choice(list(of_role))
    # what is struck has a second of its kind: without any there is no pair, and requests are refused
    kinds = ["kill leader", "kill rank", "drain"] if len(of_role[role]) > 1 else []
    kinds += ["add"] if len(of_role[role]) < 3 else []
    kind, name = rng.choice(kinds), rng.choice(of_role[role])
    if kind == "add":
        run(cluster, "add", role)
    elif kind == "drain":
        run(cluster, "drain", name)
    else:
        worker = workers[name]
        os.kill(worker["leader_pid"] if kind == "kill leader" else worker["ranks"][0]["pid"], signal.SIGKILL)
        cluster.await_true(lambda: cluster.workers()[name]["generation"] != worker["generation"], timeout_s=60)
        cluster.await_true(lambda: all(p["state"] == "ready" for p in cluster.topology()["pairs"]), timeout_s=60)
    return f"{kind} {role if kind == 'add' else name}"


@pytest.mark.long
def test_ray_cluster_loses_nothing_in_minutes_of_random_changes(
    launch, oracle_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(CONFIG + "supervisor: {max_restarts: 1000, restart_window_s: 5}\n")
    cluster = launch(str(config), "--model", str(oracle_model))
    cluster.await_ready()
    clients = Load(cluster)
    clients.start()
    rng, done, end = random.Random(LONG_SEED), [], time.monotonic() + LONG_S
    while time.monotonic() < end:
        clients.await_more(NUM_CLIENTS)
        done.append(change(cluster, rng))
        with capsys.disabled():
            print(f"  {done[-1]}: {len(clients.outcomes)} answers, {len(tried_again(cluster))} tries again", flush=True)
    clients.stop()
    held = baseline.await_idle(cluster)
    assert baseline.is_idle(held) and held["orphans"] == []
    assert any(tokens > 0 for tokens, _ in tried_again(cluster))


def test_ray_cluster_loses_nothing_while_groups_join_drain_and_die_under_load(
    launch, oracle_model: Path, tmp_path: Path
) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(CONFIG)
    cluster = launch(str(config), "--model", str(oracle_model))
    cluster.await_ready()
    cluster.await_true(lambda: all(p["state"] == "ready" for p in cluster.topology()["pairs"]), timeout_s=30)
    clients = Load(cluster)
    clients.start()
    clients.await_more(NUM_CLIENTS)

    run(cluster, "add", "prefill", "--no-wait")
    run(cluster, "add", "decode")
    workers = cluster.workers()
    assert workers.keys() == {f"{role}-{n}" for role in ("prefill", "decode") for n in range(3)}

    drained = workers["decode-0"]
    run(cluster, "drain", "decode-0")
    assert "decode-0" not in cluster.workers()
    pids = [drained["leader_pid"], *(rank["pid"] for rank in drained["ranks"])]
    cluster.await_true(lambda: not any(is_alive(pid) for pid in pids), timeout_s=10)
    assert tried_again(cluster) == []

    dead = workers["decode-1"]
    cluster.await_true(lambda: cluster.workers()["decode-1"]["stats"]["num_running"] > 0, timeout_s=30)
    os.kill(dead["ranks"][0]["pid"], signal.SIGKILL)
    cluster.await_true(lambda: cluster.workers()["decode-1"]["generation"] != dead["generation"], timeout_s=30)
    # who joined serves: one trial request with each prefill group is not all it had
    cluster.await_true(lambda: cluster.workers()["decode-2"]["stats"]["handovers"] > 3, timeout_s=30)
    clients.stop()

    again = tried_again(cluster)
    of_the_dead = (dead["url"], f"pid {dead['ranks'][0]['pid']}")
    assert [reason for _, reason in again if not any(name in reason for name in of_the_dead)] == []
    assert any(tokens > 0 for tokens, _ in again)
    held = baseline.await_idle(cluster)
    assert baseline.is_idle(held) and held["orphans"] == []
