"""MemoryGauge: what a rank's device holds, measured in the order in which a start fills it: pools, weights, graphs.

Before each reading the allocator gives back what it does not use, so that what is left over from loading (matrices that
were joined, warm-ups) counts as free, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from engine.plan import MeasuredMemory


class Reading(NamedTuple):
    """Bytes. free, device: as CUDA tells.   allocated: in tensors.   reserved: what the allocator holds for them."""

    free: int
    device: int
    allocated: int
    reserved: int


def read_cuda(device: torch.device) -> Reading:
    """Wait for the device and return what it holds now."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Reading(free, total, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


class MemoryGauge:
    """Made when the pools are allocated, before all else; then `loaded`, `captured` and `measured`, in this order."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._pools = self._loaded = self._captured = read()
        self._weight_bytes = 0

    def loaded(self, *, state_bytes: int = 0) -> None:
        """The model is built. state_bytes: of tensors that came with it and are none of its weights."""
        self._loaded = self._captured = self._read()
        self._weight_bytes = self._loaded.allocated - self._pools.allocated - state_bytes

    def captured(self) -> None:
        """Every graph is captured and replayed once."""
        self._captured = self._read()

    def measured(self, graph_nodes: Mapping[int, int]) -> MeasuredMemory:
        """Return the figures of a rank that is ready, its transport open."""
        now, before, after = self._read(), self._loaded, self._captured
        taken, kept = before.free - after.free, after.reserved - before.reserved
        return MeasuredMemory(
            device_bytes=now.device,
            free_bytes=now.free,
            weight_bytes=self._weight_bytes,
            workspace_bytes=now.reserved - self._pools.allocated - self._weight_bytes,
            graph_bytes=max(0, taken - kept),
            graph_nodes=dict(graph_nodes),
        )
