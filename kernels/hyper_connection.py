"""Manifold-constrained hyper-connections: n residual streams, mixed by small doubly stochastic matrices.

    flat = S.view(T, n*H);  mix = (flat @ fn^T) * rsqrt(mean(flat^2) + norm_eps)
    pre  = sigmoid(mix[:n] * scale0 + base[:n]) + eps                    x = sum_j pre[j] * S[j]
    post = 2 * sigmoid(mix[n:2n] * scale1 + base[n:2n])
    C    = softmax over the last axis of (mix[2n:].view(n, n) * scale2 + base[2n:]) + eps; columns normalised, then
           iters-1 times rows and columns (each `/= sum + eps`)
    hc_post: S'[k] = post[k] * y + sum_j C[j, k] * S[j]
    hc_head: only x, with fn [n, n*H], base [n], scale [1]

Everything in float32. Layout: streams [T, n, H], fn [(2+n)*n, n*H], C [T, n, n]. Source: DeepSeek-V4's model code.
hyper_connection_decode.py does the same in two launches a sublayer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hc_pre_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See hc_pre."""
    x, post, logits = collapse_reference(streams, fn, base, scale, eps=eps, norm_eps=norm_eps)
    return x, post, sinkhorn_reference(logits, eps=eps, iters=iters)


def collapse_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, H], post [T, n] and the logits [T, n, n] of C, float32. See hc_pre."""
    n = streams.shape[1]
    s = streams.float()
    mix = _mix(s, fn, norm_eps)
    pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    return _weighted_sum(pre, s), post, (mix[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)


def sinkhorn_reference(logits: Tensor, *, eps: float, iters: int) -> Tensor:
    """Return C [T, n, n] of its logits."""
    comb = torch.softmax(logits, -1).add_(eps)
    comb.div_(comb.sum(1, keepdim=True).add_(eps))
    for _ in range(iters - 1):
        comb.div_(comb.sum(2, keepdim=True).add_(eps))
        comb.div_(comb.sum(1, keepdim=True).add_(eps))
    return comb


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, H], post [T, n] and C [T, n, n] of streams [T, n, H], float32."""
    _check(streams, fn, base, scale, outputs=(2 + streams.shape[1]) * streams.shape[1], scales=3)
    return hc_pre_reference(streams, fn, base, scale, eps=eps, norm_eps=norm_eps, iters=iters)


def hc_post_reference(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See hc_post."""
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    return mixed.add_(post[..., None] * y.float()[:, None]).to(streams.dtype)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the next streams [T, n, H], in the dtype of `streams`, given a sublayer's output y [T, H]."""
    tokens, n, hidden = streams.shape
    if y.shape != (tokens, hidden) or post.shape != (tokens, n) or comb.shape != (tokens, n, n):
        raise ValueError(
            f"streams {tuple(streams.shape)}, y {tuple(y.shape)}, post {tuple(post.shape)}, comb {tuple(comb.shape)}"
        )
    return hc_post_reference(y, streams, post, comb)


def hc_head_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """See hc_head."""
    s = streams.float()
    return _weighted_sum(torch.sigmoid(_mix(s, fn, norm_eps) * scale[0] + base) + eps, s)


def hc_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float) -> Tensor:
    """Return the streams [T, n, H] collapsed to [T, H] float32."""
    _check(streams, fn, base, scale, outputs=streams.shape[1], scales=1)
    return hc_head_reference(streams, fn, base, scale, eps=eps, norm_eps=norm_eps)


def _mix(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten(1)
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def _weighted_sum(weights: Tensor, streams: Tensor) -> Tensor:
    return torch.bmm(weights[:, None], streams)[:, 0]


def _check(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, outputs: int, scales: int) -> None:
    wanted = (outputs, streams.shape[1] * streams.shape[2])
    if fn.shape != wanted or base.shape != (outputs,) or scale.shape != (scales,):
        raise ValueError(
            f"streams {tuple(streams.shape)} with fn {tuple(fn.shape)}, base {tuple(base.shape)}, scale "
            f"{tuple(scale.shape)}: wanted fn {wanted}, base ({outputs},), scale ({scales},)"
        )
