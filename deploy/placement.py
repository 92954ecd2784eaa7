"""Which node, CPUs and GPUs each worker group gets: pure decisions on its EngineConfig and NumaTopology.

Prefill goes to one node and decode to another, unless the configuration says where. On a machine with one NUMA node
CPUs are split between node 0 and node 1 of the configuration, and every report says `simulated`. Groups of one node
share its CPUs; GPUs are handed out once, those of the group's own node first: others work, at a price that is told.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.numa import NumaTopology, format_cpu_list, parse_cpu_list
from kernels.table import counted


@dataclass(frozen=True, slots=True)
class Placement:
    """config: with `cpus` filled in if the group is pinned.   gpus: CUDA indices in PCI order; () on CPU.

    warnings: what lies on another node than it should, each with what to do.
    """

    config: EngineConfig
    gpus: tuple[int, ...]
    is_simulated: bool
    warnings: tuple[str, ...] = ()

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
    groups: Sequence[EngineConfig],
    topology: NumaTopology,
    *,
    unset: Collection[str] = (),
    taken: Collection[int] = (),
) -> tuple[Placement, ...]:
    """Place every group. unset: worker_ids of those whose numa_node nobody has set; they get one (see choose_nodes).

    taken: GPUs that groups have which are not among these.
    Raises ConfigError for a missing node or CPU, or too few GPUs on the machine.
    """
    groups = choose_nodes(groups, topology, unset=unset)
    all_cpus = {cpu for node in topology.nodes for cpu in node.cpus}
    cpus = [_cpus_for(group, topology, all_cpus) for group in groups]
    gpus = _share_gpus(groups, topology, given=taken)
    return tuple(
        Placement(
            config=msgspec.structs.replace(group, cpus=format_cpu_list(own_cpus)),
            gpus=own_gpus,
            is_simulated=bool(own_cpus) and topology.is_single,
            warnings=_warnings(group, own_gpus, topology),
        )
        for group, own_cpus, own_gpus in zip(groups, cpus, gpus, strict=True)
    )


def choose_nodes(
    groups: Sequence[EngineConfig], topology: NumaTopology, *, unset: Collection[str]
) -> tuple[EngineConfig, ...]:
    """Return the groups with a node for those in `unset` that have no CPU list either; as they are on one node.

    A node with enough GPUs left wins, then one without groups of the other role, then the one with fewest groups.
    """
    if topology.is_single:
        return tuple(groups)
    chosen: list[EngineConfig] = []
    fixed = [group for group in groups if group.worker_id not in unset]
    for group in groups:
        if group.worker_id in unset and not group.cpus and group.numa_node < 0:
            settled = [*fixed, *(other for other in chosen if other.worker_id in unset)]
            group = msgspec.structs.replace(group, numa_node=_best_node(group, settled, topology))
        chosen.append(group)
    return tuple(chosen)


def nic_warnings(groups: Sequence[EngineConfig], topology: NumaTopology, net_devices: str) -> list[str]:
    """Say of each pinned group what is wrong with its way to other hosts.

    net_devices: UCX_NET_DEVICES; "" and "all": UCX chooses among all cards, and may take one of the other node.
    """
    if topology.is_single or all(nic.node < 0 for nic in topology.nics):
        return []
    named = [] if net_devices in ("", "all") else net_devices.split(",")
    warnings = []
    for group in groups:
        if group.numa_node < 0:
            continue
        near = [nic.name for nic in topology.nics if nic.node == group.numa_node and nic.is_up]
        far = [nic for nic in topology.nics if nic.name in named and nic.node not in (-1, group.numa_node)]
        what = f"{group.worker_id}: NUMA node {group.numa_node}"
        if not near:
            warnings.append(
                f"{what} has no network card that is up: cache to or from other hosts crosses the sockets first; put a "
                "card into one of its slots, or bind the group to the node that has one"
            )
        elif far:
            cards = ", ".join(f"{nic.name} on node {nic.node}" for nic in far)
            warnings.append(f"{what}, but UCX_NET_DEVICES names {cards}; set UCX_NET_DEVICES={','.join(near)}")
        elif not named and len({nic.node for nic in topology.nics if nic.is_up}) > 1:
            warnings.append(
                f"{what}: UCX may take a network card of another node; set UCX_NET_DEVICES={','.join(near)} for its "
                "ranks if it does (`isthmus status` shows the lane and its speed)"
            )
    return warnings


def _best_node(group: EngineConfig, settled: Sequence[EngineConfig], topology: NumaTopology) -> int:
    def cost(node: int) -> tuple[bool, bool, int, int]:
        here = [other for other in settled if other.numa_node == node]
        free = len(topology.gpus_of(node)) - sum(other.ranks for other in here if _wants_gpus(other))
        lacks_gpus = _wants_gpus(group) and topology.tells_gpu_nodes and free < group.ranks
        return lacks_gpus, any(other.role != group.role for other in here), len(here), node

    return min((node.id for node in topology.nodes), key=cost)


def _wants_gpus(group: EngineConfig) -> bool:
    return group.device.startswith("cuda")


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


def _share_gpus(
    groups: Sequence[EngineConfig], topology: NumaTopology, *, given: Collection[int]
) -> list[tuple[int, ...]]:
    """Return each group's GPUs: first those of its own node, for all groups; then what is missing, from the rest."""
    free = [gpu for gpu in range(len(topology.gpus)) if gpu not in given]
    taken: list[list[int]] = [[] for _ in groups]

    def take(own: list[int], group: EngineConfig, candidates: list[int]) -> None:
        for gpu in candidates[: group.ranks - len(own)]:
            own.append(gpu)
            free.remove(gpu)

    users = [(own, group) for own, group in zip(taken, groups, strict=True) if _wants_gpus(group)]
    if topology.tells_gpu_nodes:
        for own, group in users:
            take(own, group, [gpu for gpu in free if topology.gpus[gpu].node == group.numa_node])
    for own, group in users:
        num_found = len(own) + len(free)
        take(own, group, list(free))
        if len(own) < group.ranks:
            raise ConfigError(
                f"{group.worker_id}: ranks = {group.ranks} with device {group.device}, but "
                f"{counted(num_found, 'GPU is', 'GPUs are')} free "
                "on this machine; lower ranks, or set device: cpu"
            )
    return [tuple(sorted(own)) for own in taken]


def _warnings(group: EngineConfig, gpus: tuple[int, ...], topology: NumaTopology) -> tuple[str, ...]:
    """Say which GPUs of a group are far from it, or that nobody knows."""
    if group.numa_node < 0 or not gpus or topology.is_single:
        return ()
    if untold := [gpu for gpu in gpus if topology.gpus[gpu].node < 0]:
        return (
            f"{group.worker_id}: the firmware does not tell on which NUMA node GPUs {format_cpu_list(untold)} are, so "
            "they are taken in order; compare with `nvidia-smi topo -m`, and look for NUMA settings in the BIOS",
        )
    far = [gpu for gpu in gpus if topology.gpus[gpu].node != group.numa_node]
    if not far:
        return ()
    places = ", ".join(f"{gpu} ({topology.gpus[gpu].bdf}) on node {topology.gpus[gpu].node}" for gpu in far)
    near = topology.gpus_of(group.numa_node)
    best = max(topology.nodes, key=lambda node: len(topology.gpus_of(node.id)))
    remedy = f"move {counted(len(far), 'card')} to slots of node {group.numa_node}"
    if len(topology.gpus_of(best.id)) >= group.ranks and best.id != group.numa_node:
        remedy = f"{remedy}, or set numa_node: {best.id} for this group"
    return (
        f"{group.worker_id}: ranks = {group.ranks} on NUMA node {group.numa_node}, which has "
        f"{counted(len(near), 'GPU')}: taken "
        f"are {places}; their copies and exchanges cross the sockets; {remedy}",
    )
