"""The Triton kernels of moe_blocks.py: products of experts with blocks of many rows, and their sums by token.

A program has one block of an expert's rows (moe_routing.py lists them) and some tiles of its weights, which it unpacks
once for all rows of the block, in registers, as the left operand. Few rows take narrow products: 32 or 64 columns.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.expert_parts_triton import rows_of
from kernels.moe_product_triton import product_shared
from kernels.moe_triton import hide, top_of
from kernels.moe_weights_triton import NVFP4, NVFP4_LIFT


@triton.jit
def _give(out, total, weights, edges, row_tile, M: tl.constexpr, N: tl.constexpr):
    """Write h W2^T of routed rows from start, N at most, from total, which is [M, N] but for its shape."""
    part_ptr, unlift, first_tile, tiles = out
    row = edges[0] + tl.arange(0, N)
    to = part_ptr + (row[:, None] * (tiles * 16) + ((row_tile - first_tile) * 16 + tl.arange(0, M))[None, :])
    sums = tl.trans(tl.reshape(total, (M, N))) * (weights[3] * unlift)
    tl.store(to, sums, mask=(row < edges[1])[:, None])


@triton.jit
def _rows(
    out, weights, x_ptr, gather_ptr, edges, row_tile,
    K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """R W tiles from row_tile on for routed rows between edges, 8 NB at most."""
    total = product_shared(
        weights, x_ptr, gather_ptr, edges, row_tile, 0, K, PACKED, S, AHEAD, R, W, NB, 1, FORMAT, False
    )
    if UP:
        tile = row_tile + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
        hide(out, total, weights, edges, tile, COLUMNS, R, W, 8 * NB, True)
    else:
        _give(out, total, weights, edges, row_tile, 16 * R * W, 8 * NB)


@triton.jit
def _pass(
    out, weights, x_ptr, gather_ptr, start, end, row_tile,
    K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """_rows with as few columns as do."""
    edges = (start, end)
    if NB > 4 and end - start <= 4 * NB:
        _pass(
            out, weights, x_ptr, gather_ptr, start, end, row_tile, K, COLUMNS, PACKED, S, AHEAD, R, W, NB // 2, FORMAT,
            UP,
        )  # fmt: skip
    else:
        _rows(out, weights, x_ptr, gather_ptr, edges, row_tile, K, COLUMNS, PACKED, S, AHEAD, R, W, NB, FORMAT, UP)


@triton.jit
def _block(
    out, codes_ptr, scales_ptr, factors_ptr, x_ptr, gather_ptr, block_ptr, items, row_tile,
    ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr,
    AHEAD: tl.constexpr, R: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """Do program's item: of `items` for each block. row_tile: the first of those that this launch is about."""
    place, item = tl.program_id(0) // items, tl.program_id(0) % items
    if place < tl.load(block_ptr):
        entry = block_ptr + 4 + place * 4
        expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        codes = codes_ptr + expert.to(tl.int64) * (ROWS * K // 8)
        scaled = scales_ptr + expert.to(tl.int64) * (ROWS * K // (32 if FORMAT == NVFP4 else 64))
        low = tl.load(factors_ptr + expert * (2 if UP else 1))
        high = tl.load(factors_ptr + expert * 2 + 1) if UP else low
        LIFT: tl.constexpr = NVFP4_LIFT if FORMAT == NVFP4 else 1.0
        weights = (codes, scaled, (top_of(low, FORMAT), top_of(high, FORMAT)), low * LIFT, high * LIFT)
        tile = row_tile + item * (R * W)
        end = first + count
        if NB >= 16:
            _pass(out, weights, x_ptr, gather_ptr, first, end, tile, K, COLUMNS, PACKED, S, AHEAD, R, W, NB, FORMAT, UP)
        else:
            for start in tl.range(first, end, 8 * NB, num_stages=1, disable_licm=True):
                _pass(
                    out, weights, x_ptr, gather_ptr, start, end, tile, K, COLUMNS, PACKED, S, AHEAD, R, W, NB, FORMAT,
                    UP,
                )  # fmt: skip


@triton.jit
def up_blocks_kernel(
    hidden_ptr, x_ptr, codes_ptr, scales_ptr, factors_ptr, token_ptr, weight_ptr, block_ptr, limit, lift,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """hidden[r] = lift * weight * silu(min(x W1^T, limit)) * clamp(x W3^T, limit) for routed rows r, f16."""
    _block(
        (hidden_ptr, weight_ptr, limit, lift), codes_ptr, scales_ptr, factors_ptr, x_ptr, token_ptr, block_ptr,
        2 * INNER // (16 * R * W), 0, 2 * INNER, H, INNER, PACKED, S, AHEAD, R, W, NB, FORMAT, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_tile", "tiles"])
def down_blocks_kernel(
    part_ptr, hidden_ptr, codes_ptr, scales_ptr, factors_ptr, block_ptr, unlift, first_tile, tiles,
    H: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """part[r] = unlift * hidden[r] W2^T for routed rows r, float32: `tiles` of 16 channels from `first_tile` on."""
    _block(
        (part_ptr, unlift, first_tile, tiles), codes_ptr, scales_ptr, factors_ptr, hidden_ptr, None, block_ptr,
        tiles // (R * W), first_tile, H, INNER, 0, PACKED, S, AHEAD, R, W, NB, FORMAT, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_tile", "tiles"])
def sum_blocks_kernel(
    out_ptr, part_ptr, ids_ptr, rank_ptr, first_ptr, add_ptr, first_tile, tiles,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of token t, of `tiles` of 16 channels from `first_tile` on. Grid (tokens, blocks)."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < tiles * 16
    has_rows, rows = rows_of(ids_ptr, rank_ptr, first_ptr, token, True, TOP_K)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(part_ptr + (rows[k] * (tiles * 16) + channel), mask=inside & has_rows, other=0.0)
    to = token.to(tl.int64) * H + first_tile * 16 + channel
    if add_ptr is not None:
        total += tl.load(add_ptr + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=inside)
