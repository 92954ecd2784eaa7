"""Where a kernel runs: Triton or the torch reference, for which architecture, with which launch features.

CPU tensors take the reference. CUDA tensors take the kernel, and so does everything under TRITON_INTERPRET=1, which
Triton reads when a kernel is decorated: set it before the first import of a kernel module, in a process of its own.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
ARCHES = ("sm_120", "sm_90")
# Multiprocessors of the cards that kernels are cut for: RTX PRO 6000, H200.
MULTIPROCESSORS = {"sm_120": 188, "sm_90": 132}

# What the interpreter plays: the card we ship for.
_INTERPRETED_ARCH = "sm_120"


def uses_triton(x: Tensor) -> bool:
    """Return whether an operation on x runs its Triton kernel (else: its torch reference)."""
    return x.is_cuda or INTERPRETED


def arch_of(device: torch.device) -> str:
    """Return the column of the tile table for a device: "sm_120" or "sm_90".

    Tiles depend on shared memory and on how tensor cores are fed, so other chips take the column they fit in: data
    centre parts from Hopper on (capability 9 and 10; 227 KiB a block) sm_90, all others (99 KiB or more) sm_120.
    Under the interpreter: sm_120.
    """
    if device.type != "cuda":
        return _INTERPRETED_ARCH
    return "sm_90" if _capability(device)[0] in (9, 10) else "sm_120"


def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors; under the interpreter that of the card it plays."""
    return _multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS[_INTERPRETED_ARCH]


def HAS_PDL(device: torch.device) -> bool:
    """Return whether kernels may be launched with programmatic dependent launch: capability 9 or later, compiled."""
    return device.type == "cuda" and not INTERPRETED and _capability(device)[0] >= 9


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
