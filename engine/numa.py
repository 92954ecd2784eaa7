"""NUMA: the machine's nodes, with the CPUs, memory, GPUs and network cards of each, as sysfs tells.

What it says of PCI devices comes from the firmware, which may say nothing: node -1. Binding a process to a node is
engine.numa_binding; which group gets what, deploy.placement. The module imports no torch, and reads below a root that
tests may choose.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SYSFS = Path("/sys")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"


@dataclass(frozen=True, slots=True)
class NumaNode:
    """distances: as the firmware tells, to every node in order of id; 10 is the node itself.

    memory_bytes, free_bytes: of the node; 0: not told.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: tuple[int, ...]
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """One GPU on the PCI bus. node -1: the firmware does not tell."""

    bdf: str
    node: int


@dataclass(frozen=True, slots=True)
class NicPlace:
    """One network card. name: as UCX_NET_DEVICES wants it, "mlx5_0:1" for a port of an RDMA device, else "eth0"."""

    name: str
    kind: Literal["rdma", "ethernet"]
    node: int
    is_up: bool


@dataclass(frozen=True, slots=True)
class NumaTopology:
    """nodes: those with CPUs, by id. gpus: NVIDIA controllers by PCI address, which is CUDA's PCI_BUS_ID order.

    nics: RDMA ports, then Ethernet cards, by name; those without hardware behind them, such as lo, are left out.
    """

    nodes: tuple[NumaNode, ...]
    gpus: tuple[GpuPlace, ...] = ()
    nics: tuple[NicPlace, ...] = ()

    @property
    def is_single(self) -> bool:
        return len(self.nodes) == 1

    @property
    def tells_gpu_nodes(self) -> bool:
        """Whether a GPU can be near one node and far from another, and the firmware says which."""
        return not self.is_single and any(gpu.node >= 0 for gpu in self.gpus)

    def gpus_of(self, node: int) -> tuple[int, ...]:
        """Return the CUDA indices (by PCI address) of the GPUs on `node`."""
        return tuple(index for index, gpu in enumerate(self.gpus) if gpu.node == node)

    def cpus_of(self, node: int) -> tuple[int, ...]:
        """Return the CPUs of `node`; on a one-node machine the first half for node 0, the second for node 1.

        Raises ValueError for a node that the machine does not have.
        """
        for known in self.nodes:
            if known.id == node and not self.is_single:
                return known.cpus
        if self.is_single and node in (0, 1):
            return _half(self.nodes[0].cpus, node)
        have = format_cpu_list([n.id for n in self.nodes])
        remedy = "0 or 1 (one node: its CPUs are split)" if self.is_single else f"one of {have}"
        raise ValueError(f"numa_node {node}: the machine has node {have}; use {remedy}, or -1 for no pinning")


def discover(sysfs: Path = SYSFS) -> NumaTopology:
    """Read nodes, GPUs and network cards below `sysfs`. A kernel without NUMA shows as one node with every CPU."""
    base = sysfs / "devices/system/node"
    nodes = []
    for node_id in parse_cpu_list(_read(base / "online")):
        folder = base / f"node{node_id}"
        cpus = parse_cpu_list(_read(folder / "cpulist"))
        if cpus:
            distances = tuple(int(word) for word in _read(folder / "distance").split())
            memory = _memory(folder / "meminfo")
            nodes.append(NumaNode(node_id, cpus, memory["MemTotal"], distances, memory["MemFree"]))
    if not nodes:
        cpus = parse_cpu_list(_read(sysfs / "devices/system/cpu/online")) or tuple(range(os.cpu_count() or 1))
        nodes = [NumaNode(0, cpus, 0, (10,))]
    return NumaTopology(tuple(nodes), _discover_gpus(sysfs / "bus/pci/devices"), _discover_nics(sysfs / "class"))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers in the kernel's list form, "0-3,8" -> (0, 1, 2, 3, 8). Raises ValueError on anything else."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if not part.strip():
            continue
        first, dash, last = part.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ValueError(f"cpus {text.strip()!r}: wanted a list such as 0-15,32") from None
        if low < 0 or high < low:
            raise ValueError(f"cpus {text.strip()!r}: {part.strip()} runs backwards; wanted a list such as 0-15,32")
        numbers.extend(range(low, high + 1))
    return tuple(sorted(set(numbers)))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Inverse of parse_cpu_list: (0, 1, 2, 8) -> "0-2,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _half(cpus: tuple[int, ...], index: int) -> tuple[int, ...]:
    if len(cpus) == 1:
        return cpus
    middle = (len(cpus) + 1) // 2
    return cpus[middle:] if index else cpus[:middle]


def _discover_gpus(devices: Path) -> tuple[GpuPlace, ...]:
    gpus = []
    for device in _entries(devices):
        if _read(device / "vendor") == NVIDIA_VENDOR and _read(device / "class").startswith(DISPLAY_CLASS):
            gpus.append(GpuPlace(device.name, _node_of(device)))
    return tuple(gpus)


def _discover_nics(classes: Path) -> tuple[NicPlace, ...]:
    nics: list[NicPlace] = []
    for card in _entries(classes / "infiniband"):
        node = _node_of(card / "device")
        for port in _entries(card / "ports"):
            is_up = "ACTIVE" in _read(port / "state")
            nics.append(NicPlace(f"{card.name}:{port.name}", "rdma", node, is_up))
    for card in _entries(classes / "net"):
        if (card / "device").exists():
            is_up = _read(card / "operstate") == "up"
            nics.append(NicPlace(card.name, "ethernet", _node_of(card / "device"), is_up))
    return tuple(nics)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.name) if folder.is_dir() else []


def _node_of(device: Path) -> int:
    """Return the node of a PCI device, -1 if the firmware does not tell."""
    text = _read(device / "numa_node")
    return int(text) if text else -1


def _memory(meminfo: Path) -> dict[str, int]:
    """Return bytes of "MemTotal" and "MemFree"; 0 for what is not told."""
    found = {"MemTotal": 0, "MemFree": 0}
    for line in _read(meminfo).splitlines():
        words = line.replace(":", " ").split()
        for name in found.keys() & set(words):
            found[name] = int(words[-2]) * 1024
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a link that is down has files that can't be read
        return ""
