"""MemoryPlan: how many blocks and slots a group gets, shown with the arithmetic before anything is allocated.

    device memory = what is fixed (memory_parts.py) + slots of every sequence + blocks + what is left, MARGIN at least

Pure arithmetic on the configuration, so that the leader, every rank and `isthmus plan` reach the same numbers. What
can't work is refused with the numbers and the nearest configurations that can (memory_fit.py).

At start a rank allocates the pools that were planned, since peers are told where they lie and graphs read them there;
loads weights, captures graphs, and measures. `corrected` then puts figures in place of estimates. Pools don't move any
more: if less than the margin is left, the rank gives up with the numbers rather than fail in the middle of an answer.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec

from engine.config import EngineConfig
from engine.device_memory import device_memory
from engine.memory_fit import Room, largest_batch, make_room, nearest_that_fit
from engine.memory_parts import GIB, MARGIN_BYTES, MIB, MOST_TOKENS, SCRATCH_BYTES, captured_sizes
from engine.model.config import DeepSeekV4Config
from engine.plan import MeasuredMemory
from kernels.table import counted
from kv_transfer.layout import KVLayout
from router.protocol import MemoryPart, MemorySummary

MIN_MODEL_LEN = 16  # the request that warms a pair must fit


class PlanError(ValueError):
    """The configuration does not fit; the text has the numbers and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The proof that admission can keep to: admitted sequences never need more than this.

    device_bytes: of a rank's device; 0 on the CPU, whose memory is not planned.   parts: all that it goes to.
    measured: of a rank that runs; None before.
    """

    layout: KVLayout
    num_blocks: int
    num_slots: int
    max_model_len: int
    device_bytes: int
    parts: tuple[MemoryPart, ...]
    config: EngineConfig
    model: DeepSeekV4Config
    measured: MeasuredMemory | None = None

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes + self.num_slots * self.layout.slot_bytes

    @property
    def weight_bytes(self) -> int:
        return next(part.num_bytes for part in self.parts if part.name == "weights")

    @property
    def left_bytes(self) -> int:
        """Bytes given to nobody; 0 on the CPU."""
        return max(0, self.device_bytes - sum(part.num_bytes for part in self.parts))

    def corrected(self, measured: MeasuredMemory) -> MemoryPlan:
        """Return the plan with a rank's figures in place of estimates. Raises PlanError.

        It does if the rank has less than the margin left, with the numbers and the nearest configurations that fit, and
        if it lacks a graph of a batch that may be admitted.
        """
        admits_by_graphs = self.config.role == "decode"  # chunks without a graph are slower, no more
        missing = [size for size in captured_sizes(self.config) if size not in measured.graph_nodes]
        if missing and admits_by_graphs:
            raise PlanError(f"no graph of {missing[0]} sequences was captured, of {len(missing)} sizes in all")
        counted = {part.name: part.num_bytes for part in self.parts}
        workspace = counted["workspace"] + counted.get("sampling", 0) + counted["allocator"]
        found = {
            "weights": measured.weight_bytes,
            "workspace": measured.workspace_bytes,
            "graphs": measured.graph_bytes,
        }
        # What ranks exchange by is not told apart from CUDA's own.
        counted["CUDA"] += counted.pop("exchange", 0)
        known = self.cache_bytes + SCRATCH_BYTES + sum(found.values())
        found["CUDA"] = measured.device_bytes - measured.free_bytes - known
        found["transport"] = counted["transport"]  # of which only its pool, SCRATCH_BYTES, is there yet
        hows = dict(_WHAT_IS_MEASURED)
        if not (admits_by_graphs and measured.graph_nodes) and workspace > measured.workspace_bytes:
            found["workspace"], hows["workspace"] = workspace, "planned: more than what has run so far took"
        cache = [part for part in self.parts if part.name in ("cache blocks", "state slots")]
        parts = [msgspec.structs.replace(part, planned_bytes=part.num_bytes) for part in cache]
        counted["workspace"] = workspace
        parts += [
            MemoryPart(name=name, num_bytes=size, how=hows[name], planned_bytes=counted.get(name, 0))
            for name, size in found.items()
        ]
        parts.sort(key=lambda part: -part.num_bytes)
        plan = dataclasses.replace(self, device_bytes=measured.device_bytes, parts=tuple(parts), measured=measured)
        if plan.left_bytes < MARGIN_BYTES:
            raise PlanError(_overrun(plan))
        return plan

    def summary(self) -> MemorySummary:
        """Return the plan as /topology shows it."""
        blocks, block, rows = self.num_blocks, self.layout.block_tokens, self.config.max_num_seqs
        room = self._room()
        return MemorySummary(
            device_bytes=self.device_bytes,
            parts=list(self.parts),
            left_bytes=self.left_bytes,
            cache_tokens=blocks * block,
            max_num_seqs=rows,
            max_model_len=self.max_model_len,
            context_at_full_batch=min(self.max_model_len, blocks // rows * block),
            context_that_fits=min(self.model.max_position_embeddings, room.most_blocks // rows * block),
            longest_context=min(self.model.max_position_embeddings, room.most_blocks * block),
            largest_batch=largest_batch(room, self.max_model_len),
            graph_sizes=sorted(captured_sizes(self.config) if self.measured is None else self.measured.graph_nodes),
            graph_nodes={} if self.measured is None else dict(self.measured.graph_nodes),
            is_measured=self.measured is not None,
        )

    def _room(self) -> Room:
        """Return what fits, by what was found at start if there is that."""
        overrun = 0
        if self.measured is not None:
            overrun = max(0, sum(part.num_bytes - part.planned_bytes for part in self.parts))
        return make_room(self.config, self.model, device_bytes=self.device_bytes, overrun=overrun)

    def table(self) -> str:
        """Return the plan as lines for a log."""
        rows = [(part.name, f"{part.num_bytes / MIB:,.1f} MiB", part.how) for part in self.parts]
        if self.device_bytes:
            rows.append(("left", f"{self.left_bytes / MIB:,.1f} MiB", f"of {self.device_bytes / GIB:.2f} GiB"))
        blocks = self.layout.num_blocks_for(self.max_model_len)
        rows.append(("longest request", f"{self.max_model_len:,} tokens", counted(blocks, "block")))
        return "\n".join(f"  {name:<16} {amount:>14}  {how}".rstrip() for name, amount, how in rows)


_WHAT_IS_MEASURED = {
    "weights": "measured when they were loaded",
    "workspace": "measured: the allocator's, beyond weights and pools",
    "graphs": "measured: what captures took beyond the allocator",
    "CUDA": "measured: all else, the exchange among ranks, a transport's libraries and other processes included",
    "transport": "planned: its pool is there, checksums come with caches",
}


def plan_memory(config: EngineConfig, model: DeepSeekV4Config) -> MemoryPlan:
    """Return the plan of a group that serves `model` (served_model). Raises PlanError, ValueError for a bad layout.

    The longest request must fit into the blocks, a batch into the slots, and all of it into the device.
    """
    if config.max_model_len > model.max_position_embeddings:
        raise PlanError(
            f"max_model_len {config.max_model_len}: the model was made for at most "
            f"{model.max_position_embeddings} positions; lower it"
        )
    if 0 < config.max_model_len < MIN_MODEL_LEN:
        raise PlanError(
            f"max_model_len {config.max_model_len}: must be at least {MIN_MODEL_LEN}, or 0 for the model's own"
        )
    is_packed = config.device == "cuda" and config.kv_cache_dtype == "packed"
    if is_packed and config.role == "prefill" and config.max_num_batched_tokens > MOST_TOKENS:
        raise PlanError(
            f"max_num_batched_tokens {config.max_num_batched_tokens}: a step on a GPU has {MOST_TOKENS} at most; "
            "lower it"
        )
    device_bytes = device_memory(config)
    if device_bytes is None:
        raise PlanError(
            "gpu_memory_gib is not given, and no GPU of this machine tells its memory: give --gpu-memory-gib N, GiB of "
            "one GPU as CUDA counts them (94.9 for an RTX PRO 6000, 139.8 for an H200)"
        )
    room = make_room(config, model, device_bytes=device_bytes)
    if not room.fits:
        raise PlanError(_refusal(room))
    layout = room.layout
    cache = [
        MemoryPart(
            name="cache blocks",
            num_bytes=room.num_blocks * layout.block_bytes,
            how=f"{room.num_blocks} x {layout.block_bytes:,} B, {layout.block_tokens} tokens each "
            f"({layout.block_bytes / layout.block_tokens:,.1f} B a token)",
        ),
        MemoryPart(name="state slots", num_bytes=room.slot_bytes, how=f"{room.num_slots} x {layout.slot_bytes:,} B"),
    ]
    return MemoryPlan(
        layout=layout,
        num_blocks=room.num_blocks,
        num_slots=room.num_slots,
        max_model_len=min(room.longest, room.num_blocks * layout.block_tokens),
        device_bytes=device_bytes,
        parts=tuple(sorted([*room.fixed, *cache], key=lambda part: -part.num_bytes)),
        config=config,
        model=model,
    )


def _refusal(room: Room) -> str:
    """Say why a configuration does not fit, and what would."""
    config, layout = room.config, room.layout
    blocks = layout.num_blocks_for(room.longest) if config.max_model_len else 1
    block_bytes = max(blocks, config.num_blocks) * layout.block_bytes
    wanted = (
        f"a request of max_model_len {room.longest} tokens needs {counted(blocks, 'block')} of "
        f"{layout.block_bytes:,} B beside {counted(room.num_slots, 'slot')} of {layout.slot_bytes:,} B"
    )
    if config.num_blocks and config.num_blocks < blocks:
        return f"{wanted}, but num_blocks is {config.num_blocks}; raise it, or lower max_model_len"
    everything = room.fixed_bytes + room.slot_bytes + block_bytes + MARGIN_BYTES
    if room.device_bytes and everything > room.device_bytes:
        parts = [(part.name, part.num_bytes) for part in room.fixed]
        parts += [("state slots", room.slot_bytes), ("blocks", block_bytes), ("margin", MARGIN_BYTES)]
        listed = ", ".join(f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in parts)
        found = f"{everything / GIB:.2f} GiB in all ({listed}), but a GPU has {room.device_bytes / GIB:.2f} GiB"
        remedy = "take GPUs with more memory"
    else:
        fits = counted(room.num_blocks, "block fits", "blocks fit")
        found = f"but only {fits} into kv_cache_memory_gib {config.kv_cache_memory_gib}"
        remedy = f"raise it to {math.ceil(1000 * (room.slot_bytes + block_bytes) / GIB) / 1000:g}"
    return f"{wanted}: {found}. {_remedy(nearest_that_fit(room), remedy)}"


def _overrun(plan: MemoryPlan) -> str:
    """Say what took more than was planned, and what would fit."""
    listed = ", ".join(
        f"{part.name} {part.num_bytes / GIB:.2f} (planned {part.planned_bytes / GIB:.2f})" for part in plan.parts
    )
    room = plan._room()
    nearest = nearest_that_fit(room)
    if room.fits:  # with fewer blocks
        cache = room.slot_bytes + room.most_blocks * room.layout.block_bytes
        nearest = [f"kv_cache_memory_gib {math.floor(100 * cache / GIB) / 100:.2f}"]
    return (
        f"only {plan.left_bytes / GIB:.2f} of {plan.device_bytes / GIB:.2f} GiB are left after start, wanted "
        f"{MARGIN_BYTES / GIB:.2f}: {listed}. {_remedy(nearest, 'free the GPU of other processes')}"
    )


def _remedy(nearest: list[str], otherwise: str) -> str:
    if not nearest:
        return f"No smaller max_num_seqs or max_model_len fits, nor more ranks: {otherwise}"
    return f"The nearest that fit, each alone: {'; '.join(nearest)}. Or {otherwise}"
