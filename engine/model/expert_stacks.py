"""The routed experts of a checkpoint, collected into two matrices a layer: w1 over w3, and w2.

Where decode kernels run they stay in four bits, in the order those read (kernels/expert_weights.py); a matrix that this
order can't hold is dequantised, and `dequantized` says why. Elsewhere all are. Formats may differ between the matrices
of one checkpoint, even of one layer; within a matrix, MXFP4 becomes NVFP4 where it stands beside it.

Of the experts' inner dimension, a rank of a tensor-parallel group takes a slice: rows of w1 and w3, columns of w2.
Where ranks share experts out, it takes a range of whole ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.model.config import DeepSeekV4Config
from kernels.expert_weights import (
    GROUP,
    STEP,
    TILE_ROWS,
    ExpertWeights,
    Format,
    dequantize_experts,
    nvfp4_from_mxfp4,
    pack_experts,
)
from kernels.quant import dequantize_e2m1, ue8m0_to_scale

PARTS = {"w13": ("w1", "w3"), "w2": ("w2",)}


@dataclasses.dataclass(frozen=True)
class FourBitMatrix:
    """A matrix as stored. codes: uint8 [N, K/2], the even channel in the low nibble.

    scales: uint8 [N, K/group], the bytes of e4m3 (nvfp4) or ue8m0 (mxfp4).   factor: of nvfp4; 1 for mxfp4.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    factor: float = 1.0

    def dequantize(self) -> Tensor:
        """Return float32 [N, K]."""
        group = GROUP[self.format]
        if self.format == "mxfp4":
            return dequantize_e2m1(self.codes, ue8m0_to_scale(self.scales), group)
        return dequantize_e2m1(self.codes, self.scales.view(torch.float8_e4m3fn).float(), group) * self.factor

    def as_nvfp4(self, name: str) -> FourBitMatrix:
        """Return the same values as nvfp4. Raises ValueError where that is not possible without loss."""
        if self.format == "nvfp4":
            return self
        scales, factors = nvfp4_from_mxfp4(self.codes[None], self.scales[None], parts=1, name=name)
        return FourBitMatrix("nvfp4", self.codes, scales[0].view(torch.uint8), float(factors))


@dataclasses.dataclass(frozen=True)
class InnerSlice:
    """Which part of the experts' inner dimension a rank holds: part `index` of `count`, from start to stop."""

    start: int
    stop: int

    @classmethod
    def of(cls, config: DeepSeekV4Config, index: int, count: int) -> InnerSlice:
        """Raises ValueError if the dimension can't be cut so."""
        inner = config.moe_intermediate_size
        if not 0 <= index < count or inner % count:
            raise ValueError(
                f"part {index} of {count} of the experts' {inner} inner channels (moe_intermediate_size): parts "
                "are equal, and counted from 0; change the number of ranks"
            )
        return cls(index * inner // count, (index + 1) * inner // count)

    @property
    def width(self) -> int:
        return self.stop - self.start

    def within(self, matrix: str) -> tuple[slice, slice]:
        """Return the rows and columns of matrix w1, w2 or w3."""
        here = slice(self.start, self.stop)
        return (slice(None), here) if matrix == "w2" else (here, slice(None))


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a stack is to be kept: in a format, or dequantised for a reason."""

    format: Format | None
    reason: str = ""


def split_name(name: str) -> tuple[str, int, str] | None:
    """Return (stack, expert, matrix) of a routed expert's tensor, as ("layers.3.ffn.experts.w13", 7, "w1"), or None."""
    prefix, found, rest = name.partition(".experts.")
    if not found:
        return None
    expert, matrix, _ = rest.split(".")
    return f"{prefix}.experts.{'w2' if matrix == 'w2' else 'w13'}", int(expert), matrix


def size_problem(stack: str, config: DeepSeekV4Config, inner: InnerSlice) -> str:
    """Return why matrices of these sizes can't be packed, "" if they can."""
    rows, channels = _shape(stack, config, inner)
    if rows % TILE_ROWS == 0 and channels % STEP == 0:
        return ""
    return f"{rows} rows of {channels} channels are no multiples of {TILE_ROWS} and {STEP}, which the kernels read"


class ExpertStacks:
    """Takes one expert after another, in any order, from the device; `take` gives what the model reads of a layer.

    A packed stack has three: `….codes`, `….scales`, `….factors` (see ExpertWeights); a dequantised one a single tensor,
    [E, 2I, H] or [E, H, I] in `dtype`.   packings: of each stack; one that is missing is dequantised without a reason.
    """

    def __init__(
        self,
        config: DeepSeekV4Config,
        inner: InnerSlice,
        packings: Mapping[str, Packing],
        *,
        dtype: torch.dtype,
        device: torch.device,
        held: range | None = None,
    ) -> None:
        """held: experts that are kept, by number; None: all. Expert held[i] is number i of a stack."""
        self._held = range(config.n_routed_experts) if held is None else held
        self._tensors: dict[str, Tensor] = {}
        self.dequantized = {stack: packing.reason for stack, packing in packings.items() if packing.format is None}
        self._formats = {stack: packing.format for stack, packing in packings.items() if packing.format is not None}
        self._config, self._inner, self._dtype, self._device = config, inner, dtype, device
        self._halves: dict[tuple[str, int], dict[str, FourBitMatrix]] = {}
        self._packed: dict[str, list[int]] = {}

    @property
    def formats(self) -> dict[str, Format]:
        """Of the packed stacks."""
        return dict(self._formats)

    def is_packed(self, stack: str) -> bool:
        return stack in self._formats

    def take(self, layer: int | None) -> dict[str, Tensor]:
        """Return a layer's stacks by name, and forget them; nothing of None."""
        return {name: self._tensors.pop(name) for name in list(self._tensors) if name.startswith(f"layers.{layer}.")}

    def put(self, name: str, found: Tensor | FourBitMatrix) -> None:
        """Take one matrix of one expert, this rank's slice of it."""
        place = split_name(name)
        assert place is not None, name
        stack, expert, matrix = place
        expert = self._held.index(expert)
        if isinstance(found, FourBitMatrix) and stack in self._formats:
            self._put_packed(name, stack, expert, matrix, found)
        else:
            self._put_dequantized(stack, expert, matrix, found)

    def put_many(self, stack: str, experts: Sequence[int], parts: Sequence[tuple[Tensor, Tensor, list[float]]]) -> bool:
        """Take a packed stack's matrices of several experts at once, stored in its format.

        parts: codes, scales and factors (FourBits) of w1 and w3, or of w2. False: nothing is taken, since not all of
        them can be held; `put` then says which.
        """
        format, first = self._formats[stack], [self._held.index(expert) for expert in experts]
        factors = torch.tensor([part[2] for part in parts], dtype=torch.float32).T.contiguous()
        try:
            packed = pack_experts(
                torch.cat([part[0] for part in parts], 1),
                torch.cat([part[1] for part in parts], 1),
                factors if format == "nvfp4" else None,
                format=format,
                parts=len(parts),
                name=stack,
            )
        except ValueError:
            return False
        for field in ("codes", "scales", "factors"):
            found = getattr(packed, field)
            self._stack(f"{stack}.{field}", found[0])[first] = found.to(self._device)
        self._packed.setdefault(stack, []).extend(first)
        return True

    def _put_packed(self, name: str, stack: str, expert: int, matrix: str, found: FourBitMatrix) -> None:
        halves = self._halves.setdefault((stack, expert), {})
        halves[matrix] = found
        parts = PARTS[stack.rpartition(".")[2]]
        if len(halves) < len(parts):
            return
        del self._halves[stack, expert]
        name = f"{name.removesuffix('.weight').rpartition('.')[0]}.{stack.rpartition('.')[2]}"
        try:
            packed = _pack([halves[part] for part in parts], self._formats[stack], name)
        except ValueError as problem:
            self._give_up(stack, str(problem))
            for part in parts:
                self._put_dequantized(stack, expert, part, halves[part])
            return
        for field in ("codes", "scales", "factors"):
            self._stack(f"{stack}.{field}", getattr(packed, field)[0])[expert] = getattr(packed, field)[0]
        self._packed.setdefault(stack, []).append(expert)

    def _stack(self, key: str, one: Tensor) -> Tensor:
        if key not in self._tensors:
            shape = (len(self._held), *one.shape)
            self._tensors[key] = torch.empty(shape, dtype=one.dtype, device=self._device)
        return self._tensors[key]

    def _give_up(self, stack: str, reason: str) -> None:
        """Dequantise what has been packed of a stack: it holds a matrix that the kernels can't."""
        self.dequantized[stack] = reason
        format = self._formats.pop(stack)
        for expert in self._packed.pop(stack, []):
            one = [self._tensors[f"{stack}.{field}"][expert, None] for field in ("codes", "scales", "factors")]
            self._whole(stack)[expert] = dequantize_experts(ExpertWeights(format, *one))[0].to(self._dtype)
        for field in ("codes", "scales", "factors"):
            self._tensors.pop(f"{stack}.{field}", None)
        for at, expert in [key for key in self._halves if key[0] == stack]:
            for matrix, found in self._halves.pop((at, expert)).items():
                self._put_dequantized(stack, expert, matrix, found)

    def _put_dequantized(self, stack: str, expert: int, matrix: str, found: Tensor | FourBitMatrix) -> None:
        place = self._whole(stack)[expert]
        if matrix != "w2":
            place = place[: self._inner.width] if matrix == "w1" else place[self._inner.width :]
        place.copy_(found.dequantize() if isinstance(found, FourBitMatrix) else found)

    def _whole(self, stack: str) -> Tensor:
        if stack not in self._tensors:
            shape = (len(self._held), *_shape(stack, self._config, self._inner))
            self._tensors[stack] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._tensors[stack]


def _shape(stack: str, config: DeepSeekV4Config, inner: InnerSlice) -> tuple[int, int]:
    """Return rows and channels of one expert's matrix."""
    hidden = config.hidden_size
    return (hidden, inner.width) if stack.endswith("w2") else (2 * inner.width, hidden)


def _pack(parts: list[FourBitMatrix], format: Format, name: str) -> ExpertWeights:
    """Return one expert's matrix packed. Raises ValueError where the kernels' numbers can't hold it."""
    if format == "nvfp4":
        parts = [part.as_nvfp4(name) for part in parts]
    factors = torch.tensor([[part.factor for part in parts]], dtype=torch.float32)  # to be looked at where they are
    return pack_experts(
        torch.cat([part.codes for part in parts])[None],
        torch.cat([part.scales for part in parts])[None],
        factors if format == "nvfp4" else None,
        format=format,
        parts=len(parts),
        name=name,
    )
