"""BlockAllocator and SlotAllocator: who holds which part of the pools.

Both count instead of hoping: a sequence is let in only with a *promise* of every block it may ever need, so that no
running sequence can be stopped by another's growth. Blocks come in runs of adjacent ids where the pool allows it,
because neighbours merge into one piece when they are transferred.
"""

from __future__ import annotations

from engine.errors import NoCapacity


class BlockAllocator:
    """Block ids 0..num_blocks-1. available = free and not promised."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = bytearray(b"\x01" * num_blocks)
        self.num_free = num_blocks
        self.num_promised = 0

    @property
    def available(self) -> int:
        return self.num_free - self.num_promised

    def admit(self, now: int, *, later: int = 0) -> list[int]:
        """Return `now` block ids and promise `later` more. Raises NoCapacity, with nothing taken."""
        if now + later > self.available:
            raise NoCapacity(
                f"needs {now + later} cache blocks ({now} now, {later} promised), {self.available} of "
                f"{self.num_blocks} are free; wait for running requests, or raise num_blocks"
            )
        self.num_promised += later
        return self._take(now)

    def grow(self, count: int) -> list[int]:
        """Return `count` block ids out of what was promised to the caller."""
        assert count <= self.num_promised, "growth beyond the promise"
        self.num_promised -= count
        return self._take(count)

    def release(self, block_ids: list[int] | tuple[int, ...], *, unused_promise: int = 0) -> None:
        """Give back blocks, and what is left of the promise. A block given back twice is our own mistake."""
        for block_id in block_ids:
            assert not self._free[block_id], f"block {block_id} released twice"
            self._free[block_id] = 1
        self.num_free += len(block_ids)
        assert 0 <= unused_promise <= self.num_promised, "promise released twice"
        self.num_promised -= unused_promise

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        run = count
        while len(taken) < count:
            run = min(run, count - len(taken))
            start = self._free.find(b"\x01" * run)
            if start < 0:
                run = max(1, run // 2)
                continue
            self._free[start : start + run] = bytes(run)
            taken.extend(range(start, start + run))
        self.num_free -= count
        return taken


class SlotAllocator:
    """Slot numbers 0..num_slots-1, lowest first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = bytearray(b"\x01" * num_slots)

    @property
    def num_free(self) -> int:
        return self._free.count(1)

    def take(self) -> int:
        """Raises NoCapacity if every slot is held."""
        slot = self._free.find(1)
        if slot < 0:
            raise NoCapacity(f"all {self.num_slots} sequence slots are held; wait, or raise max_num_seqs")
        self._free[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        assert not self._free[slot], f"slot {slot} released twice"
        self._free[slot] = 1
