"""The compressor's pooling from inside a Triton kernel, for steps of a few tokens a sequence. Formulas: compress.py.

One program follows one sequence through the step. Rows of this step are read from the projection (K beside G, without
the position bias), rows of earlier steps from the state, so nothing is read that the launch has written: tokens need
no order but this, that a ring row is overwritten only after the pooling that needs what it held. A token at position
p overwrites p - 8, and only poolings of tokens before p need that.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def csa_pool(new, stride, bias, state, position, start, D: tl.constexpr, SINGLE: tl.constexpr):
    """Return the entry [D] float32 that the token at `position` (4b + 3) completes.

    new: its row of the projection, K [2D] then G [2D]; the rows of the step's earlier tokens lie before it, `stride`
    elements apart.   bias [4, 2D].   state: the slot's ring, 8 x (K [2D], G [2D]).   start: the step's first position.
    SINGLE: the step has one token a sequence, so only the last of the 8 positions is new.
    """
    c = tl.arange(0, D)
    back = tl.arange(0, 8)
    at = position - 7 + back
    channel = (back // 4 * D)[:, None] + c[None, :]
    is_old = ((at >= 0) & (at < start))[:, None]
    row = ((at & 7) * (4 * D))[:, None] + channel
    k = tl.load(state + row, mask=is_old, other=0.0)
    g = tl.load(state + row + 2 * D, mask=is_old, other=-float("inf"))
    if SINGLE:
        k_last = tl.load(new + D + c).to(tl.float32)
        g_last = tl.load(new + 3 * D + c).to(tl.float32) + tl.load(bias + 7 * D + c)
        top = tl.maximum(tl.max(g, 0), g_last)
        weight = tl.exp(g - top[None, :])
        last = tl.exp(g_last - top)
        return (tl.sum(weight * k, 0) + last * k_last) / (tl.sum(weight, 0) + last)
    is_new = (at >= start)[:, None]
    row = ((back - 7) * stride)[:, None] + channel
    k += tl.load(new + row, mask=is_new, other=0.0).to(tl.float32)
    g_new = tl.load(new + row + 2 * D, mask=is_new, other=0.0).to(tl.float32)
    g_new += tl.load(bias + ((at & 3) * (2 * D))[:, None] + channel, mask=is_new, other=0.0)
    g = tl.where(is_new, g_new, g)
    weight = tl.exp(g - tl.max(g, 0)[None, :])
    return tl.sum(weight * k, 0) / tl.sum(weight, 0)


@triton.jit
def csa_keep(new, bias, state, position, D: tl.constexpr):
    """Store the token's K and G [2D] (bias included) in the ring."""
    c = tl.arange(0, 2 * D)
    ring = state + (position & 7) * (4 * D) + c
    tl.store(ring, tl.load(new + c).to(tl.float32))
    tl.store(ring + 2 * D, tl.load(new + 2 * D + c).to(tl.float32) + tl.load(bias + (position & 3) * (2 * D) + c))


@triton.jit
def hca_resume(state, position, D: tl.constexpr):
    """Return (top, total, weighted) [D] of the entry that the token at `position` belongs to, empty if it begins it."""
    c = tl.arange(0, D)
    is_begun = position % 128 != 0
    top = tl.load(state + c, mask=is_begun, other=-float("inf"))
    total = tl.load(state + D + c, mask=is_begun, other=0.0)
    return top, total, tl.load(state + 2 * D + c, mask=is_begun, other=0.0)


@triton.jit
def hca_add(new, bias, top, total, weighted, position, D: tl.constexpr):
    """Return (top, total, weighted) with the token's K and G [D] taken in. bias [128, D]."""
    c = tl.arange(0, D)
    k = tl.load(new + c).to(tl.float32)
    g = tl.load(new + D + c).to(tl.float32) + tl.load(bias + (position % 128) * D + c)
    both = tl.maximum(top, g)
    old, fresh = tl.exp(top - both), tl.exp(g - both)
    return both, total * old + fresh, weighted * old + fresh * k


@triton.jit
def hca_keep(state, top, total, weighted, D: tl.constexpr):
    """Store the sums of an unfinished entry."""
    c = tl.arange(0, D)
    tl.store(state + c, top)
    tl.store(state + D + c, total)
    tl.store(state + 2 * D + c, weighted)
