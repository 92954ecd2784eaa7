"""`isthmus add` and `isthmus drain`: one more worker group, or one less, while the cluster serves."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from deploy import state
from deploy.control import ControlClient, Groups, connect
from deploy.group import StartFailed
from deploy.status import choose_cluster
from engine.flags import ConfigError
from kernels.table import counted
from router.protocol import WorkerRole

POLL_S = 0.25

_console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def add(
    role: WorkerRole, settings: dict[str, Any], *, port: int | None, waits: bool, environ: Mapping[str, str]
) -> int:
    """Add a group; with `waits` return when it is ready, or 1 if it never will be. Raises ConfigError."""
    cluster = choose_cluster(state.running(environ), port)
    with connect(cluster.run_dir) as client:
        try:
            worker_id = client.add(role, settings)
        except StartFailed as error:
            _console.print(f"not added: {error}", markup=False)
            return 1
        _console.print(f"{worker_id}: starts")
        return _await_ready(client, worker_id, cluster.url) if waits else 0


def drain(worker_id: str, *, port: int | None, timeout_s: float, waits: bool, environ: Mapping[str, str]) -> int:
    """Drain a group; with `waits` return when it has left. Raises ConfigError."""
    cluster = choose_cluster(state.running(environ), port)
    with connect(cluster.run_dir) as client:
        try:
            client.drain(worker_id, timeout_s)
        except StartFailed as error:
            _console.print(str(error), markup=False)
            return 1
        return _await_left(client, worker_id) if waits else 0


def read_settings(path: str) -> dict[str, Any]:
    """Return the settings of one group from a YAML file. Raises ConfigError if it holds none."""
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8: {error.reason} at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: wanted `key: value` lines with the settings of one group, such as `numa_node: 1`")
    return {str(key): value for key, value in document.items() if value is not None}


def _await_ready(client: ControlClient, worker_id: str, url: str) -> int:
    """Print the group's states as the router tells them."""
    shown = ""
    while True:
        found = client.groups()
        if found is None or worker_id in found.left:
            _say_how_it_left(found, worker_id)
            return 1
        pairs = _pairs(url, worker_id)
        state_now = "ready" if "ready" in pairs.values() else ", ".join(f"{p}: {s}" for p, s in sorted(pairs.items()))
        if state_now and state_now != shown:
            shown = state_now
            _console.print(f"{worker_id}: {shown}", markup=False)
        if shown == "ready":
            return 0
        time.sleep(POLL_S)


def _pairs(url: str, worker_id: str) -> dict[str, str]:
    """Return the state of each pair that the worker is in, by the other's name."""
    try:
        topology = httpx.get(f"{url}/topology", timeout=5, trust_env=False).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return {}
    return {
        f"{pair['prefill']} -> {pair['decode']}": pair["state"]
        for pair in topology["pairs"]
        if worker_id in (pair["prefill"], pair["decode"])
    }


def _await_left(client: ControlClient, worker_id: str) -> int:
    shown = ""
    while True:
        found = client.groups()
        if found is None or worker_id in found.left:
            return 0 if _say_how_it_left(found, worker_id).startswith("drained") else 1
        for group in found.groups:
            text = f"{group.worker_id}: {counted(group.num_requests, 'request')} left"
            if group.worker_id == worker_id and text != shown:
                shown = text
                _console.print(shown)
        time.sleep(POLL_S)


def _say_how_it_left(found: Groups | None, worker_id: str) -> str:
    how = "the cluster has ended" if found is None else found.left[worker_id]
    _console.print(f"{worker_id}: {how}", markup=False)
    return how
