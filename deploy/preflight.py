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
from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.memory_plan import MemoryPlan, plan_memory
from engine.model.folder_check import require_loadable
from engine.numa import SYSFS, NumaTopology, discover
from engine.served_model import served_model

DISTRIBUTION = "isthmus"
PACKAGES = ("router", "prefill_worker", "decode_worker", "kv_transfer", "kernels", "engine", "bench", "deploy")


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found to hold. placements, plans: one per group, in the order of ClusterConfig.groups.

    published: name of the built-in config that stands in for a model folder which is not here; "": the folder is.
    unplaced: why there are no placements; "": there are.
    """

    topology: NumaTopology
    placements: tuple[Placement, ...]
    plans: tuple[MemoryPlan, ...]
    published: str = ""
    unplaced: str = ""


def check(config: ClusterConfig, *, sysfs: Path = SYSFS, needs_port: bool = True, is_plan: bool = False) -> Preflight:
    """Check names, ports, model files, memory plan and placement. Raises ConfigError, the first thing that is wrong.

    is_plan: for another machine, maybe: this one need not have the GPUs, nor a published model's files.
    """
    require_own_packages()
    require_own_ports(config)
    if needs_port:
        require_free_ports(config)
    topology = discover(sysfs)
    placements, unplaced = _place(config, topology, is_plan=is_plan)
    plans, published = [], ""
    for group in config.groups:
        plan, is_published = plan_group(group, is_plan=is_plan)
        plans.append(plan)
        published = Path(group.model).name if is_published else ""
    return Preflight(topology, placements, tuple(plans), published, unplaced)


def plan_group(group: EngineConfig, *, is_plan: bool = False) -> tuple[MemoryPlan, bool]:
    """Return a group's memory plan, and whether a published config stands in for its model folder.

    Raises ConfigError if the plan does not fit, or the folder has not what would be loaded.
    """
    try:
        model = served_model(group, needs_folder=not is_plan)
        plan = plan_memory(group, model.config)
        if not (is_plan and model.is_published) and group.load_format != "synthetic":
            require_loadable(group.model, model.config)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{group.worker_id}: {error}") from None
    return plan, model.is_published


def place_groups(config: ClusterConfig, topology: NumaTopology) -> tuple[Placement, ...]:
    """Return where the groups go. Raises ConfigError if one can't."""
    return place(config.groups, topology, unset=config.without_node)


def _place(config: ClusterConfig, topology: NumaTopology, *, is_plan: bool) -> tuple[tuple[Placement, ...], str]:
    """Return placements, or none and why, where a plan is for other GPUs than this machine has, or for other hosts."""
    if config.supervisor.ray_address:
        return (), "the hosts of the Ray cluster are asked when a group comes to them"
    try:
        return place_groups(config, topology), ""
    except ConfigError as error:
        if is_plan and any(group.device == "cuda" for group in config.groups):
            return (), str(error)
        raise


def require_own_ports(config: ClusterConfig) -> None:
    """Raise ConfigError if two processes of this host are given one port."""
    users: dict[int, str] = {}
    for _, port, user in _given_ports(config):
        if port in users:
            raise ConfigError(f"port {port}: given to {users[port]} and to {user}; give each its own, or leaders none")
        users[port] = user


def require_free_ports(config: ClusterConfig) -> None:
    """Raise ConfigError unless the router, and each leader that is given a port, could listen there now."""
    require_own_ports(config)
    for host, port, _ in _given_ports(config):
        require_free_port(host, port)


def _given_ports(config: ClusterConfig) -> list[tuple[str, int, str]]:
    """Return (host, port, whose) of the router and of leaders that are given one.

    Leaders that a cluster of several hosts places are another host's, maybe: Host.place looks at theirs.
    """
    given = [(config.router.host, config.router.port, "router")]
    if not config.supervisor.ray_address:
        given += [(group.host, group.port, group.worker_id) for group in config.groups if group.port]
    return given


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
