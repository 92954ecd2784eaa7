"""A cluster from start to end as `make serve` runs it: chat, a death, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from safetensors.torch import load_file, save_file

from deploy import preflight, state


def say_hello(url: str) -> str:
    """One streamed chat answer through the official client; returns how it finished."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="dsv4-tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
        )
        chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return str(chunks[-1].choices[0].finish_reason)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process
        for process in processes
        if process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    ]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_built_in_cluster_serves_survives_a_death_and_leaves_nothing(launch) -> None:
    shared_before = shared_memory()
    cluster = launch()
    cluster.await_ready()
    assert say_hello(cluster.url) in ("length", "stop")

    before = cluster.workers()["prefill-0"]
    os.kill(before["ranks"][0]["pid"], signal.SIGKILL)
    cluster.await_true(lambda: cluster.workers()["prefill-0"]["generation"] != before["generation"], timeout_s=30)
    cluster.await_ready()
    assert cluster.workers()["prefill-0"]["url"] == before["url"]
    assert say_hello(cluster.url) in ("length", "stop")

    (written,) = state.running(cluster.environ)
    family = cluster.family()
    body = {"prompt": "once", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=30) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        # longer than the three seconds after which Ray's own handler of SIGTERM would have aborted the process
        cluster.process.send_signal(signal.SIGTERM)
        assert list(filter(None, lines))[-1] == "data: [DONE]"
    assert cluster.process.wait(60) == 0
    psutil.wait_procs(family, timeout=5)
    assert alive(family) == []
    assert not Path(written.run_dir).exists()
    assert state.running(cluster.environ) == []
    assert shared_memory() <= shared_before
    preflight.require_free_port("127.0.0.1", cluster.port)


def test_rank_that_can_not_start_ends_the_cluster_with_its_reason(launch, oracle_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((oracle_model / "config.json").read_bytes())
    tensors = load_file(oracle_model / "model.safetensors")
    tensors["norm.weight"][3] = math.nan  # only who reads values sees it
    save_file(tensors, broken / "model.safetensors")
    cluster = launch("--model", str(broken))
    assert cluster.process.wait(60) == 1
    assert "failed at start" in cluster.output
    assert "norm.weight: 1 of" in cluster.output


def test_a_damaged_checkpoint_is_refused_before_anything_starts(launch, oracle_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((oracle_model / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((oracle_model / "model.safetensors").read_bytes()[:100_000])
    cluster = launch("--model", str(broken))
    assert cluster.process.wait(60) == 2
    assert "model.safetensors: can't be opened" in cluster.output
    assert state.running(cluster.environ) == []


def test_what_a_killed_cluster_leaves_is_cleared_by_the_next_command(launch, oracle_model: Path) -> None:
    cluster = launch("--model", str(oracle_model))
    cluster.await_ready()
    (written,) = state.running(cluster.environ)
    family = cluster.family()
    cluster.stop(signal.SIGKILL)
    assert cluster.run_command("status").stdout.strip() == "no cluster is running"
    psutil.wait_procs(family, timeout=5)
    assert alive(family) == []
    assert not Path(written.run_dir).exists()
    preflight.require_free_port("127.0.0.1", cluster.port)


def test_down_stops_a_cluster_that_is_still_starting(launch, oracle_model: Path) -> None:
    cluster = launch("--model", str(oracle_model))
    cluster.await_true(lambda: bool(state.running(cluster.environ)), timeout_s=30)
    family = cluster.family()
    stopped = cluster.run_command("down", "--port", str(cluster.port))
    assert (stopped.returncode, cluster.process.wait(30)) == (0, 0)
    assert alive(family) == []


@pytest.fixture
def running_ray(free_ports) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray of somebody else's, as `ray start` begins it; yields its address and what its users need to know."""
    (port,) = free_ports(1)
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2"]
    command += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--include-dashboard", "false"]
    command += ["--resources", json.dumps({"numa:0": 1, "numa:1": 1}), "--object-store-memory", str(80 << 20)]
    # else it takes 10002 to 19999 for its workers, and refuses to start if our port is one of them
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]
    # a short path: sockets lie below it
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        with (Path(folder) / "output").open("wb") as output:
            environ = {**os.environ, **secret}
            process = subprocess.Popen(
                [*command, "--temp-dir", folder], env=environ, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            _await_ray(process, port, Path(folder) / "output")
            yield f"127.0.0.1:{port}", secret
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(20)
            _, left = psutil.wait_procs(family, timeout=5)
            for one in left:
                one.kill()


def _await_ray(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    pytest.fail(f"`ray start` did not come up:\n{output.read_text()}")


def test_cluster_joins_a_running_ray_and_leaves_it_running(
    launch, oracle_model: Path, tmp_path: Path, running_ray
) -> None:
    address, secret = running_ray
    config = tmp_path / "joined.yaml"
    config.write_text(f"device: cpu\nkv_cache_memory_gib: 0.06\nsupervisor: {{ray_address: '{address}'}}\n")
    cluster = launch(str(config), "--model", str(oracle_model), environ=secret)
    cluster.await_ready()
    before = cluster.workers()["decode-0"]
    os.kill(before["ranks"][0]["pid"], signal.SIGKILL)
    cluster.await_true(lambda: cluster.workers()["decode-0"]["generation"] != before["generation"], timeout_s=30)
    cluster.await_ready()
    assert cluster.stop(signal.SIGTERM) == 0
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5):
        pass
