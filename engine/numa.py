"""NUMA: what nodes the machine has, pinning of this process to one, and proof that it holds.

A rank binds itself before it loads anything: every thread to the node's CPUs, memory policy MPOL_BIND, then a few
fresh pages are touched and the kernel is asked where they lie. The outcome is one of

    bound        threads and pages were read back and lie on the node
    simulated    the machine has one node: its CPUs are split in halves, nothing is said about memory
    unverified   not pinned, or the kernel did not confirm; `evidence` says what it answered

The module imports no torch, and reads sysfs below a root that tests may choose.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from router.protocol import NumaBinding

SYSFS = Path("/sys")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"

_MPOL_BIND = 2
_MASK_BITS = 1024
_PROBE_PAGES = 64
# set_mempolicy, move_pages; glibc wraps neither, and libnuma may be absent
_SYSCALLS = {"x86_64": (238, 279), "aarch64": (237, 239)}


@dataclass(frozen=True, slots=True)
class NumaNode:
    """distances: as the firmware tells, to every node in order of id; 10 is the node itself."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """One GPU on the PCI bus. node -1: the firmware does not tell."""

    bdf: str
    node: int


@dataclass(frozen=True, slots=True)
class NumaTopology:
    """nodes: those with CPUs, by id. gpus: NVIDIA controllers by PCI address, which is CUDA's PCI_BUS_ID order."""

    nodes: tuple[NumaNode, ...]
    gpus: tuple[GpuPlace, ...] = ()

    @property
    def is_single(self) -> bool:
        return len(self.nodes) == 1

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
    """Read nodes and GPUs below `sysfs`. A kernel without NUMA shows as one node with every online CPU."""
    base = sysfs / "devices/system/node"
    nodes = []
    for node_id in parse_cpu_list(_read(base / "online")):
        folder = base / f"node{node_id}"
        cpus = parse_cpu_list(_read(folder / "cpulist"))
        if cpus:
            distances = tuple(int(word) for word in _read(folder / "distance").split())
            nodes.append(NumaNode(node_id, cpus, _memory_bytes(folder / "meminfo"), distances))
    if not nodes:
        cpus = parse_cpu_list(_read(sysfs / "devices/system/cpu/online")) or tuple(range(os.cpu_count() or 1))
        nodes = [NumaNode(0, cpus, 0, (10,))]
    return NumaTopology(tuple(nodes), _discover_gpus(sysfs / "bus/pci/devices"))


def bind(*, node: int, cpus: str, sysfs: Path = SYSFS) -> NumaBinding:
    """Pin every thread of this process, and its future memory, to `node`; return what was verified.

    node -1 with cpus "": nothing is pinned. cpus: a list such as "0-15,32" that replaces the node's own.
    Call it before anything large is allocated: pages that exist already stay where they are.
    Raises ValueError if the node does not exist or none of its CPUs is open to this process.
    """
    topology = discover(sysfs)
    if node < 0 and not cpus:
        everything = format_cpu_list(os.sched_getaffinity(0))
        return NumaBinding(status="unverified", node=-1, cpus=everything, evidence="not pinned: numa_node is -1")
    wanted = parse_cpu_list(cpus) if cpus else topology.cpus_of(node)
    if node >= 0:
        topology.cpus_of(node)
    allowed = os.sched_getaffinity(0)
    usable = sorted(allowed.intersection(wanted))
    if not usable:
        raise ValueError(
            f"CPUs {format_cpu_list(wanted)} for NUMA node {node}: none is open to this process, which may use "
            f"{format_cpu_list(allowed)}; change `cpus`, or the CPU set that the process was started with"
        )
    num_threads = _pin_threads(usable)
    refusal = ""
    if node >= 0 and not topology.is_single:
        refusal = _set_memory_policy(node)
    return verify(node=node, cpus=usable, topology=topology, num_threads=num_threads, policy_refusal=refusal)


def verify(
    *, node: int, cpus: Iterable[int], topology: NumaTopology, num_threads: int = 0, policy_refusal: str = ""
) -> NumaBinding:
    """Read back where the threads of this process may run and where fresh pages of it lie."""
    expected = sorted(cpus)
    listed = format_cpu_list(expected)
    strays = sum(1 for affinity in _thread_affinities() if affinity != set(expected))
    where = f"{num_threads} threads on CPUs {listed}" if not strays else f"{strays} threads are not on CPUs {listed}"
    if topology.is_single:
        status = "unverified" if strays else "simulated"
        evidence = f"{where}; the machine has one NUMA node, so memory locality is not tested"
        return NumaBinding(status=status, node=node, cpus=listed, evidence=evidence)  # type: ignore[arg-type]
    if node < 0:
        evidence = f"{where}; numa_node is -1, so memory is not bound"
        return NumaBinding(status="unverified", node=node, cpus=listed, evidence=evidence)
    if policy_refusal:
        evidence = f"{where}; {policy_refusal}"
        return NumaBinding(status="unverified", node=node, cpus=listed, evidence=evidence)
    pages, error = touched_page_nodes(_PROBE_PAGES)
    on_node = sum(1 for page in pages if page == node)
    pages_text = error or f"{on_node} of {len(pages)} fresh pages on node {node} (move_pages)"
    is_bound = not error and not strays and on_node == len(pages)
    return NumaBinding(
        status="bound" if is_bound else "unverified", node=node, cpus=listed, evidence=f"{where}; {pages_text}"
    )


def touched_page_nodes(num_pages: int) -> tuple[list[int], str]:
    """Touch `num_pages` fresh pages; return the node of each as move_pages(2) tells, or an error text.

    A negative entry is the kernel's -errno for that page.
    """
    page = mmap.PAGESIZE
    buffer = mmap.mmap(-1, num_pages * page)
    for index in range(num_pages):
        buffer[index * page] = 1
    anchor = ctypes.c_char.from_buffer(buffer)
    base = ctypes.addressof(anchor)
    addresses = (ctypes.c_void_p * num_pages)(*[base + index * page for index in range(num_pages)])
    status = (ctypes.c_int * num_pages)()
    error = _syscall(1, 0, ctypes.c_ulong(num_pages), addresses, None, status, 0)
    del anchor
    buffer.close()
    return ([], f"move_pages: {error}") if error else (list(status), "")


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


def _pin_threads(cpus: list[int]) -> int:
    """Set the affinity of every thread; threads born meanwhile are caught by another pass. Returns their number."""
    for _ in range(5):
        tasks = [int(name) for name in os.listdir("/proc/self/task")]
        for task in tasks:
            try:
                os.sched_setaffinity(task, cpus)
            except ProcessLookupError:
                continue
        if all(affinity == set(cpus) for affinity in _thread_affinities()):
            break
    return len(os.listdir("/proc/self/task"))


def _thread_affinities() -> list[set[int]]:
    found = []
    for name in os.listdir("/proc/self/task"):
        try:
            found.append(set(os.sched_getaffinity(int(name))))
        except ProcessLookupError:
            continue
    return found


def _set_memory_policy(node: int) -> str:
    """Bind the calling thread, and those it starts, to memory of `node`; return "" or why the kernel refused."""
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    words[node // 64] = 1 << (node % 64)
    error = _syscall(0, _MPOL_BIND, words, ctypes.c_ulong(_MASK_BITS))
    return f"set_mempolicy(MPOL_BIND, node {node}): {error}" if error else ""


def _syscall(index: int, *arguments: object) -> str:
    """Make system call `index` of _SYSCALLS; return "" or the error's name and text."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return f"unknown system call numbers on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[index]), *arguments) >= 0:
        return ""
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


def _discover_gpus(devices: Path) -> tuple[GpuPlace, ...]:
    if not devices.is_dir():
        return ()
    gpus = []
    for device in sorted(devices.iterdir(), key=lambda path: path.name):
        if _read(device / "vendor") == NVIDIA_VENDOR and _read(device / "class").startswith(DISPLAY_CLASS):
            node = _read(device / "numa_node")
            gpus.append(GpuPlace(device.name, int(node) if node else -1))
    return tuple(gpus)


def _memory_bytes(meminfo: Path) -> int:
    for line in _read(meminfo).splitlines():
        if "MemTotal:" in line:
            return int(line.split()[-2]) * 1024
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
