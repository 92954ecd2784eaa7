"""The GPU as a measuring bench: its ceilings, and the time of launches in a replayed CUDA graph."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch

Launch = Callable[[], object]

LAUNCHES = 64  # in one graph, at least: its own launch takes microseconds
REPLAYS = 60

# Copy bandwidth (read + write) and bf16 product of random data, both through torch; a name is matched by its beginning.
_CEILINGS = {
    "NVIDIA H200": (4.3e12, 788e12, "as measured on one"),
    "NVIDIA RTX PRO 6000 Blackwell Server": (1.597e12, 439e12, "not measured: vendor's figures"),
    "NVIDIA RTX PRO 6000 Blackwell": (1.792e12, 503e12, "not measured: vendor's figures"),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device's ceilings: memory bytes/s, bf16 operations/s, bytes of L2, and where the first two come from."""

    name: str
    bandwidth: float
    bf16: float
    l2: int
    source: str

    def floor_us(self, num_bytes: int, flops: int) -> float:
        """Return the microseconds below which nothing moves so many bytes and does so many operations."""
        return 1e6 * max(num_bytes / self.bandwidth, flops / self.bf16)


def graph_timer(launches: Sequence[Launch], *, replays: int = REPLAYS) -> list[float]:
    """Return the microseconds that one pass over `launches` takes, once for each replay of a graph of many passes."""
    passes = -(-LAUNCHES // len(launches))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for launch in launches:
                launch()
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(replays)] for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(10):
        graph.replay()
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e3 / passes for begin, end in zip(begins, ends, strict=True)]
    graph.reset()
    return times


def describe(target: torch.device) -> Device:
    """Return the device's ceilings; one that is not in the table is measured with a copy and a product."""
    properties = torch.cuda.get_device_properties(target)
    l2 = int(properties.L2_cache_size)
    for name, (bandwidth, bf16, source) in _CEILINGS.items():
        if properties.name.startswith(name):
            return Device(properties.name, bandwidth, bf16, l2, source)
    big = torch.empty(1 << 30, dtype=torch.uint8, device=target)
    other = torch.empty_like(big)
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device=target) for _ in range(2))
    copy_us = statistics.median(graph_timer([lambda: other.copy_(big)], replays=5))
    product_us = statistics.median(graph_timer([lambda: a @ b], replays=5))
    return Device(properties.name, (2 << 30) / copy_us * 1e6, 2 * 4096**3 / product_us * 1e6, l2, "measured just now")


def warm_clocks(target: torch.device) -> None:
    """Keep the device busy for about a tenth of a second: idle clocks are a fraction of those under load."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=target)
    for _ in range(500):
        a @ a
    torch.cuda.synchronize()
