"""Linear layers: y = x W^T with W [out, in] row-major.

A weight is either float (bfloat16 or float32) or e4m3 with one float32 scale per 128x128 tile:
`W[o, i] = code[o, i] * scale[o // 128, i // 128]`. gemm_decode.py has the kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.norm_rope import rms_norm_reference
from kernels.quant import dequantize_block_fp8

BLOCK = 128


def linear_reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    *,
    offset: tuple[int, int] = (0, 0),
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return rms(x, norm, eps) W^T, or x W^T without a norm, in x's dtype (float32 after a norm).

    offset: row and column, below 128, at which the weight begins within its first tile: a slice may cut one.
    """
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    if scale is not None:
        weight = dequantize_slice(weight, scale, offset).to(x.dtype)
    return F.linear(x, weight)


def dequantize_slice(weight: Tensor, scale: Tensor, offset: tuple[int, int]) -> Tensor:
    """Return float32 of an e4m3 weight that begins `offset` rows and columns behind the first tile's corner."""
    whole = F.pad(weight.view(torch.uint8), (offset[1], 0, offset[0], 0)).view(torch.float8_e4m3fn)
    return dequantize_block_fp8(whole, scale)[offset[0] :, offset[1] :]


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return x [..., in] times weight [out, in]^T in x's dtype. scale: that of an e4m3 weight, else None."""
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"input of {x.shape[-1]} channels for a weight {tuple(weight.shape)}")
    if (scale is None) != (weight.dtype != torch.float8_e4m3fn):
        raise ValueError(f"weight {weight.dtype} {'without' if scale is None else 'with'} a scale")
    return linear_reference(x, weight, scale)


def grouped_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """See grouped_linear."""
    return torch.einsum("tgi,gri->tgr", x, weight)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return [T, G, R] of x [T, G, I] and weight [G, R, I]: each group has a matrix of its own."""
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != weight.shape[::2]:
        raise ValueError(f"input {tuple(x.shape)} and grouped weight {tuple(weight.shape)} don't fit")
    return grouped_linear_reference(x, weight)
