"""The Triton kernels of moe_decode.py: grouped products of packed expert weights with few tokens each.

Where an expert has up to 8 tokens, or 16, warps work alone; where it has more, they share the tokens (see
moe_product_triton.py). The experts that have rows are listed by routing; a program finds its item in that list.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.launch_order_triton import ASIDE, end
from kernels.moe_product_triton import product, product_shared
from kernels.moe_weights_triton import MXFP4, NVFP4, NVFP4_LIFT
from kernels.row_load import to_f16


@triton.jit
def top_of(factor, FORMAT: tl.constexpr):
    """Return the largest exponent byte that an MXFP4 factor, a power of two, stands for."""
    return factor.to(tl.int32, bitcast=True) >> 23 if FORMAT == MXFP4 else 0


@triton.jit
def hide(
    out, total, weights, edges, tile,
    COLUMNS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Write h of routed rows from start, N at most, from total [A, B, 16, N]: tiles of 8 rows of w1 and 8 of w3.

    In the order in which the last product reads them: that of to_products where MANY, else of to_pieces.
    """
    hidden_ptr, weight_ptr, limit, lift = out
    gate, up = tl.split(tl.permute(tl.reshape(total, (A, B, 2, 8, N)), (0, 1, 3, 4, 2)))
    gate, up = gate * weights[3], up * weights[4]
    # Comparisons and not tl.minimum: NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    row = edges[0] + tl.arange(0, N)
    live = row < edges[1]
    weight = tl.load(weight_ptr + row, mask=live, other=0.0) * lift
    hidden = to_f16(gate / (1.0 + tl.exp(-gate)) * up * weight[None, None, None, :])
    # A tile's 8 channels are those of a lane's half.
    i = tl.arange(0, 8)[None, None, :]
    first, t = (tile // 8 * 64 + tile % 2 * 32)[:, :, None], (tile // 2 % 4)[:, :, None]
    channel = first + (i // 2 * 8 + t * 2 + i % 2 if MANY else t * 8 + i)
    to = hidden_ptr + row.to(tl.int64)[None, None, None, :] * COLUMNS + channel[:, :, :, None]
    tl.store(to, hidden, mask=live[None, None, None, :])


@triton.jit
def _give(out, total, weights, edges, tile, COLUMNS: tl.constexpr, N: tl.constexpr):
    """Write h W2^T of routed rows from start, N at most, from total [.., .., 16, N]."""
    row = edges[0] + tl.arange(0, N)
    channel = tile[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    to = out[0] + row.to(tl.int64)[None, None, None, :] * COLUMNS + channel[:, :, :, None]
    tl.store(to, total * (weights[3] * out[1]), mask=(row < edges[1])[None, None, None, :])


@triton.jit
def _few(
    out, weights, x_ptr, gather_ptr, edges, row_tile,
    K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """R RS tiles from row_tile on for routed rows between edges, 8 NB at a time."""
    tile = row_tile + tl.arange(0, RS)[:, None] + tl.arange(0, R)[None, :] * RS
    for start in tl.range(edges[0], edges[1], 8 * NB, num_stages=1):
        part = (start, edges[1])
        total = product(weights, x_ptr, gather_ptr, part, row_tile, K, PACKED, S, R, KS, RS, NB, FORMAT, WAIT)
        if UP:
            hide(out, total, weights, part, tile, COLUMNS, RS, R, 8 * NB, False)
        else:
            _give(out, total, weights, part, tile, COLUMNS, 8 * NB)


@triton.jit
def _many(
    out, weights, x_ptr, gather_ptr, edges, row_tile, shares, share, place,
    K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """As _few, R W tiles with shared tokens.

    SPLIT > 1: a share of the sums; the last of an item's programs to finish adds them up, in their order.
    """
    tile = row_tile + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    begin = share * (K // 64 // SPLIT)
    for start in tl.range(edges[0], edges[1], 8 * NB, num_stages=1):
        part = (start, edges[1])
        total = product_shared(
            weights, x_ptr, gather_ptr, part, row_tile, begin, K, PACKED, S, AHEAD, R, W, NB, SPLIT, FORMAT, WAIT
        )
        if SPLIT > 1:
            at, live = _place_share(part, place, row_tile, 0, 2 * COLUMNS, 16 * R * W, 8 * NB, 8 * NB)
            tl.store(shares[0] + share * shares[2] + at, tl.reshape(total, (16 * R * W, 8 * NB)), mask=live)
        elif UP:
            hide(out, total, weights, part, tile, COLUMNS, R, W, 8 * NB, True)
        else:
            _give(out, total, weights, part, tile, COLUMNS, 8 * NB)
    if SPLIT > 1:
        tl.debug_barrier()  # all have stored before one says so; that releases their stores and acquires others'
        counter = shares[1] + (place * (2 * COLUMNS // 16) + row_tile)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counter, 0)  # for the next call
            SOME: tl.constexpr = 4 * NB if NB > 2 else 8
            for start in tl.range(edges[0], edges[1], SOME, num_stages=1):
                column = (start - edges[0]) % (8 * NB)
                part = (start - column, edges[1])
                at, live = _place_share(part, place, row_tile, column, 2 * COLUMNS, 16 * R * W, 8 * NB, SOME)
                total = tl.load(shares[0] + at, mask=live, other=0.0, cache_modifier=".cg")
                for i in tl.static_range(1, SPLIT):
                    total += tl.load(shares[0] + i * shares[2] + at, mask=live, other=0.0, cache_modifier=".cg")
                total = tl.reshape(total, (R, W, 16, SOME))
                hide(out, total, weights, (start, edges[1]), tile, COLUMNS, R, W, SOME, True)


@triton.jit
def _place_share(
    edges, place, row_tile, column, ROWS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SOME: tl.constexpr
):
    """Return where [M, SOME] of a share lies, from a tile and a column on, and which of it there is.

    Of up to N routed rows from edges[0] on, those of one channel lie side by side, in sixteens: 16 rows are left for
    each expert before, so that the last sixteen stay clear of the next expert's.
    """
    column += tl.arange(0, SOME)
    wide = tl.multiple_of(tl.minimum((edges[1] - edges[0] + 15) // 16 * 16, N), 16 if N > 8 else 8)
    at = (edges[0] + place * 16) * ROWS + row_tile * (16 * wide) + tl.arange(0, M)[:, None] * wide + column[None, :]
    return at, (edges[0] + column < edges[1])[None, :]


@triton.jit
def _take(
    out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, gather_ptr, active_ptr, capacity, shares,
    ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    KS: tl.constexpr, RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr,
    AHEAD: tl.constexpr, MANY_R: tl.constexpr, SPLIT: tl.constexpr, LOOPS: tl.constexpr, FORMAT: tl.constexpr,
    UP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Do items, each of one expert, for all of its routed rows: one a program, or every so manyth where it LOOPS.

    First come those of the experts with many rows: MANY_R KS RS tiles, of ROWS / 16, 8 NB routed rows at once, one of
    SPLIT shares of the channels. Then those of the others: R RS tiles, 16 routed rows at once, PAIR_S steps at a time,
    if there are more than 8. NB 0: no expert has many; PAIR_S 0: none has more than 8.
    capacity: of an expert's lists of what goes with its rows.   shares: sums [SPLIT, size], counters, size: of
    _place_share.
    """
    BLOCKS: tl.constexpr = ROWS // (16 * R * RS)
    MANY_ITEMS: tl.constexpr = ROWS // (16 * MANY_R * KS * RS) * SPLIT
    number, many = tl.load(active_ptr), tl.load(active_ptr + 1)
    items = many * MANY_ITEMS + (number - many) * BLOCKS if NB > 0 else number * BLOCKS
    item = tl.program_id(0)
    if LOOPS:
        # What is the same for every item is worked out anew: it would hold registers through all of them.
        for i in tl.range(item, items, tl.num_programs(0), num_stages=1, disable_licm=True):
            _do(
                i, many, out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, gather_ptr, active_ptr, capacity,
                shares, ROWS, K, COLUMNS, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD, MANY_R, SPLIT, FORMAT, UP,
                WAIT,
            )  # fmt: skip
    elif item < items:
        _do(
            item, many, out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, gather_ptr, active_ptr, capacity,
            shares, ROWS, K, COLUMNS, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD, MANY_R, SPLIT, FORMAT, UP, WAIT,
        )  # fmt: skip


@triton.jit
def _do(
    item, many, out, codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, gather_ptr, active_ptr, capacity, shares,
    ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    KS: tl.constexpr, RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr,
    AHEAD: tl.constexpr, MANY_R: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Do one of _take's items."""
    W: tl.constexpr = KS * RS
    BLOCKS: tl.constexpr = ROWS // (16 * R * RS)
    MANY_ITEMS: tl.constexpr = ROWS // (16 * MANY_R * W) * SPLIT
    place, block = item // BLOCKS, item % BLOCKS
    if NB > 0:
        of_few = item - many * MANY_ITEMS
        if of_few < 0:
            place, block = item // MANY_ITEMS, item % MANY_ITEMS
        else:
            place, block = many + of_few // BLOCKS, of_few % BLOCKS
    entry = active_ptr + 4 + place * 4
    expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    codes = codes_ptr + expert.to(tl.int64) * (ROWS * K // 8)
    scaled = scales_ptr + expert.to(tl.int64) * (ROWS * K // (32 if FORMAT == NVFP4 else 64))
    low = tl.load(factors_ptr + expert * (2 if UP else 1))
    high = tl.load(factors_ptr + expert * 2 + 1) if UP else low
    LIFT: tl.constexpr = NVFP4_LIFT if FORMAT == NVFP4 else 1.0
    weights = (codes, scaled, (top_of(low, FORMAT), top_of(high, FORMAT)), low * LIFT, high * LIFT)
    edges = (first, first + count)
    if UP:
        lists = expert.to(tl.int64) * capacity - first
        gather_ptr += lists
        out = (out[0], out[1] + lists, out[2], out[3])
    if NB > 0 and place < many:
        _many(
            out, weights, x_many_ptr, gather_ptr, edges, block // SPLIT * (MANY_R * W), shares, block % SPLIT, place,
            K, COLUMNS, PACKED, MANY_S, AHEAD, MANY_R, W, NB, SPLIT, FORMAT, UP, WAIT,
        )  # fmt: skip
    elif PAIR_S > 0 and count > 8:
        _few(
            out, weights, x_ptr, gather_ptr, edges, block * (R * RS),
            K, COLUMNS, PACKED, PAIR_S, R, KS, RS, 2, FORMAT, UP, WAIT,
        )  # fmt: skip
    else:
        _few(
            out, weights, x_ptr, gather_ptr, edges, block * (R * RS),
            K, COLUMNS, PACKED, S, R, KS, RS, 1, FORMAT, UP, WAIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "share_size"])
def up_kernel(
    hidden_ptr, x_ptr, x_many_ptr, codes_ptr, scales_ptr, factors_ptr, token_ptr, weight_ptr, active_ptr, share_ptr,
    counter_ptr, capacity, share_size, limit, lift,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr, AHEAD: tl.constexpr,
    MANY_R: tl.constexpr, SPLIT: tl.constexpr, LOOPS: tl.constexpr, FORMAT: tl.constexpr, ORDER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden[r] = lift * weight * silu(min(x W1^T, limit)) * clamp(x W3^T, limit) for routed rows r, f16.

    ORDER: CHAIN, which leads, since down_kernel reads the list of items early; or ASIDE: the list is older than this
    kernel.
    """
    if PDL:
        if ORDER != ASIDE:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _take(
        (hidden_ptr, weight_ptr, limit, lift), codes_ptr, scales_ptr, factors_ptr, x_ptr, x_many_ptr, token_ptr,
        active_ptr, capacity, (share_ptr, counter_ptr, share_size),
        2 * INNER, H, INNER, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD, MANY_R, SPLIT, LOOPS, FORMAT, True, False,
    )  # fmt: skip
    end(ORDER, PDL)


@triton.jit
def down_kernel(
    part_ptr, hidden_ptr, codes_ptr, scales_ptr, factors_ptr, active_ptr, unlift,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, KS: tl.constexpr,
    RS: tl.constexpr, PAIR_S: tl.constexpr, NB: tl.constexpr, MANY_S: tl.constexpr, AHEAD: tl.constexpr,
    MANY_R: tl.constexpr, LOOPS: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part[r] = unlift * hidden[r] W2^T for routed rows r, float32.

    The list of items is older than up_kernel, or up_kernel has waited for it before it let this kernel begin: it is
    read, and the first weights are, before up_kernel has ended.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _take(
        (part_ptr, unlift), codes_ptr, scales_ptr, factors_ptr, hidden_ptr, hidden_ptr, None, active_ptr, 0, None,
        H, INNER, H, PACKED, S, R, KS, RS, PAIR_S, NB, MANY_S, AHEAD, MANY_R, 1, LOOPS, FORMAT, False, PDL,
    )  # fmt: skip
    # Whoever waits for this kernel relies on all that came before. One program is enough, and those that find nothing
    # to do must not fill the multiprocessors waiting.
    if PDL and tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()
