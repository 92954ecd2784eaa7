"""What routed experts give before it is added up: a row for each choice of each token.

    y[t] = sum over the token's k choices, in their order, of parts[first[ids[t, i]] + rank[t, i]], then + add[t]

Who reads y of [T, H] can as well read the rows: the hyper-connection does, which saves a launch. Both ways have the
same bits; a token whose experts are negative (padding) has no rows, and y = add.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernels.expert_parts_triton import sum_kernel
from kernels.tiles import Variant
from kernels.triton_env import HAS_PDL, uses_triton

OP = "moe_sum"
_BLOCK = 512


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertParts:
    """Rows of T tokens with k experts each, N = T k at most.

    parts [N, H] float32, those beyond the last token's not written; ids, rank [T, k] and first [E] int32, as in
    moe_routing.Routing; add [T, H] of any float dtype or None. All contiguous. ids, rank and first must have been
    written before the kernel that writes parts was launched: readers look at them before they wait for it.
    """

    parts: Tensor
    ids: Tensor
    rank: Tensor
    first: Tensor
    add: Tensor | None = None

    def __post_init__(self) -> None:
        hidden = self.parts.shape[-1]
        tokens, top_k = self.ids.shape
        if self.parts.shape != (tokens * top_k, hidden) or self.parts.dtype != torch.float32:
            raise ValueError(
                f"parts {tuple(self.parts.shape)} {self.parts.dtype}: wanted {tokens * top_k} rows of float32"
            )
        if self.parts.numel() >= 1 << 31:
            raise ValueError(
                f"parts {tuple(self.parts.shape)}: wanted less than 2^31 values, take fewer tokens at once"
            )
        if self.rank.shape != self.ids.shape:
            raise ValueError(f"rank {tuple(self.rank.shape)} of ids {tuple(self.ids.shape)}")
        check_add(self.add, tokens, hidden)
        for name in ("parts", "ids", "rank", "first"):
            _check_contiguous(name, getattr(self, name))

    @property
    def shape(self) -> tuple[int, int]:
        """(T, H): that of the sum."""
        return self.ids.shape[0], self.parts.shape[1]


def check_add(add: Tensor | None, tokens: int, hidden: int) -> None:
    """Raise ValueError unless sums [tokens, hidden] can be added to."""
    if add is None:
        return
    if add.shape != (tokens, hidden):
        raise ValueError(f"add {tuple(add.shape)}: wanted {(tokens, hidden)}")
    _check_contiguous("add", add)


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} {tuple(tensor.shape)}, strides {tensor.stride()}: wanted contiguous")


def add_up_reference(y: ExpertParts) -> Tensor:
    """Return [T, H] float32. See add_up."""
    has_rows = (y.ids[:, :1] >= 0).expand_as(y.ids)
    row = torch.where(has_rows, y.first[y.ids.clamp(min=0)] + y.rank, 0)
    total = torch.zeros(y.shape, device=y.parts.device)
    for k in range(y.ids.shape[1]):
        total += torch.where(has_rows[:, k, None], y.parts[row[:, k]], 0.0)
    return total if y.add is None else total + y.add.float()


def add_up(y: ExpertParts, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sums [T, H], rounded once to `out_dtype`."""
    if not uses_triton(y.parts):
        return add_up_reference(y).to(out_dtype)
    tokens, hidden = y.shape
    out = torch.empty((tokens, hidden), dtype=out_dtype, device=y.parts.device)
    pdl = HAS_PDL(out.device)
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    if tokens:
        sum_kernel[(tokens, -(-hidden // _BLOCK))](
            out, y.parts, y.ids, y.rank, y.first, y.add, H=hidden, TOP_K=y.ids.shape[1], BLOCK=_BLOCK, PDL=pdl,
            num_warps=4, num_stages=1, **launch,
        )  # fmt: skip
    return out


_SUMS: list[tuple[str, str | None]] = [("*fp32", None), ("*fp32", "*fp32"), ("*fp32", "*bf16"), ("*bf16", "*bf16")]


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped, for the offline gate: six experts of 4096 channels."""
    found = []
    for out, add in _SUMS:
        signature = {"out_ptr": out, "part_ptr": "*fp32", "ids_ptr": "*i32", "rank_ptr": "*i32", "first_ptr": "*i32"}
        signature |= {"add_ptr": add} if add else {}
        fixed: dict[str, Any] = {"H": 4096, "TOP_K": 6, "BLOCK": _BLOCK, "PDL": True} | (
            {} if add else {"add_ptr": None}
        )
        found.append(Variant(OP, sum_kernel, signature, fixed, 4, 1, tensor_ops=()))
    return found
