"""What facts of a host mean for a cluster: pure functions, each of one topic, each to a list of findings.

    ok        as it should be
    warning   it will run, slower or less sure than it could
    problem   it will not start, or not work

GPUs have a file of their own, deploy.check_gpu_rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from deploy.check_facts import Host, ModelFolder
from deploy.config import ClusterConfig
from deploy.local_ray import OBJECT_STORE_BYTES
from deploy.placement import Placement, nic_warnings
from engine.flags import ConfigError
from engine.memory_plan import MemoryPlan
from engine.numa import NumaTopology, format_cpu_list, parse_cpu_list
from kernels.table import counted

Level = Literal["ok", "warning", "problem"]
T = TypeVar("T")
GIB = 1 << 30

_OPEN_FILES, _FEW_OPEN_FILES = 65536, 4096
_SHM_SLACK = 64 << 20
# of a process beside what its plan says: interpreter, torch, libraries; with a CUDA context and pinned buffers
_RANK_BYTES = {"cpu": 1 * GIB, "cuda": 6 * GIB}
_LEADERS_AND_RAY = 2 * GIB
_CUT_LANES = ("tcp", "sockcm")


@dataclass(frozen=True, slots=True)
class Finding:
    """seen: what was found. remedy: what to do; "" if there is nothing to do."""

    topic: str
    level: Level
    seen: str
    remedy: str = ""


def ask(topic: str, probe: Callable[[], T], well: str) -> tuple[list[Finding], T | None]:
    """Return what `up` would say of it, and what `probe`, the very check that it runs, returns; None if it refuses.

    well: what is seen if it passes; "": no finding.
    """
    try:
        result = probe()
    except ConfigError as error:
        seen, semicolon, remedy = str(error).rpartition("; ")
        if not semicolon:
            seen, remedy = remedy, "change what it names: `isthmus up` refuses it, too"
        return [Finding(topic, "problem", seen, remedy)], None
    return [Finding(topic, "ok", well)] if well else [], result


def model_folder(folder: ModelFolder) -> list[Finding]:
    """Whether this user may read every weight file, each is whole, and there is a tokenizer."""
    files = counted(folder.num_files, "weight file")
    if folder.unreadable:
        names = ", ".join(folder.unreadable[:3])
        seen = f"{folder.path}: {len(folder.unreadable)} of {files} can't be read: {names}"
        return [Finding("model", "problem", seen, f"chmod -R a+rX {folder.path}, or run as their owner")]
    if folder.cut:
        names = ", ".join(folder.cut[:3])
        are = "is" if len(folder.cut) == 1 else "are"
        seen = f"{folder.path}: {len(folder.cut)} of {files} {are} not whole: {names}"
        return [
            Finding("model", "problem", seen, "download them again: half a file, or a Git LFS pointer in its place")
        ]
    seen = f"{folder.path}: {files}, {folder.num_bytes / GIB:,.1f} GiB"
    findings = [Finding("model", "ok", seen)]
    if not folder.has_tokenizer:
        seen = f"{folder.path} has no tokenizer.json: only prompts of token ids can be served"
        findings.append(Finding("model", "warning", seen, "copy tokenizer.json from where the weights came from"))
    return findings


def versions(found: Mapping[str, str], wanted: Mapping[str, str], *, uses_nixl: bool) -> list[Finding]:
    """found: installed versions, "" for missing ones.   wanted: the ranges that Isthmus asks for."""
    from packaging.specifiers import SpecifierSet

    findings = []
    for name, version in found.items():
        asked = wanted.get(name, "")
        remedy = f"pip install '{name}{asked}'"
        if not version:
            level: Level = "problem" if uses_nixl or not name.startswith("nixl") else "warning"
            findings.append(Finding("versions", level, f"{name} is not installed", remedy))
        elif not SpecifierSet(asked).contains(version, prereleases=True):
            findings.append(Finding("versions", "problem", f"{name} {version}, wanted {asked}", remedy))
    if not findings:
        findings.append(Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items())))
    return findings


def numa(config: ClusterConfig, placements: Sequence[Placement], topology: NumaTopology, host: Host) -> list[Finding]:
    """Where groups go, what is far from them, and whether the kernel will let them be bound and say so."""
    findings = []
    for placement in placements:
        group = placement.config
        findings += [Finding("NUMA", "warning", *_halves(warning)) for warning in placement.warnings]
        if not placement.warnings:
            findings.append(Finding("NUMA", "ok", f"{group.worker_id}: {placement.describe()}"))
        if group.cpus and not host.allowed_cpus.intersection(parse_cpu_list(group.cpus)):
            seen = f"{group.worker_id}: CPUs {group.cpus}, but only {format_cpu_list(host.allowed_cpus)} are open to us"
            findings.append(Finding("NUMA", "problem", seen, "widen the cpuset of the container or service, or `cpus`"))
        is_bound = group.numa_node >= 0 and not topology.is_single
        if is_bound and host.allowed_nodes is not None and group.numa_node not in host.allowed_nodes:
            seen = f"{group.worker_id}: memory of node {group.numa_node} is not open to us"
            findings.append(Finding("NUMA", "problem", seen, "widen cpuset.mems of the container or service"))
    pinned = [placement.config for placement in placements if placement.config.cpus]
    if topology.is_single and pinned:
        seen = "one NUMA node: CPUs are split between the roles, and bindings are reported as `simulated`"
        findings.append(Finding("NUMA", "ok", seen))
    if topology.is_single or not pinned:
        return findings
    if host.page_error:
        seen = f"the kernel does not tell where pages lie ({host.page_error}): bindings will be `unverified`"
        findings.append(Finding("NUMA", "warning", seen, "in a container: --cap-add SYS_NICE"))
    if not host.numactl:
        seen = "numactl is not installed: ranks bind themselves, after the interpreter and Ray have started"
        findings.append(Finding("NUMA", "warning", seen, "apt-get install numactl"))
    if host.numa_balancing:
        seen = "automatic NUMA balancing is on: it unmaps pages of bound processes to watch them"
        findings.append(Finding("NUMA", "warning", seen, "sysctl -w kernel.numa_balancing=0"))
    if config.supervisor.ray_address:
        cards = nic_warnings(pinned, topology, host.environ.get("UCX_NET_DEVICES", ""))
        findings += [Finding("network", "warning", *_halves(warning)) for warning in cards]
    return findings


def memory(
    plans: Sequence[MemoryPlan], placements: Sequence[Placement], topology: NumaTopology, host: Host
) -> list[Finding]:
    """What the ranks take of the host, against what it has, as a whole and on each node."""
    needs = [(plan, plan.config.ranks * _rank_bytes(plan)) for plan in plans]
    findings = [
        _room("host memory", _LEADERS_AND_RAY + sum(need for _, need in needs), host.memory_bytes, host.available_bytes)
    ]
    if topology.is_single:
        return findings
    nodes = {placement.config.worker_id: placement.config.numa_node for placement in placements}
    for node in topology.nodes:
        need = sum(need for plan, need in needs if nodes.get(plan.config.worker_id) == node.id)
        if need and node.memory_bytes:
            # page cache counts as taken in MemFree, but is given up for the asking: it is no warning
            findings.append(_room(f"memory of node {node.id}", need, node.memory_bytes, node.memory_bytes))
    return findings


def limits(config: ClusterConfig, topology: NumaTopology, host: Host) -> list[Finding]:
    """Open files, locked memory, /dev/shm."""
    findings = []
    if 0 <= host.open_files < _FEW_OPEN_FILES:
        seen = f"{host.open_files:,} open files at most: streams, Ray and NIXL need more under load"
        findings.append(Finding("limits", "warning", seen, f"ulimit -n {_OPEN_FILES}, or LimitNOFILE of the service"))
    else:
        findings.append(Finding("limits", "ok", f"open files: {_limit(host.open_files)}"))
    has_rdma = any(nic.kind == "rdma" and nic.is_up for nic in topology.nics)
    if host.locked_bytes >= 0 and has_rdma and config.supervisor.ray_address:
        seen = f"locked memory: {host.locked_bytes / 2**20:,.0f} MiB at most, but RDMA locks what it registers"
        findings.append(Finding("limits", "warning", seen, "ulimit -l unlimited; in a container --ulimit memlock=-1"))
    needed = OBJECT_STORE_BYTES + _SHM_SLACK
    if host.shm_bytes < needed and not config.supervisor.ray_address:
        seen = f"/dev/shm has {host.shm_bytes / 2**20:,.0f} MiB free, Ray and NCCL want {needed / 2**20:,.0f}"
        findings.append(Finding("limits", "warning", seen, "in a container: --shm-size=1g, or --ipc host"))
    else:
        findings.append(Finding("limits", "ok", f"/dev/shm: {host.shm_bytes / GIB:,.1f} GiB free"))
    return findings


def lanes(config: ClusterConfig, host: Host) -> list[Finding]:
    """Whether processes of this host may write into each other, and what UCX was told."""
    transports = {group.transport for group in config.groups}
    if not transports & {"nixl", "auto"}:
        return []
    findings = []
    on_cpu = any(group.device == "cpu" for group in config.groups)
    must = on_cpu and "nixl" in transports and not any(group.allow_tcp for group in config.groups)
    if host.cma_error:
        scope = "" if host.ptrace_scope is None else f", kernel.yama.ptrace_scope is {host.ptrace_scope}"
        seen = f"a process can't write into its sibling ({host.cma_error}{scope}): UCX has no cma lane"
        if not must:
            seen += "; with transport auto the host lane carries the cache where NIXL has none"
        remedy = "sysctl -w kernel.yama.ptrace_scope=0; in a container --cap-add SYS_PTRACE; or transport: host"
        findings.append(Finding("lanes", "problem" if must else "warning", seen, remedy))
    else:
        findings.append(Finding("lanes", "ok", "processes may write into each other (process_vm_writev)"))
    tls = [lane for lane in host.environ.get("UCX_TLS", "").split(",") if lane]
    if tls and not tls[0].startswith("^") and set(tls) <= {*_CUT_LANES, "self"}:
        seen = f"UCX_TLS={','.join(tls)} leaves only TCP between processes of this host"
        findings.append(Finding("lanes", "problem" if must else "warning", seen, "unset UCX_TLS"))
    return findings


def _room(topic: str, need: int, total: int, available: int) -> Finding:
    seen = f"about {need / GIB:,.1f} GiB wanted by ranks, leaders and Ray, {available / GIB:,.1f} available"
    seen += f" of {total / GIB:,.1f} GiB"
    if need > total:
        return Finding(topic, "problem", seen, "fewer ranks or groups on this host, or a smaller cache on the CPU")
    if need > available:
        return Finding(topic, "warning", seen, "end other programs first: what is not there can't be bound or pinned")
    return Finding(topic, "ok", seen)


def _rank_bytes(plan: MemoryPlan) -> int:
    """Return about what a rank takes of the host."""
    if plan.config.device.startswith("cuda"):
        return _RANK_BYTES["cuda"]
    return _RANK_BYTES["cpu"] + sum(part.num_bytes for part in plan.parts)


def _limit(value: int) -> str:
    return "no limit" if value < 0 else f"{value:,} at most"


def _halves(warning: str) -> tuple[str, str]:
    """Split a warning into what is so and what to do about it: its last part."""
    seen, _, remedy = warning.rpartition("; ")
    return seen, remedy
