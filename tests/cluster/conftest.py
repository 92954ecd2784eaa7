"""Whole clusters as a user starts them: `isthmus up` in a process of its own, real Ray, real NIXL, real ports."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
ORACLE = ROOT / "tests" / "oracle" / "tiny"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass
class Cluster:
    """A running `isthmus up`."""

    process: subprocess.Popen[bytes]
    url: str
    port: int
    environ: dict[str, str]
    output_path: Path

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def topology(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/topology").raise_for_status().json())

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["id"]: worker for worker in self.topology()["workers"]}

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def await_ready(self) -> None:
        self.await_true(self.is_ready, timeout_s=READY_TIMEOUT_S)

    def await_true(self, is_true: Callable[[], bool], *, timeout_s: float) -> None:
        """Poll until `is_true`; fail with the cluster's output at the deadline, or at once if the cluster ends."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"not so within {timeout_s} s; the cluster printed\n{self.output}")
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        """Every process of the cluster, Ray's own included."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another `isthmus` command of the same user."""
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", *words],
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


def find_free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, below those that the kernel gives out by itself.

    A cluster binds its port seconds after it was chosen here, and meanwhile Ray opens dozens of the kernel's choice.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found


def start_cluster(folder: Path, *words: str, environ: dict[str, str] | None = None) -> Cluster:
    """Start `isthmus up` with its state below `folder`; the caller stops it. environ: set beside this process's."""
    more = environ or {}
    (port,) = find_free_ports(1)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ISTHMUS_", "RAY_"))}
    environ |= {"XDG_STATE_HOME": str(folder / "state"), **more}
    output = folder / "output.txt"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", "--port", str(port), *words],
            cwd=ROOT,
            env=environ,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Cluster(process, f"http://127.0.0.1:{port}", port, environ, output)


def end_cluster(cluster: Cluster) -> None:
    """Stop it kindly, or by force; never leaves a process behind, whatever state the test left it in."""
    if cluster.process.poll() is not None:
        return
    family = cluster.family()
    try:
        cluster.stop()
    except subprocess.TimeoutExpired:
        for process in family:
            if process.is_running():
                process.kill()
        cluster.process.wait(10)


@pytest.fixture(scope="session")
def oracle_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the oracle's checkpoint as a user would have it: no tokenizer, no golden files."""
    folder = tmp_path_factory.mktemp("models") / "oracle-tiny"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(ORACLE / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """A function of a number to that many ports that nobody listens on."""
    return find_free_ports


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """A function of flags that starts a cluster of the test's own; what still runs is ended afterwards."""
    started: list[Cluster] = []

    def launch(*words: str, environ: dict[str, str] | None = None) -> Cluster:
        started.append(start_cluster(tmp_path, *words, environ=environ))
        return started[-1]

    yield launch
    for cluster in started:
        end_cluster(cluster)


@pytest.fixture(scope="session")
def start() -> Callable[..., contextlib.AbstractContextManager[Cluster]]:
    """A function of a folder and flags to a context: a ready cluster, ended afterwards."""

    @contextlib.contextmanager
    def start(folder: Path, *words: str) -> Iterator[Cluster]:
        started = start_cluster(folder, *words)
        try:
            started.await_ready()
            yield started
        finally:
            end_cluster(started)

    return start


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, oracle_model: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker serving the oracle's model, pools poisoned with NaN."""
    started = start_cluster(tmp_path_factory.mktemp("cluster"), "--model", str(oracle_model), "--pool-poison", "true")
    try:
        started.await_ready()
        yield started
    finally:
        end_cluster(started)
