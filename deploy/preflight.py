"""What must hold before anything is started; every refusal names the thing to change."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import socket
from dataclasses import dataclass
from pathlib import Path

from deploy.config import ClusterConfig
from deploy.placement import Placement, place
from engine.flags import ConfigError
from engine.memory_plan import MemoryPlan, plan_memory
from engine.model.config import load_config, shard_paths
from engine.numa import SYSFS, NumaTopology, discover

DISTRIBUTION = "isthmus"
PACKAGES = ("router", "prefill_worker", "decode_worker", "kv_transfer", "kernels", "engine", "bench", "deploy")


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found to hold. plans: one per group, in the order of ClusterConfig.groups."""

    topology: NumaTopology
    placements: tuple[Placement, ...]
    plans: tuple[MemoryPlan, ...]


def check(config: ClusterConfig, *, sysfs: Path = SYSFS, needs_port: bool = True) -> Preflight:
    """Check names, ports, model files, memory plan and placement. Raises ConfigError, the first thing that is wrong."""
    require_own_packages()
    if needs_port:
        require_free_port(config.router.host, config.router.port)
    topology = discover(sysfs)
    placements = place(config.groups, topology)
    plans = []
    for group in config.groups:
        try:
            plans.append(plan_memory(group, load_config(group.model)))
            shard_paths(group.model)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{group.worker_id}: {error}") from None
    return Preflight(topology, placements, tuple(plans))


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError unless the router could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = (
                    f"taken by another program; stop it (`isthmus down --port {port}` if it is ours) "
                    "or choose another --port"
                )
            else:
                remedy = f"{error.strerror}; choose another --host or --port"
            raise ConfigError(f"port {port} on {host}: {remedy}") from None


def require_own_packages() -> None:
    """Raise ConfigError if another distribution provides one of our package names, or if it is found elsewhere.

    Our names are plain words: a package that owns one of them would be overwritten, or would shadow ours.
    """
    for name, owners in importlib.metadata.packages_distributions().items():
        if name in PACKAGES and (strangers := sorted({owner for owner in owners if owner.lower() != DISTRIBUTION})):
            raise ConfigError(
                f"package {name}: also provided by the installed distribution {strangers[0]}, which clashes with ours; "
                f"run `pip uninstall {strangers[0]}`, or install Isthmus into an environment of its own"
            )
    root = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != root / name:
            raise ConfigError(f"package {name}: wanted {root / name}, found {found}; remove it from PYTHONPATH")
