"""Which way a sum over ranks goes, by its size: decided from what was measured at start. Pure.

one-shot   through peers' memory (kernels/one_shot.py), up to the last size at which nothing else was faster
small      settings of NCCL for what is larger, below `large_bytes`
large      settings for the rest: chunks of prompts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.config import AllReduce

ONE_SHOT = "one-shot"
# NCCL's own choice, and what it chooses among for a few GPUs of one host. Tree and the multicast ways are left out: on
# PCIe there is neither a tree worth having nor multicast.
SETTINGS: dict[str, dict[str, str]] = {
    "auto": {},
    "LL, Ring": {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"},
    "LL128, Ring": {"NCCL_PROTO": "LL128", "NCCL_ALGO": "Ring"},
    "Simple, Ring": {"NCCL_PROTO": "Simple", "NCCL_ALGO": "Ring"},
}
SIZES = (8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)
"""Bytes: one to 64 tokens of 4,096 channels in bfloat16, then chunks of up to 4,096."""
_CLOSE = 1.05  # a second communicator takes hundreds of megabytes: not for less than this

Timings = Mapping[str, Mapping[int, float]]
"""By way, then by bytes: microseconds of one sum on the slowest rank. Ways need not have all sizes."""


class Choice(NamedTuple):
    """small, large: of SETTINGS; equal where one serves all.   large_bytes: from which on `large` is taken."""

    one_shot_bytes: int
    small: str
    large: str
    large_bytes: int


def choose(timings: Timings, *, asked: AllReduce = "auto") -> Choice:
    """Return the ways of least time among those that are asked for: one-shot is wanted at all sizes it was measured at.

    Raises ValueError if NCCL was not measured at all, or not what is asked for.
    """
    nccl = {way: found for way, found in timings.items() if way != ONE_SHOT and found}
    if not nccl:
        raise ValueError("no settings of NCCL were measured: wanted at least 'auto'")
    sizes = sorted(set.intersection(*(set(found) for found in nccl.values())))
    best = {size: min(nccl, key=lambda way: nccl[way][size]) for size in sizes}
    found = {} if asked == "nccl" else timings.get(ONE_SHOT, {})
    one_shot = _one_shot_bytes(found, {size: nccl[best[size]][size] for size in sizes})
    if asked == "one-shot":
        if not found:
            raise ValueError("all_reduce = 'one-shot': no one-shot sums were measured")
        one_shot = max(found)
    left = [size for size in sizes if size > one_shot] or sizes[-1:]
    # Each size counts by how much longer it takes than it need: sums of many tokens are few, those of few are many.
    cuts = [(low, high, at) for at in range(1, len(left)) for low in nccl for high in nccl if low != high]
    ideal = {size: nccl[best[size]][size] for size in left}

    def excess(low: str, high: str, at: int) -> float:
        return sum(nccl[low if i < at else high][size] / ideal[size] for i, size in enumerate(left))

    one = min(nccl, key=lambda way: excess(way, way, 0))
    if cuts:
        low, high, at = min(cuts, key=lambda cut: excess(*cut))
        if excess(one, one, 0) > _CLOSE * excess(low, high, at):
            return Choice(one_shot, low, high, left[at])
    return Choice(one_shot, one, one, 0)


def _one_shot_bytes(found: Mapping[int, float], best: Mapping[int, float]) -> int:
    """Return the largest size up to which one-shot sums were no slower than the best of NCCL, at every size."""
    largest = 0
    for size in sorted(found):
        if size not in best or found[size] > best[size]:
            break
        largest = size
    return largest


def describe(choice: Choice) -> str:
    """Return the choice as a line for a log."""
    parts = [f"one-shot up to {choice.one_shot_bytes >> 10} KiB"] if choice.one_shot_bytes else ["no one-shot sums"]
    if choice.small == choice.large:
        parts.append(f"NCCL {choice.small}")
    else:
        parts.append(f"NCCL {choice.small} below {choice.large_bytes >> 10} KiB, {choice.large} from there on")
    return "; ".join(parts)
