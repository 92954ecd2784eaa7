"""Binding this process to one NUMA node, and proof that it holds.

A rank binds itself before it loads anything: every thread to the node's CPUs, memory policy MPOL_BIND. (Started through
numactl it is bound from its first instruction, see deploy.local_ray; this then changes nothing, and verifies all the
same.) Later it shows its pools, and the kernel is asked where they lie. The outcome is one of

    bound        threads and pages were read back, and all of them lie on the node
    simulated    the machine has one node: its CPUs are split in halves, nothing is claimed of memory
    unverified   not pinned, or something lies elsewhere, or the kernel did not confirm; `evidence` says what

The module imports no torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from engine.numa import SYSFS, NumaTopology, discover, format_cpu_list, parse_cpu_list
from kernels.table import counted
from kv_transfer.memory_nodes import PageCount, bind_new_memory, count_fresh_pages, count_pages
from router.protocol import NumaBinding

log = logging.getLogger(__name__)

_FRESH_PAGES = 64
_PASSES = 5


class Binding:
    """What this process was bound to, and the memory that was looked at. `report` reads threads and fresh pages anew.

    cpus: where every thread ought to be.   refusal: why memory could not be bound; "" if it was.
    """

    def __init__(self, *, node: int, cpus: Iterable[int], topology: NumaTopology, refusal: str = "") -> None:
        self.node, self.cpus, self.topology, self.refusal = node, frozenset(cpus), topology, refusal
        self.is_pinned = True
        self._seen: dict[str, PageCount] = {}
        self._gpu_node = -1
        self._gpu = ""

    def see_memory(self, name: str, address: int, num_bytes: int) -> None:
        """Ask where memory of this process lies, touching a few of its pages. Nobody may write there meanwhile."""
        self._seen[name] = count_pages(address, num_bytes, touch=True)

    def see_gpu(self, bdf: str) -> None:
        """Take note of the GPU that this process works on, by PCI address such as 0000:41:00.0."""
        self._gpu = bdf.lower()
        self._gpu_node = next((gpu.node for gpu in self.topology.gpus if gpu.bdf.lower() == self._gpu), -1)

    def report(self) -> NumaBinding:
        """Read back where this process's threads may run, and say where its memory was found."""
        affinities = _thread_affinities()
        strays = sum(not affinity <= self.cpus for affinity in affinities)
        counts = {"fresh": count_fresh_pages(_FRESH_PAGES), **self._seen}
        status, evidence = self._judge(len(affinities), strays, counts)
        warnings = self._warnings()
        for warning in warnings if status != "unverified" or self.node < 0 else [evidence, *warnings]:
            log.warning("NUMA: %s", warning)
        return NumaBinding(
            status=status,
            node=self.node,
            cpus=format_cpu_list(self.cpus),
            evidence=evidence,
            threads=len(affinities),
            stray_threads=strays,
            pages={name: count.nodes for name, count in counts.items()},
            warnings=warnings,
        )

    def _judge(
        self, num_threads: int, strays: int, counts: dict[str, PageCount]
    ) -> tuple[Literal["bound", "simulated", "unverified"], str]:
        if not self.is_pinned:
            return "unverified", "not pinned: numa_node is -1"
        listed = format_cpu_list(self.cpus)
        where = f"{counted(num_threads, 'thread')} on CPUs {listed}"
        if strays:
            where = f"{strays} of {counted(num_threads, 'thread')} may leave CPUs {listed}"
        if self.topology.is_single:
            found = _pages_text(self.topology.nodes[0].id, counts)
            evidence = f"{where}; the machine has one NUMA node, so memory locality is not tested ({found})"
            return "unverified" if strays else "simulated", evidence
        if self.node < 0:
            return "unverified", f"{where}; numa_node is -1, so memory is not bound"
        found = _pages_text(self.node, counts)
        if self.refusal:
            return "unverified", f"{where}; {self.refusal}; {found}"
        is_bound = not strays and all(count.nodes.keys() == {self.node} for count in counts.values())
        return "bound" if is_bound else "unverified", f"{where}; {found} (move_pages){self._gpu_text()}"

    def _gpu_text(self) -> str:
        return f"; GPU {self._gpu} on node {self._gpu_node}" if self._gpu_node >= 0 else ""

    def _warnings(self) -> list[str]:
        if self.topology.is_single or min(self.node, self._gpu_node) < 0 or self._gpu_node == self.node:
            return []
        return [
            f"GPU {self._gpu} is on NUMA node {self._gpu_node} and its rank on node {self.node}: copies between the "
            f"two cross the sockets; set numa_node: {self._gpu_node} for this group, or move the card"
        ]


def bind(*, node: int, cpus: str, sysfs: Path = SYSFS) -> Binding:
    """Pin every thread of this process to `node`, and the calling thread's future memory; its children inherit both.

    node -1 with cpus "": nothing is pinned. cpus: a list such as "0-15,32" that replaces the node's own.
    Call it before anything large is allocated: pages that exist already stay where they are.
    Raises ValueError if the node does not exist or none of its CPUs is open to this process.
    """
    topology = discover(sysfs)
    allowed = os.sched_getaffinity(0)
    if node < 0 and not cpus:
        binding = Binding(node=-1, cpus=allowed, topology=topology)
        binding.is_pinned = False
        return binding
    wanted = parse_cpu_list(cpus) if cpus else topology.cpus_of(node)
    if node >= 0:
        topology.cpus_of(node)
    usable = sorted(allowed.intersection(wanted))
    if not usable:
        raise ValueError(
            f"CPUs {format_cpu_list(wanted)} for NUMA node {node}: none is open to this process, which may use "
            f"{format_cpu_list(allowed)}; change `cpus`, or the CPU set that the process was started with"
        )
    _pin_threads(usable)
    refusal = bind_new_memory(node) if node >= 0 and not topology.is_single else ""
    return Binding(node=node, cpus=usable, topology=topology, refusal=refusal)


def gpu_address(device: int) -> str:
    """Return the PCI address of CUDA device `device` as sysfs writes it, "" if the driver, in use here, won't say."""
    address = ctypes.create_string_buffer(32)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(address, len(address), device)
    except (OSError, AttributeError):
        return ""
    return "" if code else address.value.decode().lower()


def _pages_text(node: int, counts: dict[str, PageCount]) -> str:
    return ", ".join(_count_text(node, name, count) for name, count in counts.items())


def _count_text(node: int, name: str, count: PageCount) -> str:
    if count.error:
        return f"{name} pages: {count.error}"
    present = sum(count.nodes.values())
    text = f"{count.nodes.get(node, 0):,} of {present:,} {name} pages on node {node}"
    others = [f"{pages:,} on node {other}" for other, pages in count.nodes.items() if other != node]
    return f"{text}, {', '.join(others)}" if others else text


def _pin_threads(cpus: list[int]) -> None:
    """Set the affinity of every thread; threads born meanwhile are caught by another pass."""
    for _ in range(_PASSES):
        for name in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(name), cpus)
            except ProcessLookupError:
                continue
        if all(affinity == set(cpus) for affinity in _thread_affinities()):
            break


def _thread_affinities() -> list[set[int]]:
    found = []
    for name in os.listdir("/proc/self/task"):
        try:
            found.append(set(os.sched_getaffinity(int(name))))
        except ProcessLookupError:
            continue
    return found
