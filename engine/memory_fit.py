"""Room: what fits into a rank's memory with a configuration; and, for one that does not fit, the nearest that do.

Each of `nearest_that_fit` changes one setting and has been tried by the same arithmetic: it is no guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.memory_parts import GIB, MARGIN_BYTES, fixed_parts
from engine.model.config import DeepSeekV4Config
from engine.model.layout import build_layout
from kv_transfer.layout import KVLayout
from router.protocol import MemoryPart

_MOST_RANKS = 64
_MOST_SEQS = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What is left for the cache, and what is made of it.

    fixed: all that is needed before.   longest: tokens of the longest request asked for.   most_blocks: that fit;
    num_blocks: that are made, no more than `num_slots` requests of `longest` could use.   device_bytes: 0 on the CPU.
    overrun: bytes by which a rank was found to need more than `fixed` has.
    """

    config: EngineConfig
    model: DeepSeekV4Config
    layout: KVLayout
    device_bytes: int
    fixed: tuple[MemoryPart, ...]
    overrun: int
    num_slots: int
    longest: int
    most_blocks: int
    num_blocks: int

    @property
    def slot_bytes(self) -> int:
        return self.num_slots * self.layout.slot_bytes

    @property
    def fixed_bytes(self) -> int:
        return sum(part.num_bytes for part in self.fixed) + self.overrun

    @property
    def used_bytes(self) -> int:
        """Bytes of all that is allocated."""
        return self.fixed_bytes + self.slot_bytes + self.num_blocks * self.layout.block_bytes

    @property
    def fits(self) -> bool:
        """The longest request that is asked for has its blocks, and the device all that it needs."""
        has_request = self.num_blocks * self.layout.block_tokens >= (self.config.max_model_len or 1)
        return has_request and (not self.device_bytes or self.used_bytes + MARGIN_BYTES <= self.device_bytes)


def make_room(config: EngineConfig, model: DeepSeekV4Config, *, device_bytes: int, overrun: int = 0) -> Room:
    """Return what fits. Raises ValueError for a model that can't be cut, or a block size that it can't have."""
    layout = build_layout(
        model,
        block_tokens=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        index_cache_dtype=config.index_cache_dtype,
    )
    num_slots = config.max_num_seqs + (config.landings_ahead if config.role == "decode" else config.waiting_ahead)
    longest = config.max_model_len or model.max_position_embeddings
    fixed = tuple(fixed_parts(config, model, layout))
    limits = []
    if device_bytes:
        limits.append(device_bytes - MARGIN_BYTES - overrun - sum(part.num_bytes for part in fixed))
    if config.kv_cache_memory_gib or not device_bytes:
        limits.append(int(config.kv_cache_memory_gib * GIB))
    most = max(0, min(limits) - num_slots * layout.slot_bytes) // max(layout.block_bytes, 1)
    return Room(
        config=config,
        model=model,
        layout=layout,
        device_bytes=device_bytes,
        fixed=fixed,
        overrun=overrun,
        num_slots=num_slots,
        longest=longest,
        most_blocks=config.num_blocks or most,
        num_blocks=config.num_blocks or min(most, num_slots * layout.num_blocks_for(longest)),
    )


def largest_batch(room: Room, max_model_len: int) -> int:
    """Return how many requests of `max_model_len` tokens each could run at once, were max_num_seqs that many."""
    blocks = room.layout.num_blocks_for(max_model_len)

    def holds(num_seqs: int) -> bool:
        other = _try(room, max_num_seqs=num_seqs)
        return other is not None and other.fits and other.most_blocks >= num_seqs * blocks

    return _largest(holds, 0, _MOST_SEQS)


def nearest_that_fit(room: Room) -> list[str]:
    """Return settings that would fit, one change each: fewer sequences, shorter requests, more ranks."""
    config, found = room.config, []
    seqs = _largest(lambda n: _fits(room, max_num_seqs=n), 0, config.max_num_seqs - 1)
    if seqs:
        found.append(f"max_num_seqs {seqs}")
    block = room.layout.block_tokens
    blocks = _largest(lambda n: _fits(room, max_model_len=n * block), 0, room.layout.num_blocks_for(room.longest) - 1)
    if blocks:
        found.append(f"max_model_len {blocks * block}")
    if config.device == "cuda" and not config.simulate_rank:
        ranks = next((n for n in range(config.ranks + 1, _MOST_RANKS + 1) if _fits(room, ranks=n)), 0)
        if ranks:
            found.append(f"ranks {ranks}")
    return found


def _fits(room: Room, **changes: int) -> bool:
    other = _try(room, **changes)
    return other is not None and other.fits


def _try(room: Room, **changes: int) -> Room | None:
    """Return the room of a changed configuration; None where the model can't be cut so."""
    try:
        config = msgspec.structs.replace(room.config, **changes)
        return make_room(config, room.model, device_bytes=room.device_bytes, overrun=room.overrun)
    except ValueError:
        return None


def _largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number above `low`, up to `high`, that holds, `low` if none; what is smaller holds too."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
