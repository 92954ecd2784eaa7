"""Block quantisation to e4m3 and e2m1 with power-of-two scales, and the way back.

    e4m3:  s = 2^ceil(log2(max(amax, 1e-4) / 448)),        code = e4m3(clamp(x / s, -448, 448))
    e2m1:  s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)),    code = e2m1(clamp(x / s, -6, 6)), ties to the even code

amax is taken over groups of consecutive channels of the last axis. The floors make a block of zeros a block of zero
codes with an ordinary scale. Finite input never gives a NaN code or a NaN scale byte (0x7F/0xFF in e4m3, 0xFF in
ue8m0) and never overflows on the way back: magnitudes above 2^127 count as 2^127. An inf or NaN makes its own group NaN
on the way back and no other.

ue8m0 is the exponent byte of fp32: byte b stands for 2^(b-127), 255 for NaN. e2m1 codes: bit 3 is the sign, magnitudes
0, .5, 1, 1.5, 2, 3, 4, 6; two a byte, the even channel in the low nibble.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3_AMAX_FLOOR = 1e-4
E2M1_MAX = 6.0
E2M1_AMAX_FLOOR = 6 * 2.0**-126

# A value rounds up to code i+1 when it exceeds edge i. Where the tie must go up (to an even code), the edge is the
# float just below the midpoint.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_EDGES = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


def quantize_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes [..., n] float8_e4m3fn and scales [..., n / group] float32 of x [..., n]."""
    grouped = _grouped(x, group)
    scale = _power_of_two_at_least(grouped.abs().amax(-1).clamp(min=E4M3_AMAX_FLOOR) / E4M3_MAX)
    # The cast itself gives NaN above 464, so clamp first; clamp lets NaN through.
    codes = (_representable(grouped) / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale


def dequantize_e4m3(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return float32 [..., n] of codes [..., n] and scales [..., n / group]."""
    return (_grouped(codes, group) * scale[..., None]).flatten(-2)


def quantize_e2m1(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return packed codes [..., n / 2] uint8 and scales [..., n / group] float32 of x [..., n]."""
    grouped = _grouped(x, group)
    scale = _power_of_two_at_least(grouped.abs().amax(-1).clamp(min=E2M1_AMAX_FLOOR) / E2M1_MAX)
    y = (_representable(grouped) / scale[..., None]).flatten(-2)
    code = torch.bucketize(y.abs(), _constant(_E2M1_EDGES, y.device)) | (torch.signbit(y).long() << 3)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8), scale


def dequantize_e2m1(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return float32 [..., n] of packed codes [..., n / 2] (uint8 or int8) and scales [..., n / group]."""
    byte = packed.view(torch.uint8).long()
    code = torch.stack([byte & 15, byte >> 4], -1).flatten(-2)
    values = _constant((*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)), packed.device)[code]
    return (_grouped(values, group) * scale[..., None]).flatten(-2)


def scale_to_ue8m0(scale: Tensor) -> Tensor:
    """Return the uint8 exponent byte of float32 powers of two; 255 for inf and NaN."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def ue8m0_to_scale(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32, NaN for 255."""
    table = _constant((*(2.0 ** (b - 127) for b in range(255)), math.nan), byte.device)
    return table[byte.long()]


def dequantize_block_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Return float32 [out, in] of an e4m3 weight whose tiles of `block` share a float32 scale.

    scale: [ceil(out / block[0]), ceil(in / block[1])]; another shape raises ValueError.
    """
    rows, columns = weight.shape
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted:
        raise ValueError(f"scale of shape {tuple(scale.shape)} for a weight {rows}x{columns}: wanted {wanted}")
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * spread


def hadamard(x: Tensor) -> Tensor:
    """Return x [..., n] times the symmetric orthogonal Hadamard matrix (Sylvester order, n^-0.5), float32.

    Raises ValueError unless n is a power of two.
    """
    return x.float() @ _hadamard_matrix(x.shape[-1], x.device)


def _grouped(x: Tensor, group: int) -> Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"{x.shape[-1]} channels can't be quantised in groups of {group}")
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _representable(x: Tensor) -> Tensor:
    """Keep values off the top of float32, where rounding up to the next code would overflow on the way back.

    An inf loses itself here but not in its group's scale, which makes the whole group NaN.
    """
    return x.clamp(-(2.0**127), 2.0**127)


def _power_of_two_at_least(x: Tensor) -> Tensor:
    """Round positive normal float32 up to a power of two, exactly, on the bits; inf and NaN stay what they are."""
    rounded = ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def _hadamard_matrix(n: int, device: torch.device) -> Tensor:
    if n < 1 or n & (n - 1):
        raise ValueError(f"Hadamard transform of {n} channels: must be a power of two")
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * (1 / math.sqrt(n))
