"""device_memory: how much memory a rank's device has for us, told without CUDA: leaders and `isthmus plan` ask."""

from __future__ import annotations

import functools
import subprocess

from engine.config import EngineConfig

_QUERY = ("nvidia-smi", "--query-gpu=memory.total,memory.reserved", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20.0


def device_memory(config: EngineConfig) -> int | None:
    """Return bytes of each rank's device: gpu_memory_gib, else what the driver tells of the smallest GPU.

    0 on the CPU, whose memory is not planned. None if nobody tells: there is no GPU here.
    """
    if config.device == "cpu":
        return 0
    if config.gpu_memory_gib:
        return int(config.gpu_memory_gib * 2**30)
    return driver_memory()


@functools.cache
def driver_memory() -> int | None:
    """Return bytes that CUDA has on the smallest GPU of this machine: all but what its driver keeps for itself."""
    try:
        told = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return smallest_of(told)


def smallest_of(told: str) -> int | None:
    """Return bytes from lines "total, reserved" in MiB, of the smallest GPU; None if there is no such line."""
    found = []
    for line in told.splitlines():
        total, _, reserved = (field.strip() for field in line.partition(","))
        if total.isdecimal():
            found.append(int(total) - (int(reserved) if reserved.isdecimal() else 0))
    return min(found) * 2**20 if found else None
