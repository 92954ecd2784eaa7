"""InProcessEngine: one rank in this process, without leader and HTTP, for `bench step`, `bench prefill`, `profile`."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from engine import numa_binding
from engine.flags import ConfigError, engine_config
from engine.memory_parts import fixed_parts
from engine.prompt_run import PromptRun
from engine.runner import ModelRunner
from engine.served_model import served_model
from engine.steady_batch import SteadyBatch
from engine.step_profiler import floor_of
from kernels.bench import current_commit
from kernels.gpu_timer import Device, describe, warm_clocks

if TYPE_CHECKING:
    from engine.parallel import Rank


class InProcessEngine:
    """A loaded runner for `sequences` sequences of `longest` tokens at most; its cache is filled with random rows.

    chunk_tokens: of a prompt, at most; 0: a decode rank.   group: the ranks that it computes with, None: nobody; each
    has such an engine in a process of its own, and all are asked for the same, in the same order.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        sequences: int,
        longest: int,
        chunk_tokens: int = 0,
        say: Callable[[str], None] = lambda text: None,
        group: Rank | None = None,
    ) -> None:
        """args: with what `bench.step_flags` has added. Raises ConfigError, WeightsError, ValueError."""
        role: Literal["prefill", "decode"] = "prefill" if chunk_tokens else "decode"
        config = engine_config(args, role=role, yaml_section=None, environ=os.environ)
        most = served_model(config).config.max_position_embeddings
        if longest > most:
            raise ValueError(f"sequences of {longest} tokens: the model ends at {most}; take shorter ones")
        num_blocks = sequences * -(-longest // config.block_size)
        config = msgspec.structs.replace(
            config,
            max_num_seqs=sequences,
            num_blocks=num_blocks,
            max_model_len=longest,
            max_num_batched_tokens=chunk_tokens or config.max_num_batched_tokens,
        )
        numa_binding.bind(node=config.numa_node, cpus=config.cpus)
        torch.set_num_threads(config.threads)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device = 'cuda': torch finds no GPU here; use --device cpu, with a small model")
        self.config = config
        self.group = group
        rank = 0 if group is None else group.index
        self.runner = ModelRunner(config, num_blocks=num_blocks, num_slots=sequences, rank=rank, group=group)
        self.runner.times = True
        self.runner.load(say)
        self.runner.capture(say)
        self.runner.cache.fill_random()
        self.device = describe(self.runner.device) if self.is_gpu else _describe_cpu()
        self.floor = floor_of(self.runner)
        self._numbers = itertools.count(1)
        if self.is_gpu:
            warm_clocks(self.runner.device)

    @property
    def is_gpu(self) -> bool:
        return self.config.device == "cuda"

    def steady(self, batch: int, context: int) -> SteadyBatch:
        """Return a batch that has not begun. Raises ValueError."""
        return SteadyBatch(self.runner, batch=batch, context=context, numbers=self._numbers)

    def prompt(self, tokens: int) -> PromptRun:
        """Return a prompt that has not begun. Raises ValueError."""
        chunk = self.config.max_num_batched_tokens
        return PromptRun(self.runner, prompt=tokens, chunk=chunk, numbers=self._numbers)

    def nodes(self, batch: int) -> int | None:
        """Return the nodes of the graph that a batch runs in, None if it runs in none."""
        return next((nodes for size, nodes in sorted(self.runner.graph_nodes.items()) if size >= batch), None)

    def held_bytes(self, *, reset: bool = False, peak: bool = False) -> int | None:
        """Return bytes in tensors on the GPU, the most since the last reset if `peak`; None on the CPU."""
        if not self.is_gpu:
            return None
        if reset:
            torch.cuda.reset_peak_memory_stats(self.runner.device)
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return int(read(self.runner.device))

    @property
    def planned_workspace(self) -> int | None:
        """Bytes that the memory plan sets aside for the tensors of a step; None on the CPU."""
        parts = fixed_parts(self.config, self.floor.model, self.runner.cache.layout)
        return next((part.num_bytes for part in parts if part.name == "workspace"), None)

    def conditions(self) -> dict[str, Any]:
        """Return what a measurement depends on."""
        config = self.config
        return {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "commit": current_commit(),
            "device": self.device.name,
            "ceilings": {
                "bytes_per_s": self.device.bandwidth,
                "flops_per_s": self.device.bf16,
                "source": self.device.source,
            },
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": importlib.metadata.version("triton"),
            "python": platform.python_version(),
            "model": msgspec.to_builtins(self.floor.model),
            "formats": {name: getattr(self.floor.formats, name) for name in self.floor.formats.__slots__},
            "shard": config.simulate_rank or f"0/{config.ranks}",
            "exchange": self._exchange(),
            "layers": self.floor.model.num_hidden_layers,
            "config": msgspec.to_builtins(config),
        }

    def _exchange(self) -> dict[str, Any] | None:
        """Return how the ranks of the group exchange, None of one that is alone."""
        info = None if self.group is None else self.runner.exchange_info(self.group.exchange)
        found: dict[str, Any] | None = msgspec.to_builtins(info)
        return found


def _describe_cpu() -> Device:
    """Return this processor's ceilings, measured with a copy and a product of the threads that torch has here."""
    source, (a, b) = torch.ones(1 << 24), (torch.ones(384, 384) for _ in range(2))
    other = torch.empty_like(source)

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(5):
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    copied, product = seconds(lambda: other.copy_(source)), seconds(lambda: a @ b)
    name = platform.processor() or platform.machine()
    return Device(f"CPU {name}", 2 * source.nbytes / copied, 2 * 384**3 / product, 0, "measured just now, float32")
