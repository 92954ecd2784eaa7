"""Starting and ending the Ray that a cluster runs on: private to it, on loopback, with files in its own folder only.

Settings are environment variables that Ray reads when it is first imported, so nothing above imports it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from engine.flags import ConfigError
from engine.numa import NumaTopology

JOIN_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 100 << 20  # we pass nothing through it; Ray wants at least 75 MiB
NAMESPACE = "isthmus"

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # its out-of-memory killer would choose a rank; our memory is planned
    "RAY_memory_monitor_refresh_ms": "0",
    # we choose GPUs by NUMA node; Ray would hide them from an actor that asks it for none
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would run leaders and ranks at nice 15: on a busy host they would starve, and be taken for stopped
    "RAY_worker_niceness": "0",
    # a head that is gone for a minute is no reason to end every process
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


_PRIVATE = {
    # despite its name: this host is the whole cluster, so every port of Ray listens on loopback only
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}
# UCX, which carries the cache, would listen on every network card of the host as well
_LOOPBACK_ONLY = ("UCX_NET_DEVICES", "lo")


def start(folder: Path, *, topology: NumaTopology, environ: MutableMapping[str, str], address: str = "") -> None:
    """Start a private Ray below `folder`, or join the one at `address`.

    Ray refuses processes without the cluster's token. A private Ray gets a token of its own in the environment, so
    that neither a file in the home folder nor another cluster's token matters; a joined one uses the user's token.
    """
    environ.update(_ENVIRONMENT)
    if address:
        environ.setdefault("RAY_AUTH_MODE", "token")  # Ray itself would go without where this user has none
    else:
        environ.update(_PRIVATE)
        environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        environ.pop("RAY_AUTH_TOKEN_PATH", None)
        environ.pop("RAY_ADDRESS", None)
        environ.setdefault(*_LOOPBACK_ONLY)

    common: dict[str, Any] = {
        "namespace": f"{NAMESPACE}-{socket.gethostname()}-{os.getpid()}",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if address:
        _join(address, common)
        return
    nodes = {f"numa:{node.id}": 1.0 for node in topology.nodes}
    if topology.is_single:
        nodes = {"numa:0": 1.0, "numa:1": 1.0}
    errors = _init(
        # no CPUs to hand out, hence no idle processes kept ready for them
        num_cpus=0,
        num_gpus=0,
        resources=nodes,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        _temp_dir=str(folder),
        **common,
    )
    if errors:
        raise errors[0]


def _join(address: str, settings: dict[str, Any]) -> None:
    """Join a running Ray."""
    errors = _init(timeout_s=JOIN_TIMEOUT_S, address=address, **settings)
    if errors is None or errors:
        reason = " ".join(str(errors[0]).split()) if errors else f"no answer within {JOIN_TIMEOUT_S:g} s"
        raise ConfigError(
            f"ray_address = {address!r}: {reason}; check the address, and that this user's token (~/.ray/auth_token or "
            "RAY_AUTH_TOKEN) is the cluster's; a cluster that was started without tokens, open to its whole network, "
            "is joined with RAY_AUTH_MODE=disabled"
        )


def _init(*, timeout_s: float | None = None, **settings: Any) -> list[BaseException] | None:
    """Run ray.init; return what it raised, or None if it did not end in time.

    In a thread of its own: there Ray leaves SIGTERM alone (its handler raises SystemExit wherever Ray happens to be,
    which may get lost), and a Ray that can't be reached, or has another token, blocks in native code. The thread stays:
    after the end of the one that connected, the next call into Ray does not return (seen with Ray 2.60).
    """
    import ray

    errors: list[BaseException] = []
    is_over, never = threading.Event(), threading.Event()

    def init() -> None:
        try:
            ray.init(**settings)
        except BaseException as error:
            errors.append(error)
        is_over.set()
        if not errors:
            never.wait()

    threading.Thread(target=init, name="ray-init", daemon=True).start()
    return errors if is_over.wait(timeout_s) else None


def runtime_environment(cpus: str, node: int, *, topology: NumaTopology) -> dict[str, Any]:
    """Return the runtime_env that starts a process on its node from the first instruction, or {} if that can't be.

    numactl given a node that does not exist ends at once, and Ray would start it again for ever: so it is tried here
    first. Without numactl, and on one node, the process binds itself (engine.numa.bind).
    """
    numactl = shutil.which("numactl")
    if not numactl or topology.is_single or node < 0 or not cpus:
        return {}
    prefix = [numactl, f"--physcpubind={cpus}", f"--membind={node}"]
    trial = subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=10)
    if trial.returncode != 0:
        return {}
    return {"py_executable": " ".join([*prefix, sys.executable])}
