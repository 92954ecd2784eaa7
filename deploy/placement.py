"""Which CPUs and GPUs each worker group gets: pure decisions on ClusterConfig and NumaTopology.

On a machine with one NUMA node the CPUs are split between node 0 and node 1 of the configuration, and every report
says `simulated`. Groups of one node share its CPUs; GPUs are handed out once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.numa import NumaTopology, format_cpu_list, parse_cpu_list


@dataclass(frozen=True, slots=True)
class Placement:
    """config: with `cpus` filled in if the group is pinned.   gpus: CUDA indices in PCI order; () on CPU."""

    config: EngineConfig
    gpus: tuple[int, ...]
    is_simulated: bool

    @property
    def environment(self) -> dict[str, str]:
        """Return what a rank's process must find before it loads torch."""
        variables = {"OMP_NUM_THREADS": str(self.config.threads)}
        if self.gpus:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return variables

    def describe(self) -> str:
        config = self.config
        if not config.cpus:
            where = "not pinned"
        else:
            where = f"NUMA node {config.numa_node}, CPUs {config.cpus}" + (" (simulated)" if self.is_simulated else "")
        gpus = f", GPUs {format_cpu_list(self.gpus)}" if self.gpus else ""
        threads = "" if config.threads == 1 else f", {config.threads} threads a rank"
        return f"{where}{gpus}{threads}"


def place(
    groups: tuple[EngineConfig, ...], topology: NumaTopology, *, taken: Collection[int] = ()
) -> tuple[Placement, ...]:
    """Place every group, in order. Raises ConfigError for a missing node or CPU, or too few GPUs.

    taken: GPUs that other groups have.
    """
    free_gpus = [gpu for gpu in range(len(topology.gpus)) if gpu not in taken]
    all_cpus = {cpu for node in topology.nodes for cpu in node.cpus}
    placements = []
    for group in groups:
        cpus = _cpus_for(group, topology, all_cpus)
        gpus: tuple[int, ...] = ()
        if group.device.startswith("cuda"):
            gpus = _take_gpus(group, topology, free_gpus)
        placements.append(
            Placement(
                config=msgspec.structs.replace(group, cpus=format_cpu_list(cpus)),
                gpus=gpus,
                is_simulated=bool(cpus) and topology.is_single,
            )
        )
    return tuple(placements)


def _cpus_for(group: EngineConfig, topology: NumaTopology, all_cpus: set[int]) -> tuple[int, ...]:
    try:
        node_cpus = topology.cpus_of(group.numa_node) if group.numa_node >= 0 else ()
    except ValueError as error:
        raise ConfigError(f"{group.worker_id}: {error}") from None
    if not group.cpus:
        return node_cpus
    cpus = parse_cpu_list(group.cpus)
    if unknown := set(cpus) - all_cpus:
        raise ConfigError(
            f"{group.worker_id}: cpus = {group.cpus}: the machine has no CPU {format_cpu_list(unknown)}; "
            f"it has {format_cpu_list(all_cpus)}"
        )
    return cpus


def _take_gpus(group: EngineConfig, topology: NumaTopology, free: list[int]) -> tuple[int, ...]:
    """Remove `ranks` GPUs from `free`: those of the group's node; any if the group or the firmware names no node."""
    are_told = any(gpu.node >= 0 for gpu in topology.gpus)
    wants_node = group.numa_node >= 0 and are_told and not topology.is_single
    near = [gpu for gpu in free if not wants_node or topology.gpus[gpu].node == group.numa_node]
    if len(near) < group.ranks:
        place_name = f"on NUMA node {group.numa_node}" if wants_node else "on this machine"
        raise ConfigError(
            f"{group.worker_id}: ranks = {group.ranks} with device {group.device}, but {len(near)} GPUs are free "
            f"{place_name}; lower ranks, choose another numa_node, or set device: cpu"
        )
    taken = tuple(near[: group.ranks])
    for gpu in taken:
        free.remove(gpu)
    return taken
