"""Linear layers: y = x W^T with W [out, in] row-major.

A weight is either float (bfloat16 or float32) or e4m3 with one float32 scale per 128x128 tile:
`W[o, i] = code[o, i] * scale[o // 128, i // 128]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quant import dequantize_block_fp8


def linear_reference(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """See linear."""
    if scale is not None:
        weight = dequantize_block_fp8(weight, scale).to(x.dtype)
    return F.linear(x, weight)


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
