"""Invented machines: sysfs trees of nodes, GPUs and network cards, for tests of placement and of checks."""

from __future__ import annotations

from pathlib import Path

from engine.numa import format_cpu_list


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_machine(root: Path, *, nodes: list[str], gpu_nodes: list[int], nics: dict[str, int] | None = None) -> Path:
    """Write a sysfs tree: one CPU list per node, one GPU per entry of gpu_nodes, a PCI device that is no GPU, and
    network cards with their nodes; a name with a colon is a port of an RDMA device, "-down" at its end: no link.
    """
    base = root / "devices/system/node"
    write(base / "online", format_cpu_list(range(len(nodes))))
    for node, cpus in enumerate(nodes):
        write(base / f"node{node}/cpulist", cpus)
        write(base / f"node{node}/distance", " ".join("10" if other == node else "32" for other in range(len(nodes))))
        write(base / f"node{node}/meminfo", f"Node {node} MemTotal:       1048576 kB\nNode {node} MemFree:  512 kB")
    for index, node in enumerate(gpu_nodes):
        device = root / f"bus/pci/devices/0000:{index + 1:02x}:00.0"
        write(device / "vendor", "0x10de")
        write(device / "class", "0x030200")
        write(device / "numa_node", str(node))
    audio = root / "bus/pci/devices/0000:01:00.1"
    write(audio / "vendor", "0x10de")
    write(audio / "class", "0x040300")
    write(root / "class/net/lo/operstate", "unknown")
    for name, node in (nics or {}).items():
        card, colon, port = name.partition(":")
        folder = root / "class" / ("infiniband" if colon else "net") / card
        write(folder / "device/numa_node", str(node))
        if colon:
            write(folder / f"ports/{port}/state", "4: ACTIVE")
        else:
            write(folder / "operstate", "down" if name.endswith("-down") else "up")
    return root
