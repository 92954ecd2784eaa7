"""One-shot sums over ranks: each writes its values into every rank's memory, then adds up what has come.

    out = sum of x over ranks 0, 1, .. in float32, rounded once to x's dtype: the same bits on all

For steps so small that an exchange is all latency: one way over the bus, where a ring of n ranks takes 2 (n - 1). A
rank sends n - 1 times its values, so large sums are better off with NCCL; engine/exchange_choice.py measures where.

A rank's region lies in its own memory and is mapped by the others (engine/peer_memory.py):

    values [2, n, capacity] of one dtype, flags [2, n, PROGRAMS] int32, zero at first

Programs are on their own: program p of a rank hears from program p of the others. Each call has the next epoch, whose
lowest bit says which half it uses and whose number is the flag, counted on the device: a captured call counts on when
it is replayed. A half is written again two calls later. By then every rank has raised its flag of the call between, so
it had read the half before. Every rank makes the same calls, with the same sizes, in the same order, on one stream or
on several that wait for one another.

Who waits for a rank that has ended waits for ever; ending the process ends the kernel (engine/rank.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from kernels.one_shot_triton import one_shot_kernel
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import arch_of, uses_triton

OP = "one_shot"
CAPACITY_BYTES = 512 << 10  # of one rank's values: 64 tokens of 4,096 channels in bfloat16
MOST_RANKS = 32  # a warp asks for all flags
BLOCK = 1024  # values of a program: all tiles have the same, since programs of all ranks must have the same values


@dataclasses.dataclass(frozen=True)
class PeerRegions:
    """Rank `index` of `count` and every rank's region.

    addresses [count] int64 on the device, as this rank sees them.   epochs [PROGRAMS] int32 on the device, zero at
    first.   owner: keeps the memory.
    """

    index: int
    count: int
    dtype: torch.dtype
    addresses: Tensor
    epochs: Tensor
    owner: object = None

    def __post_init__(self) -> None:
        if not 1 < self.count <= MOST_RANKS or not 0 <= self.index < self.count:
            raise ValueError(f"rank {self.index} of {self.count}: wanted one of 2 to {MOST_RANKS}")
        programs = num_programs(self.dtype)
        wanted = [
            ("addresses", self.addresses, self.count, torch.int64),
            ("epochs", self.epochs, programs, torch.int32),
        ]
        for name, tensor, size, dtype in wanted:
            if tuple(tensor.shape) != (size,) or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype}: wanted contiguous {dtype} ({size},)")


def capacity(dtype: torch.dtype) -> int:
    """Return how many values of a rank one call takes."""
    return CAPACITY_BYTES // dtype.itemsize


def num_programs(dtype: torch.dtype) -> int:
    """Return how many programs the largest call has."""
    return capacity(dtype) // BLOCK


def region_bytes(count: int, dtype: torch.dtype) -> int:
    """Return the size of a rank's region."""
    return flags_offset(count) + 2 * count * num_programs(dtype) * 4


def flags_offset(count: int) -> int:
    """Return where flags begin in a region, in bytes."""
    return 2 * count * CAPACITY_BYTES


def one_shot_sum_reference(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of every rank's values, in the order of ranks. See one_shot_sum."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def one_shot_sum(x: Tensor, regions: PeerRegions) -> Tensor:
    """Return the sum of every rank's x, of any shape, with up to `capacity` values. May be captured.

    x: contiguous, of the regions' dtype. There is no way to do this for tensors of a CPU alone: a kernel is all it is.
    Raises ValueError for what does not fit.
    """
    if not uses_triton(x) or x.dtype != regions.dtype or not x.is_contiguous():
        raise ValueError(f"x {x.dtype} on {x.device}, strides {x.stride()}: wanted contiguous {regions.dtype} on a GPU")
    if x.numel() > capacity(x.dtype):
        raise ValueError(f"x {tuple(x.shape)}: {capacity(x.dtype)} values at most, larger sums go through NCCL")
    out = torch.empty_like(x)
    if x.numel():
        tile = tile_for(OP, arch_of(x.device))
        one_shot_kernel[(cdiv(x.numel(), BLOCK),)](
            out, x, regions.addresses, regions.epochs, x.numel(), flags_offset(regions.count), regions.index,
            **_constants(regions.count, x.dtype), num_warps=tile.num_warps, num_stages=1,
        )  # fmt: skip
    return out


def _constants(count: int, dtype: torch.dtype) -> dict[str, int]:
    return {"COUNT": count, "CAPACITY": capacity(dtype), "PROGRAMS": num_programs(dtype), "BLOCK": BLOCK}


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`: groups of two, four and eight."""
    return [_variant(tile_for(OP, arch), count, torch.bfloat16) for count in (2, 4, 8)]


def rare_variants(arch: str) -> list[Variant]:
    """Return those of sums in float32, which tests compare with one rank."""
    return [_variant(tile_for(OP, arch), count, torch.float32) for count in (2, 4)]


def _variant(tile: Tile, count: int, dtype: torch.dtype) -> Variant:
    kind = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    signature = {"out_ptr": kind, "x_ptr": kind, "regions_ptr": "*i64", "epoch_ptr": "*i32"}
    signature |= dict.fromkeys(("size", "flags_offset", "me"), "i32")
    constants: dict[str, Any] = _constants(count, dtype)
    return Variant(
        OP, one_shot_kernel, signature, constants, tile.num_warps, 1, tensor_ops=(), unaligned=("me",), has_peers=True
    )
