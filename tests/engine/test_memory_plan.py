"""The memory plan: what is counted, what it allows, what it refuses, and how a start puts it right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import engine.cache
import engine.model.attention
import engine.model.moe
import kernels.indexer_chunk
import kernels.indexer_decode
import kernels.moe_blocks
import kernels.moe_routing
import kernels.one_shot
import kv_transfer.checksum
from engine import device_memory, memory_parts
from engine.config import EngineConfig
from engine.memory_parts import CHECKSUM_BYTES, GIB, MARGIN_BYTES
from engine.memory_plan import MemoryPlan, PlanError, plan_memory
from engine.model.config import ConfigError
from engine.plan import MeasuredMemory
from engine.served_model import served_fingerprint, served_model

FLASH = "/models/DeepSeek-V4-Flash-NVFP4"
CARD_GIB = 94.9
SEEN = Path(__file__).resolve().parents[2] / "docs" / "results" / "memory_plan_h200.json"


def config(**changes: Any) -> EngineConfig:
    """A decode rank on an RTX PRO 6000, one of four."""
    settings = {"ranks": 4, "max_num_seqs": 64, "max_model_len": 131072, "kv_cache_memory_gib": 0.0}
    settings |= {"gpu_memory_gib": CARD_GIB} | changes
    return msgspec.convert({"model": FLASH, "role": "decode", "device": "cuda"} | settings, EngineConfig)


def plan(**changes: Any) -> MemoryPlan:
    wanted = config(**changes)
    return plan_memory(wanted, served_model(wanted, needs_folder=False).config)


def part(found: MemoryPlan, name: str) -> int:
    return next(part.num_bytes for part in found.parts if part.name == name)


def test_sixty_four_sequences_of_full_context_fit_on_a_96_gb_card_in_graph() -> None:
    summary = plan().summary()
    assert (summary.graph_sizes[-1], summary.context_at_full_batch) == (64, 131072)
    assert summary.context_that_fits > 131072 and summary.largest_batch > 64


def test_parts_and_what_is_left_are_the_whole_device() -> None:
    found = plan(max_model_len=0)
    assert sum(part.num_bytes for part in found.parts) + found.left_bytes == int(CARD_GIB * GIB)
    assert MARGIN_BYTES <= found.left_bytes < MARGIN_BYTES + found.layout.block_bytes


def test_cache_takes_no_more_than_its_ceiling() -> None:
    assert plan(max_model_len=0, kv_cache_memory_gib=10.0).cache_bytes <= 10 * GIB < plan(max_model_len=0).cache_bytes


def test_simulated_rank_is_planned_like_the_one_it_plays() -> None:
    alone = plan(ranks=1, simulate_rank="0/4", load_format="synthetic")
    assert alone.weight_bytes == plan().weight_bytes
    assert plan(num_layers=12, load_format="synthetic").weight_bytes < alone.weight_bytes / 3


def test_eager_steps_need_no_graphs() -> None:
    assert part(plan(enforce_eager=True), "graphs") == 0 < part(plan(), "graphs")
    assert plan(enforce_eager=True).summary().graph_sizes == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_refusal_names_the_nearest_that_fit_and_they_are_the_nearest(role: str) -> None:
    wanted = {"role": role, "gpu_memory_gib": 47.0, "max_model_len": 1048576, "max_num_seqs": 200}
    wanted["max_num_batched_tokens"] = 1024
    with pytest.raises(PlanError) as refused:
        plan(**wanted)
    text = str(refused.value)
    assert "but a GPU has 47.00 GiB" in text and "weights 4" in text
    nearest = dict(setting.split() for setting in text.partition("each alone: ")[2].partition(". Or")[0].split("; "))
    assert set(nearest) == {"max_num_seqs", "max_model_len", "ranks"}
    for name, value in nearest.items():
        plan(**wanted | {name: int(value)})
        step = {"max_num_seqs": 1, "max_model_len": 256, "ranks": -1}[name]
        with pytest.raises(ValueError):  # too much, or ranks that can't cut the model
            plan(**wanted | {name: int(value) + step})


def test_ranks_that_cannot_cut_the_model_are_not_proposed() -> None:
    with pytest.raises(PlanError, match="ranks 8"):
        plan(gpu_memory_gib=30.0)  # five ranks would do, if heads could be cut in five


def test_without_a_gpu_the_plan_asks_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "driver_memory", lambda: None)
    with pytest.raises(PlanError, match="give --gpu-memory-gib N"):
        plan(gpu_memory_gib=0.0)
    monkeypatch.setattr(device_memory, "driver_memory", lambda: 50 * GIB)
    assert plan(gpu_memory_gib=0.0).device_bytes == 50 * GIB


def test_smallest_gpu_counts_without_what_its_driver_keeps() -> None:
    assert device_memory.smallest_of("97887, 638\n97887, 700\n") == (97887 - 700) * 2**20
    assert device_memory.smallest_of("143771, [N/A]\n") == 143771 * 2**20
    assert device_memory.smallest_of("no devices were found\n") is None


def test_constants_are_those_of_what_they_stand_for() -> None:
    assert memory_parts.SCRATCH_BYTES == engine.cache.SCRATCH_BYTES
    assert memory_parts.WORKSPACE_SCORES == kernels.indexer_decode.WORKSPACE_SCORES
    assert memory_parts.CHUNK_SCORES == kernels.indexer_chunk.CHUNK_SCORES
    assert memory_parts.CHECKSUM_BYTES == kv_transfer.checksum._PORTION_BYTES
    assert memory_parts.EXPERTS_TOKENS == kernels.moe_routing.SORTED == engine.model.moe.BESIDE
    assert memory_parts.EXPERTS_PARTS == kernels.moe_blocks.PARTS_BYTES
    assert memory_parts.MOST_TOKENS == engine.model.attention.KERNEL_TOKENS
    assert memory_parts.ONE_SHOT_BYTES == kernels.one_shot.CAPACITY_BYTES


# ---------------------------------------------------------------- at start

LATER = 3 * CHECKSUM_BYTES  # taken when caches come, so it still counts when a rank has started


def measured(found: MemoryPlan, *, free: int, **changes: Any) -> MeasuredMemory:
    nodes = dict.fromkeys(found.summary().graph_sizes, 600)
    figures = {"weight_bytes": found.weight_bytes, "workspace_bytes": GIB, "graph_bytes": GIB // 4}
    return MeasuredMemory(
        **{"device_bytes": int(CARD_GIB * GIB), "free_bytes": free, "graph_nodes": nodes} | figures | changes
    )


def test_measured_figures_replace_estimates_and_add_up() -> None:
    found = plan()
    free = 20 * GIB
    corrected = found.corrected(measured(found, free=free))
    assert part(corrected, "workspace") == GIB and part(corrected, "graphs") == GIB // 4
    assert sum(part.num_bytes for part in corrected.parts) == int(CARD_GIB * GIB) - free + LATER
    assert sum(part.planned_bytes for part in corrected.parts) == sum(part.num_bytes for part in found.parts)
    summary = corrected.summary()
    assert (summary.is_measured, summary.left_bytes, summary.graph_nodes[64]) == (True, free - LATER, 600)
    assert (corrected.num_blocks, corrected.num_slots) == (found.num_blocks, found.num_slots)


def test_start_that_leaves_too_little_is_refused_with_a_smaller_cache() -> None:
    found = plan(max_model_len=0)
    with pytest.raises(PlanError, match=r"only 0\.10 of 94\.90 GiB are left.*workspace 1\.00 \(planned 0\.") as refused:
        found.corrected(measured(found, free=GIB // 10 + LATER))
    ceiling = float(str(refused.value).partition("kv_cache_memory_gib ")[2].split(". ")[0])
    smaller = plan(max_model_len=0, kv_cache_memory_gib=ceiling)
    saved = found.cache_bytes - smaller.cache_bytes
    smaller.corrected(measured(smaller, free=GIB // 10 + LATER + saved))


@pytest.mark.parametrize("run", json.loads(SEEN.read_text())["runs"], ids=lambda run: run["name"])
def test_what_a_card_was_seen_to_use_fits_the_plan_with_little_to_spare(run: dict[str, Any]) -> None:
    wanted = {"ranks": 1, "simulate_rank": "0/4", "load_format": "synthetic"} | run["config"]
    # The run had less left than the plan keeps now, so its blocks need a larger card.
    same = plan(**wanted | {"gpu_memory_gib": run["peak_bytes"] / GIB + 1, "num_blocks": run["blocks"]})
    assert run["peak_bytes"] < sum(part.num_bytes for part in same.parts) < 1.002 * run["peak_bytes"]
    found = plan(**{"gpu_memory_gib": run["device_bytes"] / GIB} | wanted)
    seen, device = run["measured"], found.device_bytes
    free = device - (run["used_bytes"] - same.cache_bytes + found.cache_bytes)
    found.corrected(
        measured(
            found, free=free, device_bytes=device, weight_bytes=seen["weights"], workspace_bytes=seen["workspace"],
            graph_bytes=seen["graphs"],
        )
    )  # fmt: skip


def test_start_without_a_graph_of_an_admitted_batch_is_refused() -> None:
    found = plan()
    nodes = dict.fromkeys(found.summary().graph_sizes[:-1], 600)
    with pytest.raises(PlanError, match="no graph of 64 sequences"):
        found.corrected(measured(found, free=20 * GIB, graph_nodes=nodes))


def test_chunks_without_a_graph_are_served_and_none_is_said_to_be_there() -> None:
    found = plan(role="prefill", max_num_batched_tokens=1)
    assert "of 1 token:" in found.table() and found.summary().graph_sizes == [1]
    assert found.corrected(measured(found, free=20 * GIB, graph_nodes={})).summary().graph_sizes == []


def test_chunks_longer_than_kernels_take_are_refused() -> None:
    with pytest.raises(PlanError, match="max_num_batched_tokens 8193: a step on a GPU has 8192 at most"):
        plan(role="prefill", max_num_batched_tokens=8193)


def test_a_prompt_s_workspace_counts_before_a_chunk_has_run() -> None:
    found = plan(role="prefill", max_num_batched_tokens=8192)
    workspace = part(found, "workspace") + part(found, "allocator")
    corrected = found.corrected(measured(found, free=2 * workspace, workspace_bytes=2**20))
    assert part(corrected, "workspace") == workspace
    assert corrected.left_bytes == 2 * workspace - LATER - (workspace - 2**20)
    with pytest.raises(PlanError, match="are left after start"):
        found.corrected(measured(found, free=workspace, workspace_bytes=2**20))


# ---------------------------------------------------------------- a model that is not here


def test_published_config_stands_in_for_a_folder_only_where_no_weights_are_read() -> None:
    assert served_model(config(), needs_folder=False).is_published
    assert served_model(config(load_format="synthetic")).is_published
    with pytest.raises(ConfigError, match="no such file"):
        served_model(config())


def test_fingerprint_of_synthetic_weights_tells_parts_and_layers_apart() -> None:
    names = [
        served_fingerprint(config(load_format="synthetic", **changes))
        for changes in ({}, {"simulate_rank": "0/4"}, {"simulate_rank": "1/4"}, {"num_layers": 3})
    ]
    assert len(set(names)) == 4 and names[0] == served_fingerprint(config(load_format="synthetic", max_num_seqs=3))


def test_ranks_that_exchange_need_room_for_it() -> None:
    """A rank that plays one of four exchanges nothing."""
    four, playing = plan(ranks=4), plan(ranks=1, simulate_rank="0/4", load_format="synthetic")
    on_cpu = plan(device="cpu", kv_cache_memory_gib=4.0)
    assert part(four, "exchange") > memory_parts.COMMUNICATORS_BYTES
    assert "exchange" not in {one.name for one in playing.parts} | {one.name for one in on_cpu.parts}
