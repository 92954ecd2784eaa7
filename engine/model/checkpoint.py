"""A checkpoint folder: which tensor lies in which shard, in which stored form, and what it holds.

Stored forms of a matrix, told by what lies there and not by what config.json calls it:

    BF16, F16, F32
    F8_E4M3           with a `.scale` per tile (128x128)
    I8 or U8, MXFP4   two e2m1 a byte, with a `.scale` per 32 columns
    I8 or U8, NVFP4   two e2m1 a byte, with a `.weight_scale` (F8_E4M3) per 16 columns and a `.weight_scale_2` (F32)

`.scale` is F8_E8M0 (read as raw exponent bytes: a numeric copy to an integer type would zero them) or F32. An NVFP4
checkpoint may have an `.input_scale` (F32) for each matrix, for kernels that round activations to four bits. Ours don't
and never use it, but an export that lacks some, or has some that are no scales, is broken and is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import DeepSeekV4Config, shard_paths
from engine.model.expert_stacks import FourBitMatrix, InnerSlice, Packing, size_problem, split_name
from engine.model.tensor_specs import TensorSpec
from kernels.expert_weights import GROUP, Format
from kernels.quant import dequantize_block_fp8, dequantize_e2m1, ue8m0_to_scale

FLOATS = ("BF16", "F16", "F32")
SCALES = ("F8_E8M0", "U8", "F32")
FOUR_BITS = ("I8", "U8")
_AGAIN = "export the checkpoint again, or take a published one"
_SHOWN = 20


class WeightsError(ValueError):
    """The checkpoint does not hold what the config promises. The text lists the tensors."""


class UnusableTensor(Exception):
    """A tensor whose values can't be served. The text names it and says what is wrong and what to do."""


class _Part(NamedTuple):
    """A tensor beside a quantised weight: the types and shapes in which it may be stored."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class Checkpoint:
    """The shards of a folder, open, and which tensor lies in which."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.where: dict[str, str] = {}
        self._shards: dict[str, Any] = {}
        problems: list[str] = []
        for path in shard_paths(folder):
            try:
                shard = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                problems.append(f"{path.name}: can't be opened ({error})")
                continue
            self._shards[path.name] = shard
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if name in self.where:
                    problems.append(f"{name}: stored in both {self.where[name]} and {path.name}")
                self.where[name] = path.name
        refuse(folder, problems)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def by_shard(self, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, list[str]]]:
        """Yield each shard's name with the wanted tensors it holds."""
        for shard in self._shards:
            yield shard, [name for name in specs if self.where[name] == shard]

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return (stored dtype, shape) without reading the data."""
        part = self._shards[self.where[name]].get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    def check_headers(self, specs: dict[str, TensorSpec], config: DeepSeekV4Config) -> None:
        """Raise WeightsError for tensors that are missing, superfluous, or of a wrong type or shape."""
        problems: list[str] = []
        beside: set[str] = set()
        has_input_scales = any(n.endswith(".input_scale") and not n.startswith("mtp.") for n in self.where)
        for name, spec in specs.items():
            if name not in self.where:
                problems.append(f"{name}: missing, wanted {list(spec.shape)}")
                continue
            stored, shape = self.header(name)
            wanted, parts = self._stored_form(name, stored, spec, config)
            if wanted is None:
                problems.append(f"{name}: stored as {stored}, which is not a form of a {spec.kind} tensor")
            elif shape != wanted:
                problems.append(f"{name}: shape {list(shape)} as {stored}, wanted {list(wanted)}")
            if _beside(name, "weight_scale") in parts and has_input_scales:
                parts[_beside(name, "input_scale")] = _Part(("F32",), ((), (1,)))
            beside.update(parts)
            for key, part in parts.items():
                problems.extend(self._part_problems(key, part))
        known = specs.keys() | beside
        others = [n for n in self.where if n not in known and not n.startswith("mtp.")]
        problems.extend(f"{n}: not part of this model" for n in others)
        refuse(self.folder, problems)

    def _part_problems(self, name: str, part: _Part) -> Iterator[str]:
        if name not in self.where:
            why = "others of this checkpoint have one" if name.endswith("input_scale") else "its weight is quantised"
            yield f"{name}: missing, {why}; {_AGAIN}"
            return
        stored, shape = self.header(name)
        if stored not in part.dtypes:
            yield f"{name}: stored as {stored}, wanted one of {', '.join(part.dtypes)}"
        if shape not in part.shapes:
            yield f"{name}: shape {list(shape)}, wanted {list(part.shapes[0])}"

    def _stored_form(
        self, name: str, stored: str, spec: TensorSpec, config: DeepSeekV4Config
    ) -> tuple[tuple[int, ...] | None, dict[str, _Part]]:
        """Return the shape of the stored tensor, None where there is no such form, and what must lie beside it."""
        if spec.kind == "ids":
            return (spec.shape if stored in ("I64", "I32") else None), {}
        if stored in FLOATS:
            return spec.shape, {}
        if spec.kind == "matrix" and stored == "F8_E4M3":
            rows, columns = config.weight_block_size
            tiles = (-(-spec.shape[0] // rows), -(-spec.shape[1] // columns))
            return spec.shape, {_beside(name, "scale"): _Part(SCALES, (tiles,))}
        format = self._four_bit_format(name)
        if spec.kind != "matrix" or format is None or spec.shape[1] % GROUP[format]:
            return None, {}
        scale_shape = (spec.shape[0], spec.shape[1] // GROUP[format])
        parts = {_beside(name, "scale"): _Part(SCALES, (scale_shape,))}
        if format == "nvfp4":
            parts = {
                _beside(name, "weight_scale"): _Part(("F8_E4M3",), (scale_shape,)),
                _beside(name, "weight_scale_2"): _Part(("F32",), ((), (1,))),
            }
        return (spec.shape[0], spec.shape[1] // 2), parts

    def _four_bit_format(self, name: str) -> Format | None:
        """Return the format of a matrix of four-bit codes, None for another. The scales beside it tell."""
        stored = self.header(name)[0]
        if stored not in FOUR_BITS:
            return None
        if any(_beside(name, suffix) in self.where for suffix in ("weight_scale", "weight_scale_2")):
            return "nvfp4"
        return "nvfp4" if stored == "U8" and _beside(name, "scale") not in self.where else "mxfp4"

    def packings(self, specs: dict[str, TensorSpec], config: DeepSeekV4Config, inner: InnerSlice) -> dict[str, Packing]:
        """Return how the experts' matrices can be kept, by stack, as far as headers tell."""
        found: dict[str, Packing] = {}
        for name in specs:
            place = split_name(name)
            if place is None:
                continue
            stack, format = place[0], self._four_bit_format(name)
            before = found.get(stack) or Packing(format, size_problem(stack, config, inner))
            reason = before.reason
            if not reason and format is None:
                reason = f"{name} is stored as {self.header(name)[0]}, not in four bits"
            if not reason and format == "mxfp4" and self.header(_beside(name, "scale"))[0] == "F32":
                reason = f"{_beside(name, 'scale')} is stored as F32, which the kernels don't read"
            both = "nvfp4" if "nvfp4" in (before.format, format) else format
            found[stack] = Packing(None, reason) if reason else Packing(both)
        return found

    def read(self, name: str, spec: TensorSpec, config: DeepSeekV4Config) -> Tensor:
        """Return the tensor dequantised to float32, or as int64 ids. Raises UnusableTensor."""
        tensor = self._dequantized(name, spec, config)
        problem = _content_problem(name, tensor, config)
        if problem:
            raise UnusableTensor(problem)
        return tensor

    def _dequantized(self, name: str, spec: TensorSpec, config: DeepSeekV4Config) -> Tensor:
        """Return what `read` does, with NaN for a bad `.scale`."""
        if self._four_bit_format(name) == "nvfp4":
            return self.four_bits(name).dequantize()
        tensor = self._get(name)
        if spec.kind == "ids":
            return tensor.to(torch.int64)
        stored, _ = self.header(name)
        if stored in FLOATS:
            return tensor.float()
        scale = self._get(_beside(name, "scale"))
        scale = scale.float() if scale.dtype == torch.float32 else ue8m0_to_scale(scale.view(torch.uint8))
        # Zero, negative or subnormal scales are holes of an export: 1/scale would overflow somewhere later.
        scale = scale.masked_fill(~(scale >= torch.finfo(torch.float32).tiny), float("nan"))
        if stored in FOUR_BITS:
            return dequantize_e2m1(tensor, scale, GROUP["mxfp4"])
        return dequantize_block_fp8(tensor, scale, config.weight_block_size)

    def is_e4m3(self, name: str, config: DeepSeekV4Config) -> bool:
        """Return whether a matrix is stored as e4m3 in tiles of 128 x 128, which decode kernels read as they are."""
        return self.header(name)[0] == "F8_E4M3" and tuple(config.weight_block_size) == (128, 128)

    def e4m3(self, name: str, spec: TensorSpec, config: DeepSeekV4Config) -> tuple[Tensor, Tensor]:
        """Return codes and float32 scales of such a matrix. Raises UnusableTensor."""
        self.read(name, spec, config)
        scale = self._get(_beside(name, "scale"))
        codes = self._get(name).clone()  # in a file it may begin anywhere; a kernel wants pieces of 16 bytes
        return codes, scale if scale.dtype == torch.float32 else ue8m0_to_scale(scale.view(torch.uint8))

    def four_bits(self, name: str, part: tuple[slice, slice] = (slice(None), slice(None))) -> FourBitMatrix:
        """Return some rows and columns of a matrix as its codes, columns cut at groups. Raises UnusableTensor."""
        format = self._four_bit_format(name)
        assert format is not None, name
        key = _beside(name, "weight_scale" if format == "nvfp4" else "scale")
        codes = self._cut(name, part, 2).view(torch.uint8)
        scales = self._cut(key, part, GROUP[format]).view(torch.uint8)
        if format == "mxfp4":  # the smallest byte is subnormal, the largest NaN
            bad = int(((scales == 0) | (scales == 255)).sum()) * GROUP[format]
            if bad:
                raise UnusableTensor(_not_finite(name, bad, 2 * codes.numel()))
            return _finite(name, FourBitMatrix(format, codes, scales))
        bad = int((((scales & 0x7F) == 0x7F) | (scales > 0x80)).sum())
        if bad:
            raise UnusableTensor(f"{key}: {bad} of {scales.numel()} scales are NaN or negative; {_AGAIN}")
        # Of the whole matrix, when it comes to that: a part of it may be all zeros.
        if not bool((scales & 0x7F).any()) and bool((codes & 0x77).any()) and not bool(self._get(key).float().any()):
            raise UnusableTensor(f"{key}: all scales are 0 though the codes are not; {_AGAIN}")
        if _beside(name, "input_scale") in self.where:
            self._factor(_beside(name, "input_scale"))
        return _finite(name, FourBitMatrix(format, codes, scales, self._factor(_beside(name, "weight_scale_2"))))

    def _factor(self, name: str) -> float:
        """Return a scalar scale. Raises UnusableTensor for a value with which dividing would go wrong somewhere."""
        value = float(self._get(name))
        if torch.finfo(torch.float32).tiny <= value <= torch.finfo(torch.float32).max:
            return value
        raise UnusableTensor(
            f"{name}: is {value:g}, wanted a positive number of which float32 holds the inverse (calibration may never "
            f"have reached this expert); {_AGAIN}"
        )

    def _cut(self, name: str, part: tuple[slice, slice], group: int) -> Tensor:
        """Return some rows, and columns given as channels of which `group` share an element."""
        rows, columns = part
        start, stop = (None if at is None else at // group for at in (columns.start, columns.stop))
        tensor: Tensor = self._shards[self.where[name]].get_slice(name)[rows, start:stop]
        return tensor.contiguous()

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self._shards[self.where[name]].get_tensor(name)
        return tensor


def _beside(name: str, suffix: str) -> str:
    """Return the name of what lies beside a weight."""
    return f"{name.removesuffix('.weight')}.{suffix}"


def _content_problem(name: str, tensor: Tensor, config: DeepSeekV4Config) -> str | None:
    if tensor.is_floating_point():
        bad = int((~tensor.isfinite()).sum())
        return _not_finite(name, bad, tensor.numel()) if bad else None
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= config.n_routed_experts:
        return f"{name}: expert ids {low}..{high}, wanted 0..{config.n_routed_experts - 1}"
    return None


def _finite(name: str, matrix: FourBitMatrix) -> FourBitMatrix:
    """Return the matrix. Raises UnusableTensor if float32 does not hold its values."""
    if matrix.bound > torch.finfo(torch.float32).max:
        bad = int((~matrix.dequantize().isfinite()).sum())
        if bad:
            raise UnusableTensor(_not_finite(name, bad, 2 * matrix.codes.numel()))
    return matrix


def _not_finite(name: str, bad: int, values: int) -> str:
    return f"{name}: {bad} of {values} values are NaN or infinite, or have an unusable scale"


def refuse(folder: str | Path, problems: list[str]) -> None:
    """Raise WeightsError if there are problems."""
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightsError(f"{folder}: {len(problems)} tensors don't fit config.json:\n  {shown}{more}")
