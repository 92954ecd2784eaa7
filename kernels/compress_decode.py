"""The compressor's pooling from inside a Triton kernel. Formulas: compress.py.

Rows of this step are read from the projection (K beside G, without the position bias), rows of earlier steps from the
state, so nothing is read that the launch has written: tokens need no order but this, that state is overwritten only
after the poolings that need what it held. Those of this step's tokens alone need nothing of it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def csa_pool(new, bias, state, position, D: tl.constexpr):
    """Return the entry [D] float32 that the token at `position` (4b + 3), the step's only one, completes.

    new: its row of the projection, K [2D] then G [2D].   bias [4, 2D].   state: the slot's ring, 8 x (K [2D], G [2D]).
    """
    c = tl.arange(0, D)
    back = tl.arange(0, 8)
    at = position - 7 + back
    channel = (back // 4 * D)[:, None] + c[None, :]
    is_old = ((at >= 0) & (at < position))[:, None]
    row = ((at & 7) * (4 * D))[:, None] + channel
    k = tl.load(state + row, mask=is_old, other=0.0)
    g = tl.load(state + row + 2 * D, mask=is_old, other=-float("inf"))
    k_last = tl.load(new + D + c).to(tl.float32)
    g_last = tl.load(new + 3 * D + c).to(tl.float32) + tl.load(bias + 7 * D + c)
    top = tl.maximum(tl.max(g, 0), g_last)
    weight = tl.exp(g - top[None, :])
    last = tl.exp(g_last - top)
    return (tl.sum(weight * k, 0) + last * k_last) / (tl.sum(weight, 0) + last)


@triton.jit
def csa_pool_several(new, stride, bias, state, position, start, D: tl.constexpr):
    """The same in a step that begins at `start`, of which several tokens may be in the entry.

    The step's earlier tokens lie before `new`, `stride` elements apart. A block at a time: half the registers.
    """
    c = tl.arange(0, D)
    back = tl.arange(0, 4)
    top = tl.full((D,), -float("inf"), tl.float32)
    total = tl.zeros((D,), tl.float32)
    weighted = tl.zeros((D,), tl.float32)
    for block in range(tl.where(position < 4, 1, 2)):  # its own, which has a row, then the one before
        at = position - 3 - 4 * block + back
        channel = (1 - block) * D + c[None, :]
        is_old = ((at >= 0) & (at < start))[:, None]
        is_new = (at >= start)[:, None]
        row = ((at & 7) * (4 * D))[:, None] + channel
        k = tl.load(state + row, mask=is_old, other=0.0)
        g = tl.load(state + row + 2 * D, mask=is_old, other=-float("inf"))
        row = ((at - position) * stride)[:, None] + channel
        k += tl.load(new + row, mask=is_new, other=0.0).to(tl.float32)
        g_new = tl.load(new + row + 2 * D, mask=is_new, other=0.0).to(tl.float32)
        g_new += tl.load(bias + ((at & 3) * (2 * D))[:, None] + channel, mask=is_new, other=0.0)
        top, total, weighted = take_in(top, total, weighted, k, tl.where(is_new, g_new, g))
    return weighted / total


@triton.jit
def take_in(top, total, weighted, k, g):
    """Return (top, total, weighted) [D] with rows of K and G [N, D] taken in.

    G is -inf where there is no row; one there must be, or have been.
    """
    both = tl.maximum(top, tl.max(g, 0))
    old = tl.exp(top - both)
    weight = tl.exp(g - both[None, :])
    return both, total * old + tl.sum(weight, 0), weighted * old + tl.sum(weight * k, 0)


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


@triton.jit
def hca_sums(new, stride, bias, state, start, first, stop, D: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return (top, total, weighted) [D] of positions `first`, a multiple of 128, to stop - 1, up to 128 of them.

    new: the projection's row of the token at `start`, where the step begins; the others lie behind, `stride` elements
    apart. What came before is in the state.   bias [128, D].   AT_ONCE: rows.
    """
    c = tl.arange(0, D)[None, :]
    at = tl.maximum(first, start)
    top, total, weighted = hca_resume(state, at, D)
    while at < stop:
        position = at + tl.arange(0, AT_ONCE)
        there = (position < stop)[:, None]
        row = new + ((position - start).to(tl.int64) * stride)[:, None] + c
        k = tl.load(row, mask=there, other=0.0).to(tl.float32)
        g = tl.load(row + D, mask=there, other=-float("inf")).to(tl.float32)
        g += tl.load(bias + (position % 128 * D)[:, None] + c, mask=there, other=0.0)
        top, total, weighted = take_in(top, total, weighted, k, g)
        at += AT_ONCE
    return top, total, weighted
