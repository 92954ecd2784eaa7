"""What a group that joins a running cluster is told: the settings of its role, and those given with `isthmus add`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deploy.config import ClusterConfig, require_consistent, require_joined_ray
from deploy.host_wish import HostWish, take_wish
from deploy.preflight import plan_group
from engine.config import EngineConfig
from engine.flags import FIELDS, ConfigError, Layer, resolve
from router.protocol import WorkerRole

ORIGIN = "isthmus add"


def new_group(
    config: ClusterConfig, role: WorkerRole, settings: Mapping[str, Any], *, used_ids: Collection[str]
) -> tuple[EngineConfig, HostWish]:
    """Return configuration and wish of one more group of `role`, like the last one of the cluster's configuration.

    settings: fields of EngineConfig, `node` and `ray_resources`, that differ.   used_ids: of groups that are or were.
    Raises ConfigError for what can't be, also for what could not link with the others or does not fit into memory.
    """
    pattern = [group for group in config.groups if group.role == role][-1]
    given = dict(settings)
    wish = take_wish(given, where=ORIGIN) or config.wishes.get(pattern.worker_id, HostWish())
    require_joined_ray(wish, config.supervisor, where=ORIGIN)
    # a port is taken already, and CPUs are of the node that the pattern is on
    own = {"worker_id", "port"} | ({"cpus"} if "numa_node" in given else set())
    base: dict[str, object] = {f.name: getattr(pattern, f.name) for f in FIELDS if f.name not in own}
    base["worker_id"] = _free_id(role, used_ids)
    group, _ = resolve([Layer(ORIGIN, given), Layer(pattern.worker_id, base)], role=role)
    if group.worker_id in used_ids:
        raise ConfigError(f"worker_id = {group.worker_id!r} ({ORIGIN}): used before; leave it out, or choose another")
    require_consistent([pattern, group])
    plan_group(group)
    return group, wish


def _free_id(role: str, used_ids: Collection[str]) -> str:
    """Return the next name: logs and metrics of one that has left stay its own."""
    number = 0
    while f"{role}-{number}" in used_ids:
        number += 1
    return f"{role}-{number}"
