"""GraphSet: one function of a size, captured for each of some sizes and replayed.

Graphs share one pool of memory: of two of them never more than one runs, and what one leaves is read before the next.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

Outputs = TypeVar("Outputs")

_WARM_UPS = 2


class GraphSet(Generic[Outputs]):
    """run: the function; it launches the same for a size whatever the values, and reads none back.

    nodes: launches and copies of each graph, by size.
    """

    def __init__(self, run: Callable[[int], Outputs], device: torch.device) -> None:
        self._run, self._device = run, device
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self.nodes: dict[int, int] = {}

    def __call__(self, size: int) -> Outputs:
        """Replay a size, or run it if it is not captured. Its outputs are overwritten by the next call."""
        if size not in self._graphs:
            return self._run(size)
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs

    def capture(self, sizes: Sequence[int], *, unit: str, progress: Callable[[str], None] | None = None) -> None:
        """Capture every size, largest first, and replay each once. unit: of sizes, for `progress`."""
        pool: Any = None
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # its scratch is that of every graph
        for number, size in enumerate(sorted(sizes, reverse=True), 1):
            began = time.monotonic()
            graph, outputs = self._capture(size, pool, stream)
            pool = pool or graph.pool()
            graph.replay()
            torch.cuda.synchronize(self._device)
            self._graphs[size] = graph, outputs
            if progress is not None:
                progress(
                    f"graph {number} of {len(sizes)}: {size} {unit}, {self.nodes[size]} nodes, "
                    f"{time.monotonic() - began:.1f} s"
                )

    def _capture(self, size: int, pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):  # compiles, and makes what is made once
                self._run(size)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Another thread looks after exchanges with other ranks: what it asks the device is no part of this.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = self._run(size)
        self.nodes[size] = _count_nodes(graph)
        graph.instantiate()
        return graph, outputs


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the nodes of a captured graph, launches and copies."""
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    if error:
        raise RuntimeError(f"cuGraphGetNodes returned {error}")
    return count.value
