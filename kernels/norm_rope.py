"""RMS norm and rotary embedding of a row's tail.

    rms(x) = x * rsqrt(mean(x^2) + eps) [* weight]
    rope: the last R channels are R/2 complex numbers (channels 2i and 2i+1), multiplied by exp(1j * position * f_i)

Both in float32 whatever comes in. `rotation` is complex64 [T, R/2]; its conjugate rotates back. Layout: rows [T, D] or
[T, heads, D], channels innermost.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See rms_norm."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """Return x [..., D] normalised over D, float32. weight: [D] float32 or None."""
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"norm weight of shape {tuple(weight.shape)} for rows of {x.shape[-1]} channels")
    return rms_norm_reference(x, weight, eps)


def rope_reference(x: Tensor, rotation: Tensor) -> Tensor:
    """See rope."""
    channels = 2 * rotation.shape[-1]
    y = x.float().clone()
    pairs = torch.view_as_complex(y[..., -channels:].reshape(*y.shape[:-1], channels // 2, 2))
    if x.dim() == 3:
        rotation = rotation[:, None]
    y[..., -channels:] = torch.view_as_real(pairs * rotation).flatten(-2)
    return y


def rope(x: Tensor, rotation: Tensor) -> Tensor:
    """Return x [T, D] or [T, heads, D] with its tail rotated, float32. rotation: complex64 [T, R/2]."""
    if x.shape[0] != rotation.shape[0] or 2 * rotation.shape[-1] > x.shape[-1]:
        raise ValueError(f"rotation of shape {tuple(rotation.shape)} for rows of shape {tuple(x.shape)}")
    return rope_reference(x, rotation)


def rotation_at(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return exp(1j * position * frequency), complex64 [T, R/2]; angles in float32, positions up to 2^24 exact."""
    angle = positions.float()[:, None] * frequencies
    return torch.complex(angle.cos(), angle.sin())
