"""A Ray cluster of two hosts: two nodes, each in a network of its own, joined by one wire.

The second is as much another host as one machine allows: a network namespace, whose loopback nobody else sees, and
another boot id, by which this project and UCX tell hosts apart. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = load_file(ROOT / "tests" / "oracle" / "tiny" / "golden.safetensors")
NEAR, FAR = "10.213.77.1", "10.213.77.2"
CONFIG = """
device: cpu
dtype: float32
kv_cache_dtype: fp32
kv_cache_memory_gib: 0.06
pool_poison: true
prefill: {{numa_node: 0, node: {near}}}
decode: {{numa_node: 1, ray_resources: {{decode_host: 0.1}}}}
supervisor: {{ray_address: '{near}:{port}'}}
"""


def _sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@pytest.fixture
def far_network() -> Iterator[str]:
    """The name of a network namespace at the other end of a wire; skips where there can be none."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare for a second network")
    tag = f"{random.SystemRandom().randrange(1 << 24):06x}"
    name, near, far = f"isthmus-{tag}", f"isn{tag}", f"isf{tag}"
    try:
        _sh("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace here: {error.stderr.decode().strip()}")
    try:
        _sh("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _sh("ip", "addr", "add", f"{NEAR}/30", "dev", near)
        _sh("ip", "link", "set", near, "up")
        _sh("ip", "-n", name, "addr", "add", f"{FAR}/30", "dev", far)
        _sh("ip", "-n", name, "link", "set", far, "up")
        _sh("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _sh("ip", "netns", "delete", name)


@dataclass
class Hosts:
    """Both hosts. secret: what users of the Ray cluster must have in their environment.   states: state directories."""

    port: int
    secret: dict[str, str]
    states: dict[str, Path]
    network: str

    def kill_far(self) -> None:
        """Let the far host lose its power."""
        pids = subprocess.run(["ip", "netns", "pids", self.network], capture_output=True, text=True, check=True)
        for pid in map(int, pids.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts(far_network: str, free_ports, tmp_path: Path) -> Iterator[Hosts]:
    (port,) = free_ports(1)
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    states = {NEAR: tmp_path / "near", FAR: tmp_path / "far"}
    boot_id = tmp_path / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    common = ["--num-cpus", "0", "--object-store-memory", str(80 << 20), "--block"]
    common += ["--min-worker-port", "0", "--max-worker-port", "0"]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, contextlib.ExitStack() as running:

        def start(address: str, resources: dict[str, float], prefix: list[str], *more: str) -> None:
            command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", address]
            command += ["--resources", json.dumps(resources), "--temp-dir", f"{folder}/{address}", *common, *more]
            environ = {**os.environ, **secret, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(states[address])}
            process = subprocess.Popen(
                command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            running.callback(_end, process)

        numa = {"numa:0": 1.0, "numa:1": 1.0}
        start(NEAR, numa, [], "--head", "--port", str(port), "--include-dashboard", "false")
        _await_open(NEAR, port)
        other_host = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id; exec "$@"'
        prefix = ["ip", "netns", "exec", far_network, "unshare", "-m", "bash", "-c", other_host, "bash"]
        start(FAR, {**numa, "decode_host": 1.0}, prefix, "--address", f"{NEAR}:{port}")
        found = Hosts(port, secret, states, far_network)
        running.callback(found.kill_far)
        yield found


def _await_open(address: str, port: int) -> None:
    import socket

    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return
        assert time.monotonic() < deadline, "Ray's head did not come up"
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _, left = psutil.wait_procs(family, timeout=5)
        for one in left:
            one.kill()


def ids(cluster: Any, length: int) -> list[int]:
    golden = GOLDEN[f"gen_{length}"]
    fields = {"model": "oracle-tiny", "prompt": GOLDEN[f"prompt_{length}"].tolist(), "max_tokens": len(golden)}
    fields |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def names_in_ray(hosts: Hosts) -> set[str]:
    """Return the names of living actors and of placement groups that hold a place, as another user of Ray sees them."""
    code = (
        "import json, sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
        "names = [a['name'] for a in ray.util.list_named_actors(all_namespaces=True)]\n"
        "places = [g['name'] for g in ray.util.placement_group_table().values() if g['state'] == 'CREATED']\n"
        "print(json.dumps([n for n in names if not n.startswith('host.')] + places))"
    )
    command = [sys.executable, "-c", code, f"{NEAR}:{hosts.port}"]
    done = subprocess.run(command, env={**os.environ, **hosts.secret}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
def test_ray_cluster_of_two_hosts_serves_mends_itself_and_outlives_a_host(
    launch, oracle_model: Path, tmp_path: Path, hosts: Hosts
) -> None:
    config = tmp_path / "hosts.yaml"
    config.write_text(CONFIG.format(near=NEAR, port=hosts.port))
    cluster = launch(str(config), "--model", str(oracle_model), environ=hosts.secret)
    cluster.await_ready()

    # prefill here, decode there, the cache over the wire; nothing listens on a loopback address
    workers = cluster.workers()
    assert workers["prefill-0"]["url"].startswith(f"http://{NEAR}:")
    assert workers["decode-0"]["url"].startswith(f"http://{FAR}:")
    (pair,) = cluster.topology()["pairs"]
    assert (pair["transport"], pair["lane"]) == ("nixl", "tcp")
    assert [ids(cluster, n) for n in (1, 129, 701)] == [GOLDEN[f"gen_{n}"].tolist() for n in (1, 129, 701)]
    for address, name in ((NEAR, "prefill-0"), (FAR, "decode-0")):
        logs = hosts.states[address] / "isthmus" / str(cluster.port) / "logs"
        assert {path.name for path in logs.iterdir()} == {f"{name}.leader.log", f"{name}.rank0.log"}

    # a leader there that is stopped is killed there, and its group starts again
    os.kill(workers["decode-0"]["leader_pid"], signal.SIGSTOP)
    old = workers["decode-0"]["generation"]
    cluster.await_true(lambda: cluster.workers()["decode-0"]["generation"] != old, timeout_s=60)
    cluster.await_ready()
    assert ids(cluster, 64) == GOLDEN["gen_64"].tolist()

    # life 2 of it, and a place for each group
    prefill = {"prefill-0", "prefill-0.leader.1", "prefill-0.rank0.1"}
    assert names_in_ray(hosts) == prefill | {"decode-0", "decode-0.leader.2", "decode-0.rank0.2"}

    # a second decode group on this host; then the other host is gone
    added = cluster.run_command("add", "decode", "--node", NEAR)
    assert added.returncode == 0, added.stdout + added.stderr
    assert cluster.workers()["decode-1"]["url"].startswith(f"http://{NEAR}:")
    hosts.kill_far()
    assert [ids(cluster, n) for n in (5, 300)] == [GOLDEN[f"gen_{n}"].tolist() for n in (5, 300)]
    # while decode-0 waits for a host, the cluster does what it is asked: here, to give it up
    cluster.await_true(lambda: "decode-0: starting again" in cluster.output.split("decode-1: ready")[-1], timeout_s=60)
    drained = cluster.run_command("drain", "decode-0")
    assert drained.returncode == 0, drained.stdout + drained.stderr + cluster.output
    assert cluster.workers().keys() == {"prefill-0", "decode-1"}
    assert names_in_ray(hosts) == prefill | {"decode-1", "decode-1.leader.1", "decode-1.rank0.1"}
    assert cluster.stop(signal.SIGTERM) == 0
    assert names_in_ray(hosts) == set()
