"""What a cluster holds when nothing runs, to be compared before and after: pools, records, processes."""

from __future__ import annotations

import collections
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
IDLE_TIMEOUT_S = 30.0
_POOLS = (
    "num_running",
    "num_waiting",
    "free_blocks",
    "free_slots",
    "held_blocks",
    "quarantined_blocks",
    "open_landings",
)


def read(cluster: Any) -> dict[str, Any]:
    """Return what the router and every worker hold, and how many processes of each kind there are."""
    topology = cluster.topology()
    held: dict[str, Any] = {
        "router": {"requests": topology["router"]["num_requests"], "queued": topology["router"]["num_queued"]}
    }
    for worker in topology["workers"]:
        stats = httpx.get(f"{worker['url']}/info").raise_for_status().json()["stats"]
        held[worker["id"]] = {name: stats.get(name, 0) for name in _POOLS}
    held["processes"] = processes(cluster)
    held["orphans"] = orphans(cluster)
    return held


def is_idle(held: dict[str, Any]) -> bool:
    idle = ("requests", "queued", "num_running", "num_waiting", "held_blocks", "quarantined_blocks", "open_landings")
    parts = [part for name, part in held.items() if name not in ("processes", "orphans")]
    return not any(part.get(name, 0) for part in parts for name in idle)


def await_idle(cluster: Any) -> dict[str, Any]:
    """Return the reading as soon as nothing is held; the last one, for the caller to judge, if that never comes."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        held = read(cluster)
        if (is_idle(held) and not held["orphans"]) or time.monotonic() > deadline:
            return held
        time.sleep(0.25)


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert is_idle(after), f"something is held although nothing runs: {after}"
    changed = {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}
    assert changed == {}


def processes(cluster: Any) -> dict[str, int]:
    """Count the cluster's processes by what they are; zombies apart, those that Ray's raylet has not collected too."""
    counts: collections.Counter[str] = collections.Counter()
    for process in cluster.family():
        try:
            name = process.name()
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                counts[name] += 1
            elif (process.parent() or process).name() != "raylet":
                counts[f"zombie {name}"] += 1
        except psutil.NoSuchProcess:
            continue
    return dict(sorted(counts.items()))


def orphans(cluster: Any) -> list[str]:
    """Return processes with this cluster's environment that do not descend from it any more."""
    family = {process.pid for process in cluster.family()}
    state_home = cluster.environ["XDG_STATE_HOME"]
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in family and process.environ().get("XDG_STATE_HOME") == state_home:
                found.append(f"{process.pid} {process.name()} {process.status()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


def machine() -> dict[str, Any]:
    """Return the conditions that a result depends on."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "commit": git.stdout.strip(),
        "cpu": model[0].split(":")[1].strip() if model else platform.processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_result(name: str, conditions: dict[str, Any], counts: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / name).write_text(json.dumps({"conditions": conditions, "result": counts}, indent=2) + "\n")
