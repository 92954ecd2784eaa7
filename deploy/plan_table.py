"""`isthmus plan`: what `up` would run where, what each rank's memory goes to, and what that allows."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy import preflight
from deploy.config import ClusterConfig
from engine.memory_plan import MemoryPlan
from kernels.table import counted
from router.protocol import MemorySummary

_console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
_MIB, _GIB = 2**20, 2**30


def print_plan(config: ClusterConfig, *, as_json: bool = False) -> None:
    """Print the plan, with the origin of each setting that is not a default. Raises ConfigError if it does not fit."""
    found = preflight.check(config, needs_port=False, is_plan=True)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(config, found)), indent=1).decode())
        return
    _console.print(f"{config.served_model_name} from {config.model}   (configuration: {config.source})")
    if found.published:
        _console.print(f"{config.model} is not here: planned with the published config of {found.published}")
    if found.unplaced:
        _console.print(f"not placed on this machine: {found.unplaced}")
    _console.print(f"router    {config.router.url}")
    for index, plan in enumerate(found.plans):
        group, memory = plan.config, plan.summary()
        port = f"port {group.port}" if group.port else "a free port"
        _console.print(
            f"\n{group.worker_id}: 1 leader on {group.host}, {port}; {counted(group.ranks, 'rank')} on {group.device}"
        )
        if found.placements:
            _console.print(f"  {found.placements[index].describe()}")
            for warning in found.placements[index].warnings:
                _console.print(f"  warning: {warning}")
        _console.print(_memory_table(memory))
        for line in _allowed(plan, memory):
            _console.print(f"  {line}")
        given = {name: origin for name, origin in config.origins[group.worker_id].items() if origin != "default"}
        for name, origin in given.items():
            _console.print(f"  {name:<22} {getattr(group, name)!s:<14} {origin}")


def _memory_table(memory: MemorySummary) -> Table:
    total = memory.device_bytes or sum(part.num_bytes for part in memory.parts)
    table = Table(box=None, pad_edge=True, header_style="dim")
    table.add_column("memory of a rank")
    for column in ("MiB", "share"):
        table.add_column(column, justify="right")
    table.add_column("how")
    rows = [(part.name, part.num_bytes, part.how) for part in memory.parts]
    if memory.device_bytes:
        rows.append(("left", memory.left_bytes, "given to nobody"))
        rows.append(("device", memory.device_bytes, f"{memory.device_bytes / _GIB:.2f} GiB"))
    for name, num_bytes, how in rows:
        table.add_row(name, f"{num_bytes / _MIB:,.1f}", f"{100 * num_bytes / total:.1f} %", how)
    return table


def _allowed(plan: MemoryPlan, memory: MemorySummary) -> list[str]:
    """Return lines on what the plan lets run."""
    layout, graphs = plan.layout, ", ".join(map(str, memory.graph_sizes))
    captured = (
        f", in graph; captured: {graphs}" if plan.config.role == "decode" else f"; chunks in graph: {graphs} tokens"
    )
    return [
        f"largest batch          {counted(memory.max_num_seqs, 'sequence')}" + (captured if graphs else ""),
        f"tokens in cache        {memory.cache_tokens:,}",
        f"longest request        {memory.max_model_len:,} tokens, "
        + counted(layout.num_blocks_for(memory.max_model_len), "block"),
        f"context, batch full    {memory.context_at_full_batch:,} tokens for each of {memory.max_num_seqs}; "
        f"{memory.context_that_fits:,} with all that is left",
        f"longest context        {memory.longest_context:,} tokens, for a request alone",
        f"longest requests       {memory.largest_batch} of {memory.max_model_len:,} tokens at once, by memory alone",
    ]


def _as_json(config: ClusterConfig, found: preflight.Preflight) -> dict[str, Any]:
    return {
        "model": config.model,
        "published": found.published,
        "configuration": config.source,
        "unplaced": found.unplaced,
        "groups": [
            {
                "worker_id": plan.config.worker_id,
                "role": plan.config.role,
                "ranks": plan.config.ranks,
                "device": plan.config.device,
                "placement": found.placements[index].describe() if found.placements else "",
                "warnings": list(found.placements[index].warnings) if found.placements else [],
                "block_tokens": plan.layout.block_tokens,
                "block_bytes": plan.layout.block_bytes,
                "slot_bytes": plan.layout.slot_bytes,
                "num_blocks": plan.num_blocks,
                "num_slots": plan.num_slots,
                "memory": plan.summary(),
            }
            for index, plan in enumerate(found.plans)
        ],
    }
