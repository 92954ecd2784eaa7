"""Weights of many experts in four bits, and the order in which the decode kernels read them.

    nvfp4   value = e2m1 * e4m3 scale of 16 channels * fp32 factor of the matrix
    mxfp4   value = e2m1 * ue8m0 scale of 32 channels; held as e2m1 * 2^(scale - top) * 2^(top - 127), top being the
            matrix's largest scale byte

Packed, rows of an expert come in tiles of 16, channels in steps of 64. A tile of a step is 512 bytes, 16 for each lane
of a warp: lane 4 g + t has channels 16 t to 16 t + 15 of rows g and g + 8. Word j of it has channels 4 j to 4 j + 3;
byte 2 p + 1 of a word has the row g and channels p and p + 2, byte 2 p the row g + 8 and the same:

    bit 7: sign of channel p;   bits 6-4: magnitude of channel p + 2;   bits 3-1: of channel p;   bit 0: sign of p + 2

so that one bitwise choice, masks and shifts by a byte give eight f16 (moe_weights_triton.py). Scales lie in steps'
order, up to 4 steps together: lane by lane, for each step, a byte of row g and one of row g + 8. mxfp4 has scales for
16 lanes, 2 g + t / 2. A first matrix (w1 and w3, one above the other) has rows of w1 as rows g of a tile and the same
rows of w3 as rows g + 8: a lane then holds the gate and the value it is multiplied with.

The order is a permutation of bits: nothing is rounded, and `unpack_experts` gives back what was packed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from kernels.quant import dequantize_e2m1, ue8m0_to_scale

Format = Literal["nvfp4", "mxfp4"]
FORMATS = {"nvfp4": 0, "mxfp4": 1}  # as kernels know them
GROUP = {"nvfp4": 16, "mxfp4": 32}
LANES = {"nvfp4": 32, "mxfp4": 16}  # with scales of their own
SCALES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
TILE_ROWS, STEP = 16, 64
ORDER = "1"  # of what is packed; another for another, since packed weights may lie on disk

# f16 holds 0.5 * 2^(scale - top) down to 2^-24; e4m3 holds powers of two from 2^-9 to 2^8.
MXFP4_SPAN, NVFP4_SPAN = 23, 17
# The kernels multiply a factor of nvfp4 by 2^7.
LARGEST_FACTOR = 2.0**120


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """One matrix of every expert, packed: E experts of N rows and K channels.

    codes: int32 [E, N/16, K/64, 32, 4].   scales: int16 [E, N/16, K/64/P, lanes, P], P steps together.
    factors: float32 [E, parts]; parts: 2 for w1 over w3, whose factors may differ, 1 for w2.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    factors: Tensor

    @property
    def experts(self) -> int:
        return int(self.codes.shape[0])

    @property
    def rows(self) -> int:
        return int(self.codes.shape[1]) * TILE_ROWS

    @property
    def channels(self) -> int:
        return int(self.codes.shape[2]) * STEP

    @property
    def parts(self) -> int:
        return int(self.factors.shape[1])

    @property
    def packed_steps(self) -> int:
        """Steps whose scales lie together."""
        return int(self.scales.shape[-1])

    def select(self, experts: Tensor) -> ExpertWeights:
        """Return the weights of some experts, [n] int64."""
        return ExpertWeights(self.format, self.codes[experts], self.scales[experts], self.factors[experts])


def pack_experts(
    codes: Tensor, scales: Tensor, factors: Tensor | None, *, format: Format, parts: int, name: str
) -> ExpertWeights:
    """Return weights in the kernels' order.

    codes: uint8 or int8 [E, N, K/2], even channel in the low nibble.   scales: [E, N, K/16] e4m3 or [E, N, K/32] ue8m0,
    or their bytes.   factors: float32 [E, parts] of nvfp4, None for mxfp4.   parts: 2 if rows are w1, then w3.
    name: what errors call the tensor. Raises ValueError for types and shapes that don't fit, for scales and factors
    that are not numbers, and for what the kernels can't hold exactly: an mxfp4 matrix whose scales span more than f16
    does, an nvfp4 factor beyond 2^120.
    """
    group = GROUP[format]
    if codes.dtype not in (torch.uint8, torch.int8) or scales.dtype not in (torch.uint8, SCALES[format]):
        raise ValueError(
            f"{name}: codes {codes.dtype}, scales {scales.dtype} of {format}: wanted uint8 or int8, and "
            f"{SCALES[format]} or its bytes as uint8"
        )
    experts, rows, channels = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    if channels % STEP or rows % TILE_ROWS:
        raise ValueError(f"{name}: {rows} rows of {channels} channels: wanted multiples of {TILE_ROWS} and {STEP}")
    if tuple(scales.shape) != (experts, rows, channels // group):
        raise ValueError(
            f"{name}: scales {tuple(scales.shape)} for {format} codes {tuple(codes.shape)}: wanted "
            f"{(experts, rows, channels // group)}"
        )
    byte = scales.contiguous().view(torch.uint8)
    if format == "mxfp4":
        if factors is not None:
            raise ValueError(f"{name}: mxfp4 has no factor beside its scales")
        factors = _mxfp4_factors(codes, byte, parts=parts, name=name)
    elif factors is None or tuple(factors.shape) != (experts, parts):
        found = None if factors is None else tuple(factors.shape)
        raise ValueError(f"{name}: factors {found} of nvfp4: wanted {(experts, parts)}")
    elif not bool(factors.isfinite().all()):
        raise ValueError(f"{name}: a factor (weight_scale_2) is not finite")
    elif bool((factors.abs() > LARGEST_FACTOR).any()):
        largest = float(factors.abs().max())
        raise ValueError(f"{name}: a factor (weight_scale_2) is {largest:g}; the kernels hold factors up to 2^120")
    elif bool(((byte & 0x7F) == 0x7F).any()):
        raise ValueError(f"{name}: an e4m3 scale is NaN")
    return ExpertWeights(
        format,
        _pack_codes(codes.view(torch.uint8), parts),
        _pack_scales(byte, format, parts, channels // STEP),
        factors.float().contiguous(),
    )


def unpack_experts(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [E, N, K/2] uint8, scales [E, N, K/group] uint8 and factors [E, parts] of packed weights."""
    parts = weights.parts
    byte = _split(_split(weights.codes.view(torch.uint8), -2, 8, 4), -1, 4, 2, 2)
    byte = byte.permute(0, 1, 7, 3, 2, 4, 5, 6).flip(2)  # E, tile, half, g, step, t, j, p
    first = (byte >> 4) & 8 | (byte >> 1) & 7
    second = (byte & 1) << 3 | (byte >> 4) & 7
    code = torch.stack([first, second], -2)  # E, tile, half, g, step, t, j, kk, p
    codes = (code[..., 0] | (code[..., 1] << 4)).flatten(4)
    scale = _split(_split(weights.scales.view(torch.uint8), -2, 8, -1), -1, -1, 2)
    scale = scale.permute(0, 1, 6, 3, 2, 5, 4).flatten(4)  # E, tile, half, g, (block, step, lane)
    return _rows_of(codes, parts), _rows_of(scale, parts), weights.factors


def dequantize_experts(weights: ExpertWeights) -> Tensor:
    """Return float32 [E, N, K], exact but for the factor's rounding."""
    codes, byte, factors = unpack_experts(weights)
    each = factors.repeat_interleave(weights.rows // weights.parts, 1)[..., None]
    if weights.format == "mxfp4":
        return dequantize_e2m1(codes, ue8m0_to_scale(byte), GROUP["mxfp4"])
    return dequantize_e2m1(codes, byte.view(torch.float8_e4m3fn).float(), GROUP["nvfp4"]) * each


def nvfp4_from_mxfp4(codes: Tensor, scales: Tensor, *, parts: int, name: str) -> tuple[Tensor, Tensor]:
    """Return nvfp4 scales [E, N, K/16] e4m3 and factors [E, parts] with which the same codes mean the same values.

    scales: ue8m0 [E, N, K/32] or its bytes. Raises ValueError where that is not possible without loss: a group that is
    not all zero lies more than 17 powers of two below the largest of its matrix. Groups of zeros get the scale 0.
    """
    byte = scales.contiguous().view(torch.uint8).int()
    if bool((byte == 255).any()):
        raise ValueError(f"{name}: a ue8m0 scale is NaN")
    is_zero = _is_zero(codes, GROUP["mxfp4"])
    top = _per_part(byte.masked_fill(is_zero, 0), parts).amax((2, 3))
    top = top.clamp(min=9)  # the factor stays a normal float32
    below = byte - top.repeat_interleave(byte.shape[1] // parts, 1)[..., None]
    lost = (below < -NVFP4_SPAN) & ~is_zero
    if bool(lost.any()):
        expert = int(lost.flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"{_which(name, expert, lost)} has mxfp4 scales {-int(below[lost].min())} powers of two apart; nvfp4 holds "
            f"{NVFP4_SPAN} without loss: keep this tensor as mxfp4"
        )
    scale = torch.where(is_zero, 0.0, torch.exp2((below + 8).double())).to(torch.float8_e4m3fn)
    return _repeat(scale), torch.exp2((top - 8 - 127).double()).float()


def to_pieces(x: Tensor) -> Tensor:
    """Return x [..., K] in the order in which the kernels keep activations: lanes' pieces of 8 channels side by side.

    Channel 64 n + 16 t + 8 h + i comes to 64 n + 32 h + 8 t + i.
    """
    return _split(x, -1, x.shape[-1] // 64, 4, 2, 8).transpose(-2, -3).reshape(x.shape)


def from_pieces(x: Tensor) -> Tensor:
    """Return what to_pieces was given."""
    return _split(x, -1, x.shape[-1] // 64, 2, 4, 8).transpose(-2, -3).reshape(x.shape)


def to_products(x: Tensor) -> Tensor:
    """Return x [..., K] in the order in which a product takes channels, for warps that share activations.

    Channel 64 n + 16 t + 8 h + 2 i + j comes to 64 n + 32 h + 8 i + 2 t + j.
    """
    x = _split(x, -1, x.shape[-1] // 64, 4, 2, 4, 2)
    return x.movedim(-4, -2).flatten(-5)


def from_products(x: Tensor) -> Tensor:
    """Return what to_products was given."""
    x = _split(x, -1, x.shape[-1] // 64, 2, 4, 4, 2)
    return x.movedim(-2, -4).flatten(-5)


def _repeat(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).repeat_interleave(2, -1).view(torch.float8_e4m3fn)


def _mxfp4_factors(codes: Tensor, byte: Tensor, *, parts: int, name: str) -> Tensor:
    if bool((byte == 255).any()):
        raise ValueError(f"{name}: a ue8m0 scale is NaN")
    top = _per_part(byte.int(), parts).amax((2, 3))
    low = _per_part(byte.int().masked_fill(_is_zero(codes, GROUP["mxfp4"]), 255), parts).amin((2, 3))
    low = torch.minimum(low, top)  # of nothing but zeros
    lost = (low < top - MXFP4_SPAN) | (top < 1)
    if bool(lost.any()):
        expert, part = (int(i) for i in lost.nonzero()[0])
        raise ValueError(
            f"{_which(name, expert, lost)} has mxfp4 scales from 2^{int(low[expert, part]) - 127} to "
            f"2^{int(top[expert, part]) - 127}; the kernels hold a span of {MXFP4_SPAN} powers of two, above 2^-127"
        )
    return torch.exp2((top - 127).double()).float()


def _which(name: str, expert: int, of: Tensor) -> str:
    return f"{name}: expert {expert}" if of.shape[0] > 1 else name


def _is_zero(codes: Tensor, group: int) -> Tensor:
    """Return [E, N, K/group]: all codes of the group are 0 or -0."""
    return (_split(codes.view(torch.uint8), -1, -1, group // 2) & 0x77 == 0).all(-1)


def _per_part(x: Tensor, parts: int) -> Tensor:
    return _split(x, 1, parts, -1)


def _split(x: Tensor, at: int, *sizes: int) -> Tensor:
    """Return x with dimension `at` cut into `sizes`, one of which may be -1."""
    at %= x.ndim
    return x.reshape(*x.shape[:at], *sizes, *x.shape[at + 1 :])


def _tiles_of(x: Tensor, parts: int) -> Tensor:
    """Return [E, N/16, 2, 8, ...] of rows [E, N, ...]; with two parts, a tile's halves are of w1 and of w3."""
    if parts == 2:
        return _split(x, 1, 2, -1, 8).transpose(1, 2)
    return _split(x, 1, -1, 2, 8)


def _rows_of(x: Tensor, parts: int) -> Tensor:
    """Return [E, N, ...] of [E, N/16, 2, 8, ...]."""
    return (x.transpose(1, 2) if parts == 2 else x).flatten(1, 3).contiguous()


def _pack_codes(codes: Tensor, parts: int) -> Tensor:
    byte = _split(_tiles_of(codes, parts), -1, -1, 4, 4, 2)  # E, tile, half, g, step, t, j, kk: channels p = 0, 1
    even, odd = byte & 15, byte >> 4
    first, second = (torch.stack([even[..., kk], odd[..., kk]], -1) for kk in (0, 1))  # ..., j, p
    packed = (first & 8) << 4 | (second & 7) << 4 | (first & 7) << 1 | second >> 3
    packed = packed.flip(2).permute(0, 1, 4, 3, 5, 6, 7, 2).contiguous()  # E, tile, step, g, t, j, p, half
    return packed.flatten(5).flatten(3, 4).view(torch.int32)


def _pack_scales(byte: Tensor, format: Format, parts: int, steps: int) -> Tensor:
    together = next(n for n in (4, 2, 1) if steps % n == 0)
    lanes = LANES[format] // 8
    tiles = _split(_tiles_of(byte, parts), -1, steps // together, together, lanes)
    # E, tile, half, g, block, step, lane -> E, tile, block, g, lane, step, half
    packed = tiles.permute(0, 1, 4, 3, 6, 5, 2).contiguous()
    return packed.view(torch.int16).squeeze(-1).flatten(3, 4)
