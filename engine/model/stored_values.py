"""What stored tensors hold: dequantised, or as codes and scales that were looked at. The forms: stored_forms.py.

`raw` has tensors as a file has them, by name, those beside a quantised matrix too (lots.py). What is no number, or has
a scale that can't be one, is UnusableTensor: zero, negative or subnormal scales are holes of an export, and 1/scale
would overflow somewhere later. So is a value beyond the greatest of `dtype`, in which it will be used: it would become
infinite. An NVFP4 checkpoint may have an `.input_scale` (F32) for each matrix, for kernels that
round activations to four bits. Ours don't and never use it, but an export that has some that are no scales is broken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.config import DeepSeekV4Config
from engine.model.expert_stacks import FourBitMatrix
from engine.model.stored_forms import beside
from engine.model.tensor_specs import TensorSpec
from kernels.expert_weights import GROUP, Format
from kernels.quant import E2M1_MAX, dequantize_block_fp8, dequantize_e2m1, ue8m0_to_scale

Raw = Mapping[str, Tensor]
Part = tuple[slice, slice]

_AGAIN = "export the checkpoint again, or take a published one"
_NO_NUMBERS = "are NaN or infinite, or have an unusable scale"
_FLOAT32 = torch.finfo(torch.float32)
_E4M3_NAN = 0x7F  # of its seven bits without the sign
# Up to here float32 and bfloat16 hold every value, whatever the codes: 6 x 2^(byte - 127), and 6 x 448 x the factor.
_MXFP4_SOUND, _FACTOR_SOUND = 250, 2.0**100


class UnusableTensor(Exception):
    """A tensor whose values can't be served. The text names it and says what is wrong and what to do."""


class LostValues(UnusableTensor):
    """`lost` of the `values` of a tensor are no numbers, or not in the dtype they would be used in: why says which."""

    def __init__(self, name: str, lost: int, values: int, why: str = _NO_NUMBERS) -> None:
        super().__init__(f"{name}: {lost} of {values} values {why}")
        self.name, self.lost, self.values, self.why = name, lost, values, why


def read_values(name: str, spec: TensorSpec, raw: Raw, config: DeepSeekV4Config, dtype: torch.dtype) -> Tensor:
    """Return a tensor, or some rows of it, dequantised to float32, or as int64 ids. Raises UnusableTensor."""
    tensor = raw[name]
    if spec.kind == "ids":
        return _checked_ids(name, tensor.to(torch.int64), config)
    if beside(name, "weight_scale") in raw:
        return read_four_bits(name, "nvfp4", raw, (slice(None), slice(None)), dtype).dequantize()
    scale = raw.get(beside(name, "scale"))
    if scale is None:
        values = tensor.float()
    elif tensor.dtype == torch.float8_e4m3fn:
        values = dequantize_block_fp8(tensor, _checked_scale(scale), config.weight_block_size)
    else:
        values = dequantize_e2m1(tensor, _checked_scale(scale), GROUP["mxfp4"])
    _check_range(name, values, math.prod(spec.shape), dtype)
    return values


def read_e4m3(
    name: str, spec: TensorSpec, raw: Raw, config: DeepSeekV4Config, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes as they are and float32 scales, one for each tile. Raises UnusableTensor."""
    codes, scale = raw[name], _checked_scale(raw[beside(name, "scale")])
    is_fine = bool((scale <= torch.finfo(dtype).max / torch.finfo(codes.dtype).max).all())  # false for NaN
    if not is_fine or bool((codes.view(torch.uint8) & _E4M3_NAN == _E4M3_NAN).any()):
        read_values(name, spec, raw, config, dtype)  # names what is wrong, if it is
    return codes, scale


class FourBits(NamedTuple):
    """The same matrix of several experts. codes: uint8 [E, N, K/2].   scales: uint8 [E, N, K/group].   factors: E."""

    codes: Tensor
    scales: Tensor
    factors: list[float]


def read_sound_four_bits(names: Sequence[str], format: Format, raw: Raw, part: Part) -> FourBits | None:
    """Return what read_four_bits does of several matrices at once, None if one of them has to be looked at closely."""
    found = [_cut(name, format, raw, part) for name in names]
    codes, scales = (torch.stack([each[field] for each in found]) for field in (0, 1))
    largest = scales.flatten(1).amax(1)
    if format == "mxfp4":
        low, high = torch.stack([scales.amin(), largest.amax()]).tolist()
        return FourBits(codes, scales, []) if low > 0 and high <= _MXFP4_SOUND else None
    # Negative scales, zero among them, are above NaN as bytes are. All zeros may be a hole.
    low, high = torch.stack([largest.amin(), largest.amax()]).tolist()
    if not 0 < low <= high < _E4M3_NAN:
        return None
    scalars = [beside(name, suffix) for name in names for suffix in ("weight_scale_2", "input_scale")]
    values = [float(raw[name]) for name in scalars if name in raw]
    if not all(_FLOAT32.tiny <= value <= _FACTOR_SOUND for value in values):
        return None
    return FourBits(codes, scales, [float(raw[beside(name, "weight_scale_2")]) for name in names])


def read_four_bits(name: str, format: Format, raw: Raw, part: Part, dtype: torch.dtype) -> FourBitMatrix:
    """Return some rows and columns of a matrix as its codes, columns cut at groups. Raises UnusableTensor.

    raw: the codes of these rows, all scales.   part: rows and columns, of the whole matrix.
    """
    key = _scale_key(name, format)
    codes, scales = (each.contiguous() for each in _cut(name, format, raw, part))
    if format == "mxfp4":  # the smallest byte is subnormal, the largest NaN
        bad, top = torch.stack([((scales == 0) | (scales == 255)).sum(), scales.max()]).tolist()  # one wait for a GPU
        if bad:
            raise LostValues(name, bad * GROUP[format], 2 * codes.numel())
        return _within(dtype, name, FourBitMatrix(format, codes, scales), E2M1_MAX * 2.0 ** (top - 127))
    low = scales & _E4M3_NAN
    found = [((low == _E4M3_NAN) | (scales > 0x80)).sum(), low.max(), (codes & 0x77 != 0).any()]
    bad, top, has_values = torch.stack([each.long() for each in found]).tolist()
    if bad:
        raise UnusableTensor(f"{key}: {bad} of {scales.numel()} scales are NaN or negative; {_AGAIN}")
    # Of the whole matrix, when it comes to that: a part of it may be all zeros.
    if not top and has_values and not bool((raw[key].view(torch.uint8) & _E4M3_NAN).any()):
        raise UnusableTensor(f"{key}: all scales are 0 though the codes are not; {_AGAIN}")
    if beside(name, "input_scale") in raw:
        _factor(beside(name, "input_scale"), raw)
    factor = _factor(beside(name, "weight_scale_2"), raw)
    largest = float(torch.tensor(top, dtype=torch.uint8).view(torch.float8_e4m3fn))
    return _within(dtype, name, FourBitMatrix(format, codes, scales, factor), E2M1_MAX * largest * factor)


def _cut(name: str, format: Format, raw: Raw, part: Part) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a part, views of bytes."""
    rows, columns = part
    codes, scales = raw[name].view(torch.uint8), raw[_scale_key(name, format)].view(torch.uint8)
    return codes[:, _in_units(columns, 2)], scales[rows, _in_units(columns, GROUP[format])]


def _scale_key(name: str, format: Format) -> str:
    return beside(name, "weight_scale" if format == "nvfp4" else "scale")


def _in_units(columns: slice, size: int) -> slice:
    """Return columns given as channels, of which `size` share an element."""
    return slice(*(None if at is None else at // size for at in (columns.start, columns.stop)))


def _checked_scale(scale: Tensor) -> Tensor:
    """Return scales as float32, NaN for what is none."""
    scale = scale if scale.dtype == torch.float32 else ue8m0_to_scale(scale.view(torch.uint8))
    return scale.masked_fill(~(scale >= _FLOAT32.tiny), float("nan"))


def _checked_ids(name: str, ids: Tensor, config: DeepSeekV4Config) -> Tensor:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.n_routed_experts:
        raise UnusableTensor(f"{name}: expert ids {low}..{high}, wanted 0..{config.n_routed_experts - 1}")
    return ids


def _factor(name: str, raw: Raw) -> float:
    """Return a scalar scale. Raises UnusableTensor for a value with which dividing would go wrong somewhere."""
    value = float(raw[name])
    if _FLOAT32.tiny <= value <= _FLOAT32.max:
        return value
    raise UnusableTensor(
        f"{name}: is {value:g}, wanted a positive number of which float32 holds the inverse (calibration may never "
        f"have reached this expert); {_AGAIN}"
    )


def _within(dtype: torch.dtype, name: str, matrix: FourBitMatrix, bound: float) -> FourBitMatrix:
    """Return the matrix, none of whose values exceeds bound. Raises LostValues if dtype does not hold them."""
    if bound > torch.finfo(dtype).max:
        _check_range(name, matrix.dequantize(), 2 * matrix.codes.numel(), dtype)
    return matrix


def _check_range(name: str, values: Tensor, count: int, dtype: torch.dtype) -> None:
    """Raise LostValues if some of the float32 values are no numbers, or are not in dtype.   count: of all."""
    greatest = torch.finfo(dtype).max
    if bool((values.abs() <= greatest).all()):  # false for NaN
        return
    bad = int((~values.isfinite()).sum())
    if bad:
        raise LostValues(name, bad, count)
    beyond = int((values.abs() > greatest).sum())
    short = str(dtype).removeprefix("torch.")
    raise LostValues(name, beyond, count, f"are beyond the greatest of {short}, {greatest:.4g}; {_AGAIN}")
