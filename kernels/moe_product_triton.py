"""Products of an expert's packed weights with its rows' activations: by warps on their own, or sharing the activations.

Warps take packed weights straight into the registers in which the tensor cores want their left operand; tokens are the
narrow right operand. Alone, a warp takes 16 R rows and a share of the channels, and reads the tokens into registers, in
16-byte pieces, a quad's side by side (expert_weights.to_pieces): no shared memory, no barrier, until the shares are
summed. Together, warps take different rows and share the tokens, which asynchronous copies bring into shared memory in
the product's order (expert_weights.to_products).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.moe_weights_triton import PLAIN, load_weights, unpack
from kernels.row_load import keep


@triton.jit
def _load_tokens(
    x_ptr, row, live, step, K: tl.constexpr, S: tl.constexpr, NB: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr
):  # fmt: skip
    """Return the right operand [W, 64 S, 8 NB] f16: channels of rows [8, NB] of x at each warp's step, ..."""
    W: tl.constexpr = KS * RS
    t = tl.arange(0, 4)[:, None, None, None, None, None, None]
    w = tl.arange(0, W)[None, None, :, None, None, None, None]
    s = tl.arange(0, S)[None, None, None, None, :, None, None]
    half = tl.arange(0, 2)[None, None, None, None, None, :, None]
    i = tl.arange(0, 8)[None, None, None, None, None, None, :]
    row = row[None, :, None, :, None, None, None]
    live = live[None, :, None, :, None, None, None]
    channel = (step + (w // RS) * (K // 64 // KS) + s) * 64 + half * 32 + t * 8 + i
    x = tl.load(x_ptr + (row * K + channel), mask=live, other=0.0)
    x = tl.reshape(x, (4, 8, W, NB, S, 2, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 4, 5, 6, 7, 0, 8, 3, 1)), (W, 64 * S, 8 * NB))


@triton.jit
def product(
    weights, x_ptr, gather_ptr, edges, row_tile,
    K: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr,
    NB: tl.constexpr, FORMAT: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Return [RS, R, 16, 8 NB] float32: rows of an expert times routed rows of x.

    weights: codes, scales and top exponents of the expert.   edges: the first routed row, and one beyond the last.
    gather_ptr: the row of x of each routed row, None if it is the same.   WAIT: for the kernel before, once the first
    weights are on their way.
    """
    codes_ptr, scales_ptr, tops = weights[0], weights[1], weights[2]
    W: tl.constexpr = KS * RS
    STEPS: tl.constexpr = K // 64
    SHARE: tl.constexpr = STEPS // KS
    words, scales = load_weights(codes_ptr, scales_ptr, row_tile, 0, True, STEPS, PACKED, S, R, KS, RS, FORMAT)
    row, live = _rows(edges, gather_ptr, NB, WAIT)
    total = tl.zeros((W, 16 * R, 8 * NB), tl.float32)
    for step in tl.range(0, SHARE, S, num_stages=1):
        next_words, next_scales = words, scales
        if SHARE > S:
            next_words, next_scales = load_weights(
                codes_ptr, scales_ptr, row_tile, step + S, step + S < SHARE, STEPS, PACKED, S, R, KS, RS, FORMAT
            )  # fmt: skip
        x = _load_tokens(x_ptr, row, live, step, K, S, NB, KS, RS)
        w = tl.reshape(unpack(words, scales, tops, S, R, W, FORMAT), (W, 16 * R, 64 * S))
        total = tl.dot(keep(w), x, total)
        words, scales = next_words, next_scales
    if KS > 1:
        total = tl.sum(tl.reshape(total, (KS, RS, 16 * R, 8 * NB)), 0)
    return tl.reshape(total, (RS, R, 16, 8 * NB))


@triton.jit
def _settle(total):
    """Return sums, float32, when the product is done: not left to run on, it would read what comes into its registers.

    On sm_90 Triton lets the products of a pipelined loop run beside the next step's work, and only watches over
    operands in shared memory. Seen there: with two warp groups, weights of the next step in this one's sums.
    """
    if not PLAIN:
        total = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total


@triton.jit
def product_shared(
    weights, x_ptr, gather_ptr, edges, row_tile, begin,
    K: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    NB: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Return [R, W, 16, 8 NB] float32: as product, every warp with other rows; x is in the product's order.

    Of the channels one of SPLIT shares, from step begin on; S steps at once, of which AHEAD are on their way. Weights
    stay in the registers into which they were loaded: to move them would be to wait for them.
    """
    codes_ptr, scales_ptr, tops = weights[0], weights[1], weights[2]
    STEPS: tl.constexpr = K // 64
    end = begin + STEPS // SPLIT
    words, scales = (), ()
    for i in tl.static_range(AHEAD):
        loaded, scale = load_weights(
            codes_ptr, scales_ptr, row_tile, begin + i * S, True, STEPS, PACKED, S, R, 1, W, FORMAT
        )
        words, scales = words + (loaded,), scales + (scale,)  # noqa: RUF005 - Triton knows no other way
    at = edges[0] + tl.arange(0, 8 * NB)
    live = at < edges[1]
    if WAIT:
        tl.extra.cuda.gdc_wait()
    row = at
    if gather_ptr is not None:
        row = tl.load(gather_ptr + at, mask=live, other=0)
    x_row = x_ptr + row * K
    total = tl.zeros((16 * R * W, 8 * NB), tl.float32)
    for step in range(begin, end, AHEAD * S):
        next_words, next_scales = (), ()
        for i in tl.static_range(AHEAD):
            later = step + (AHEAD + i) * S
            loaded, scale = load_weights(
                codes_ptr, scales_ptr, row_tile, later, later < end, STEPS, PACKED, S, R, 1, W, FORMAT
            )
            next_words, next_scales = next_words + (loaded,), next_scales + (scale,)  # noqa: RUF005
            channel = (step + i * S) * 64 + tl.arange(0, 64 * S)
            x = tl.load(x_row[:, None] + channel[None, :], mask=live[:, None], other=0.0)
            w = tl.permute(unpack(words[i], scales[i], tops, S, R, W, FORMAT), (1, 0, 2, 3, 4, 5, 6, 7, 8, 9))
            total = _settle(tl.dot(keep(tl.reshape(w, (16 * R * W, 64 * S))), tl.trans(x), total))
        words, scales = next_words, next_scales
    return tl.reshape(total, (R, W, 16, 8 * NB))


@triton.jit
def _rows(edges, gather_ptr, NB: tl.constexpr, WAIT: tl.constexpr):
    """Return rows [8, NB] of the activations of routed rows from the first edge on, and which are before the second."""
    at = edges[0] + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
    live = at < edges[1]
    if WAIT:
        tl.extra.cuda.gdc_wait()  # costs nothing the second time
    row = at
    if gather_ptr is not None:
        row = tl.load(gather_ptr + at, mask=live, other=0)
    return row, live
