"""MemoryPlan: how many blocks and slots a group gets, shown with the arithmetic before anything is allocated.

Pure arithmetic on the configuration, so that the leader, every rank and `isthmus plan` reach the same numbers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from engine.config import EngineConfig
from engine.model.config import DeepSeekV4Config
from engine.model.layout import build_layout
from kv_transfer.layout import KVLayout

MIN_MODEL_LEN = 16  # the request that warms a pair must fit


class PlanError(ValueError):
    """The configuration does not fit; the text has the numbers and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The proof that admission can keep to: admitted sequences never need more than this."""

    layout: KVLayout
    num_blocks: int
    num_slots: int
    max_model_len: int
    weight_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes + self.num_slots * self.layout.slot_bytes

    def table(self) -> str:
        """Return the plan as lines for a person."""
        layout = self.layout
        rows = [
            ("weights on disk", f"{self.weight_bytes / 2**20:,.1f} MiB", ""),
            (
                "cache blocks",
                f"{self.num_blocks * layout.block_bytes / 2**20:,.1f} MiB",
                f"{self.num_blocks} x {layout.block_bytes:,} B, {layout.block_tokens} tokens each "
                f"({layout.block_bytes / layout.block_tokens:,.1f} B a token)",
            ),
            (
                "state slots",
                f"{self.num_slots * layout.slot_bytes / 2**20:,.1f} MiB",
                f"{self.num_slots} x {layout.slot_bytes:,} B",
            ),
            (
                "longest request",
                f"{self.max_model_len:,} tokens",
                f"{layout.num_blocks_for(self.max_model_len)} blocks",
            ),
        ]
        return "\n".join(f"  {name:<16} {amount:>14}  {how}".rstrip() for name, amount, how in rows)


def plan_memory(config: EngineConfig, model: DeepSeekV4Config) -> MemoryPlan:
    """Return the plan, or raise PlanError: the longest request must fit into the blocks, and a batch into the slots."""
    layout = build_layout(
        model,
        block_tokens=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        index_cache_dtype=config.index_cache_dtype,
    )
    if config.max_model_len > model.max_position_embeddings:
        raise PlanError(
            f"max_model_len {config.max_model_len}: the model was made for at most "
            f"{model.max_position_embeddings} positions; lower it"
        )
    if 0 < config.max_model_len < MIN_MODEL_LEN:
        raise PlanError(
            f"max_model_len {config.max_model_len}: must be at least {MIN_MODEL_LEN}, or 0 for the model's own"
        )
    ahead = config.landings_ahead if config.role == "decode" else config.waiting_ahead
    num_slots = config.max_num_seqs + ahead
    longest = config.max_model_len or model.max_position_embeddings
    budget = int(config.kv_cache_memory_gib * 2**30) - num_slots * layout.slot_bytes
    useful = num_slots * layout.num_blocks_for(longest)
    num_blocks = config.num_blocks or min(useful, max(0, budget // max(layout.block_bytes, 1)))
    fits = num_blocks * config.block_size
    if fits < (config.max_model_len or 1):
        raise PlanError(
            f"a request of max_model_len {longest} tokens needs {layout.num_blocks_for(longest)} blocks of "
            f"{layout.block_bytes:,} B beside {num_slots} slots of {layout.slot_bytes:,} B, but only {num_blocks} "
            f"blocks fit into kv_cache_memory_gib {config.kv_cache_memory_gib} (or num_blocks {config.num_blocks}); "
            "raise it, or lower max_model_len or max_num_seqs"
        )
    return MemoryPlan(
        layout=layout,
        num_blocks=num_blocks,
        num_slots=num_slots,
        max_model_len=min(longest, fits),
        weight_bytes=sum(f.stat().st_size for f in Path(config.model).glob("*.safetensors")),
    )
