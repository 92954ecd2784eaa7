"""`isthmus status` and `isthmus down`: what runs, and its end."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from deploy import state
from deploy.state import ClusterState
from engine.flags import ConfigError

_console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def status(*, port: int | None, as_json: bool, environ: Mapping[str, str]) -> int:
    """Print every running cluster, or the one on `port`; return 1 if there is none."""
    clusters = [cluster for cluster in state.running(environ) if port in (None, cluster.port)]
    if not clusters:
        _console.print("no cluster is running" + (f" on port {port}" if port else ""))
        return 1
    for cluster in clusters:
        topology = _get(f"{cluster.url}/topology")
        if as_json:
            print(json.dumps(topology or {}, indent=1))
            continue
        _console.print(f"{cluster.url}  pid {cluster.pid}  {cluster.source}  {cluster.model}  logs {cluster.log_dir}")
        if topology is None:
            _console.print("  the router does not answer (yet)")
            continue
        _console.print(_worker_table(topology))
        for worker in topology.get("workers", []):
            if memory := worker.get("memory"):
                _console.print(f"  {worker['id']}: {_memory_line(memory)}")
            for line in numa_lines(worker):
                _console.print(f"  {line}")
        for pair in topology.get("pairs", []):
            lane = ""
            if link := pair.get("link"):
                speed = f"{link['gb_per_s']:.1f} GB/s, {link['latency_us']:.0f} us"
                lane = f", {pair['transport']} over {pair['lane']}, {speed}{_staging_text(pair)}"
            _console.print(f"  {pair['prefill']} -> {pair['decode']}: {pair['state']}{lane}")
    return 0


def choose_cluster(clusters: list[ClusterState], port: int | None) -> ClusterState:
    """Return the cluster on `port`, or the only one. Raises ConfigError if there is none, or several."""
    chosen = [cluster for cluster in clusters if port in (None, cluster.port)]
    if not chosen:
        raise ConfigError("no cluster is running" + (f" on port {port}" if port else "") + "; start one: isthmus up")
    if len(chosen) > 1:
        ports = ", ".join(str(cluster.port) for cluster in chosen)
        raise ConfigError(f"--port: several clusters run (ports {ports}); name one")
    return chosen[0]


def down(*, port: int | None, every: bool, timeout_s: float, environ: Mapping[str, str]) -> int:
    """Stop clusters by SIGTERM, wait, kill what is left. Raises ConfigError if it is unclear which one is meant."""
    clusters = state.running(environ)
    chosen = clusters if every else [cluster for cluster in clusters if port in (None, cluster.port)]
    if not chosen:
        _console.print("no cluster is running" + (f" on port {port}" if port else ""))
        return 0 if every else 1
    if len(chosen) > 1 and not every:
        ports = ", ".join(str(cluster.port) for cluster in chosen)
        raise ConfigError(f"--port: several clusters run (ports {ports}); name one, or use --all")
    return max(_stop(cluster, timeout_s, environ) for cluster in chosen)


def _memory_line(memory: Mapping[str, Any]) -> str:
    """Return what a rank's memory goes to, largest first."""
    parts = ", ".join(f"{part['name']} {part['num_bytes'] / 2**30:.2f}" for part in memory["parts"])
    if not memory["device_bytes"]:
        return f"memory of a rank, GiB: {parts}"
    origin = "measured" if memory["is_measured"] else "planned"
    left, device = memory["left_bytes"] / 2**30, memory["device_bytes"] / 2**30
    return f"memory of a rank, GiB, {origin}: {parts}; left {left:.2f} of {device:.2f}"


def numa_lines(worker: Mapping[str, Any]) -> list[str]:
    """Return, per rank of a /topology worker, what NUMA binding was verified, then what to do about what is amiss."""
    lines = []
    for rank in worker.get("ranks", []):
        numa, name = rank["numa"], f"{worker['id']} rank {rank['rank']}"
        lines.append(f"{name}: NUMA {numa['status']}: {numa['evidence']}")
        lines += [f"{name}: warning: {text}" for text in numa.get("warnings", [])]
    return lines


def _staging_text(pair: Mapping[str, Any]) -> str:
    """Return where the receiver's staging memory lies: it should be on the decode side's node."""
    pages = pair.get("staging_pages") or {}
    where = ", ".join(f"{count:,} on node {node}" for node, count in sorted(pages.items()))
    return f", staging pages: {where}" if where else ""


def _worker_table(topology: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    for column in (
        "worker",
        "state",
        "address",
        "leader",
        "ranks",
        "NUMA",
        "running",
        "waiting",
        "free blocks",
        "landings",
    ):
        table.add_column(column)
    for worker in topology.get("workers", []):
        ranks = worker.get("ranks", [])
        places = {f"{rank['numa']['status']} node {rank['numa']['node']}" for rank in ranks}
        stats = (_get(f"{worker['url']}/info") or {}).get("stats", {})
        table.add_row(
            worker["id"],
            worker["state"],
            worker["url"].removeprefix("http://"),
            f"pid {worker['leader_pid']}",
            ", ".join(f"{rank['rank']}: pid {rank['pid']} {rank['device']}" for rank in ranks),
            ", ".join(sorted(places)),
            *(str(stats.get(name, 0)) for name in ("num_running", "num_waiting", "free_blocks", "open_landings")),
        )
    return table


def _stop(cluster: ClusterState, timeout_s: float, environ: Mapping[str, str]) -> int:
    process = cluster.process
    if process is None:
        return 0
    family = [process, *process.children(recursive=True)]
    _console.print(f"stopping {cluster.url} (pid {cluster.pid})")
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while cluster.process is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    if cluster.process is None:
        _console.print("stopped")
        return 0
    _console.print(f"not stopped after {timeout_s:g} s: killed")
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)
    state.running(environ)
    return 1


def _get(url: str) -> dict[str, Any] | None:
    try:
        reply = httpx.get(url, timeout=5, trust_env=False)
        return dict(reply.json()) if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
