"""Which caches that came from elsewhere are not what was sent, by their checksums; every rank of a group says the same.

Ranks leave out the same sequences, or what they exchange would not be of the same tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.allocator_fault import is_out_of_memory
from engine.cache import KVCache
from engine.model.group import Group
from engine.plan import CACHE_CORRUPT, SequenceStart
from kv_transfer.checksum import units_checksum

log = logging.getLogger(__name__)


def corrupt_starts(starts: Sequence[SequenceStart], cache: KVCache, *, rank: int, group: Group) -> dict[int, str]:
    """Return by sequence what is wrong with its cache, at this rank or at another. Without checksums nothing is."""
    compared = [start for start in starts if start.checksums]
    if not compared:
        return {}
    problems = [difference(start, cache, rank=rank) for start in compared]
    anywhere = group.agree([bool(problem) for problem in problems])
    elsewhere = f"{CACHE_CORRUPT}so says another rank of the group"
    told = [own or (elsewhere if bad else "") for own, bad in zip(problems, anywhere, strict=True)]
    return {start.seq: problem for start, problem in zip(compared, told, strict=True) if problem}


def difference(start: SequenceStart, cache: KVCache, *, rank: int) -> str:
    """Return what of a cache that came to this rank is not what was sent, "" if all is."""
    for group in cache.layout.groups:
        units = start.block_ids if group.unit == "block" else [start.slot]
        sent = start.checksums[rank].get(group.name)
        if sent is None:
            return f"{CACHE_CORRUPT}{group.name} came without a checksum"
        try:
            landed = units_checksum(cache.pools[group.name], units)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"no memory to compare the cache that arrived ({group.name})"
        if sent != landed:
            problem = f"{CACHE_CORRUPT}{group.name}: checksum {landed:016x}, sent {sent:016x}"
            log.error("sequence %d, %ss %s: %s", start.seq, group.unit, units, problem)
            return problem
    return ""
