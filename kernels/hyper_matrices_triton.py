"""The matrices that mix a hyper-connection's streams, worked out by the lanes that spread.

What earlier launches of this step have written may be read after the wait only. The mixing matrices take 40 dependent
normalisations and are needed right after it; their logits were written a whole sublayer ago, but nothing promises that
they have arrived. So they are read before the wait, worked on, and read again after it: if any bit has changed since,
the work is done again.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.hyper_arithmetic_triton import exponential, inverse


@triton.jit
def columns_of(x, S: tl.constexpr):
    """Return the S columns of x [.., .., .., S]."""
    if S == 2:
        found = tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        found = (a, b, c, d)
    return found


@triton.jit
def _normalised(lines, factors, before, eps, W: tl.constexpr, S: tl.constexpr):
    """Return r [4, 8, W, S] = eps before + sum_i lines[i] factors[.., i], a line [32, W, S].

    If `before` is one over the factors of the rows, so is r of those that normalise them, given the columns' factors.
    """
    total = before * eps
    one = columns_of(factors, S)
    for i in tl.static_range(S):
        factor = tl.broadcast_to(one[i][:, :, :, None], total.shape)
        total = tl.fma(tl.reshape(lines[i], (4, 8, W, S)), factor, total)
    return total


@triton.jit
def mixing_matrices(logits, eps, N: tl.constexpr, S: tl.constexpr, ITERS: tl.constexpr, W: tl.constexpr):
    """Return C [4, 8, W, S, S] of its logits, each lane's own; 0 beyond N.

    With m[j, k] = rows[j] start[j, k] columns[k], a normalisation of rows makes rows[j] / (rows[j] s[j] + eps) of
    rows[j], s[j] = sum_k start[j, k] columns[k]. That is 1 / (s[j] + eps / rows[j]), so what is kept is one over each
    factor: a chain of S sums and a reciprocal, a third fewer instructions than dividing the matrix.
    """
    j = tl.arange(0, S)[None, None, None, :, None]
    k = tl.arange(0, S)[None, None, None, None, :]
    inside = (j < N) & (k < N)
    # NaN is no maximum, but it becomes one exponential, and so its row.
    start = exponential(logits - tl.max(tl.where(inside, logits, -float("inf")), 4)[:, :, :, :, None])
    start = tl.where(inside, start, 0.0)
    share = tl.broadcast_to(inverse(tl.sum(start, 4))[:, :, :, :, None], start.shape)
    start = tl.where(inside, tl.fma(start, share, tl.zeros_like(start) + eps), 0.0)
    by_column = columns_of(tl.reshape(start, (32, W, S, S)), S)
    by_row = columns_of(tl.reshape(tl.permute(start, (0, 1, 2, 4, 3)), (32, W, S, S)), S)
    rows = tl.full((4, 8, W, S), 1.0, tl.float32)
    # Beyond N sums are 0, and eps would drive the factors out of bounds.
    small = tl.where(tl.arange(0, S)[None, None, None, :] < N, eps, 1.0)
    columns = _normalised(by_row, rows, rows, small, W, S)
    for _ in range(ITERS - 1):
        rows = _normalised(by_column, inverse(columns), rows, small, W, S)
        columns = _normalised(by_row, inverse(rows), columns, small, W, S)
    return start * inverse(rows)[:, :, :, :, None] * inverse(columns)[:, :, :, None, :]


@triton.jit
def load_carry(carry_ptr, token, live, N: tl.constexpr, S: tl.constexpr):
    """Return post [4, 8, W, 1, S] and the logits [4, 8, W, S, S] of each lane's token [4, 8, W], past L1: that may hold
    what is no more."""
    live = live[:, :, :, None, None]
    j = tl.arange(0, S)[None, None, None, :, None]
    k = tl.arange(0, S)[None, None, None, None, :]
    row = carry_ptr + (token.to(tl.int64) * (4 * (1 + N)))[:, :, :, None, None] + k
    post = tl.load(row, mask=live & (k < N), other=0.0, cache_modifier=".cg")
    return post, tl.load(row + (1 + j) * 4, mask=live & (j < N) & (k < N), other=0.0, cache_modifier=".cg")


@triton.jit
def _exchange(x, W: tl.constexpr):
    """Return x [4, 8, W, ., .] of the tokens g, and of the tokens g + 8, of what lane (t, g) holds of 8 (t % 2) + g."""
    A: tl.constexpr = x.shape[3]
    B: tl.constexpr = x.shape[4]
    own = tl.reshape(x.to(tl.int32, bitcast=True), (2, 2, 8, W, A, B))
    other = own ^ tl.xor_sum(own, 1, keep_dims=True)
    is_first = tl.arange(0, 2)[None, :, None, None, None, None] == 0
    first = tl.reshape(tl.where(is_first, own, other), (4, 8, W, A, B))
    second = tl.reshape(tl.where(is_first, other, own), (4, 8, W, A, B))
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def spread_weights(post, logits, eps, N: tl.constexpr, S: tl.constexpr, ITERS: tl.constexpr, W: tl.constexpr):
    """Return post [4, 8, W, 1, S] and the transposed C [4, 8, W, S, S] of the tokens g, then of the tokens g + 8.

    Of a carry of which lane (t, g) has token 8 (t % 2) + g: each works on one token alone.
    """
    c = tl.permute(mixing_matrices(logits, eps, N, S, ITERS, W), (0, 1, 2, 4, 3))
    post_0, post_1 = _exchange(post, W)
    c_0, c_1 = _exchange(c, W)
    return post_0, c_0, post_1, c_1


@triton.jit
def both(first, second):
    """Return [4, 8, W, 2, S, 1] of [4, 8, W, S] of the tokens g, and g + 8."""
    is_first = tl.arange(0, 2)[None, None, None, :, None, None] == 0
    return tl.where(is_first, first[:, :, :, None, :, None], second[:, :, :, None, :, None])


@triton.jit
def changed(post, logits, post_now, logits_now):
    """Return whether two readings of the carry differ in any bit."""
    first = post.to(tl.int32, bitcast=True) ^ post_now.to(tl.int32, bitcast=True)
    second = logits.to(tl.int32, bitcast=True) ^ logits_now.to(tl.int32, bitcast=True)
    return tl.max(((first | second) != 0).to(tl.int32)) > 0
