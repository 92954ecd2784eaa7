"""Scores of the indexer for many tokens of a sequence, in Triton; indexer_chunk.py says what is computed.

A program keeps the queries of QUERIES tokens in shared memory and their heads' weights in registers, and goes through
a span of their sequence's keys. Keys are rows of the product and heads its columns, those of a token together: so a
thread holds many heads of a key, and their sum takes no exchange but between four lanes at the end.

Tokens of a program may belong to several sequences, where one ends: then the span is gone through for each of them.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.indexer_triton import FP8, _block, _fp4_scales, _unpacked

# Never turned into constants or hints, so that one binary serves every chunk and pool.
INTEGERS = ["stride_u", "stride_su", "table_width", "num_blocks", "first", "end", "tiles", "row_stride"]


@triton.jit(do_not_specialize=INTEGERS)
def chunk_scores_kernel(
    q_ptr, weight_ptr, score_ptr, positions_ptr, sequence_ptr, table_ptr, key_ptr, key_scale_ptr,
    stride_u, stride_su, table_width, num_blocks, first, end, tiles, row_stride,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, RATIO: tl.constexpr,
    TOP_K: tl.constexpr, FORMAT: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: tokens first + QUERIES * program_id(0) on, tiles SPAN * program_id(1) on, of BLOCK_N keys.

    score: a row for each token from `first` on, of `row_stride` times 16; `tiles` of it are written at most, and none
    for a token that sees no more than TOP_K entries.   stride_u: 16-byte pieces from unit to unit; stride_su: scale
    words.   HEADS: padded H.
    """
    token = first + tl.program_id(0) * QUERIES
    begin = tl.program_id(1) * SPAN
    j = tl.arange(0, QUERIES)
    row = token + j
    sequence = tl.load(sequence_ptr + row, mask=row < end, other=-1)
    position = tl.load(positions_ptr + row, mask=row < end, other=-1)
    seen = tl.where(sequence >= 0, (position + 1) // RATIO, 0)
    is_due = (seen > TOP_K) & (seen > begin * BLOCK_N)
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, QUERIES * HEADS)
    h = column % HEADS
    owner = token + column // HEADS
    owner_sequence = tl.load(sequence_ptr + owner, mask=owner < end, other=-1)
    at = owner.to(tl.int64) * H + h
    WIDTH: tl.constexpr = D if FORMAT == FP8 else D // 8  # values or words of a row
    PIECE: tl.constexpr = 16 if FORMAT == FP8 else 4
    word = tl.arange(0, WIDTH)
    current = tl.max(tl.where(is_due, sequence, -1), 0)
    while current >= 0:
        is_mine = is_due & (sequence == current)
        used = (h < H) & (owner_sequence == current)
        weight = tl.load(weight_ptr + at, mask=used, other=0.0)
        query = tl.load(q_ptr + at[None, :] * D + tl.arange(0, D)[:, None], mask=used[None, :], other=0.0)
        most = tl.max(tl.where(is_mine, seen, 0), 0)
        last = tl.minimum(tl.minimum((most + (BLOCK_N - 1)) // BLOCK_N, tiles), begin + SPAN)
        to = score_ptr + (row - first).to(tl.int64) * (row_stride.to(tl.int64) * 16)
        next0 = _block(table_ptr, current, begin, table_width, ROWS, BLOCK_N)
        next1 = _block(table_ptr, current, begin + 1, table_width, ROWS, BLOCK_N)
        for i in tl.range(begin, last, num_stages=STAGES):
            # Moved on by an operation, since what is only handed on keeps the compiler from pipelining the loop.
            block, next0 = next0, tl.maximum(next1, -1)
            next1 = _block(table_ptr, current, i + 2, table_width, ROWS, BLOCK_N)
            is_known = (block >= 0) & (block < num_blocks)
            # An unknown block is read as the first one, and its scores are NaN.
            unit = tl.where(is_known, block, 0).to(tl.int64)
            key_row = (i * BLOCK_N) % ROWS + n % ROWS if BLOCK_N < ROWS else n % ROWS
            start = unit * stride_u * PIECE
            if BLOCK_N > ROWS:
                values = tl.load(key_ptr + (start + key_row * WIDTH)[:, None] + word[None, :])
            else:
                values = tl.load(key_ptr + start + key_row[:, None] * WIDTH + word[None, :])
            scales = tl.load(key_scale_ptr + unit * stride_su + key_row)
            if FORMAT == FP8:
                keys, factor = values, scales
            else:
                G: tl.constexpr = D // 32
                exponent, factor = _fp4_scales(scales, G)
                exponent = tl.reshape(tl.broadcast_to(exponent[:, :, None], (BLOCK_N, G, 4)), (BLOCK_N, WIDTH))
                keys = _unpacked(values, exponent, BLOCK_N, D)
            dots = tl.dot(keys, query)
            # NaN stays NaN: a key that was never written must not pass for one that scored low.
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            factor = tl.where(is_known, factor, float("nan"))
            score = tl.sum(tl.reshape(dots, (BLOCK_N, QUERIES, HEADS)), 2) * factor[:, None]
            place = (i * BLOCK_N + n)[:, None]
            tl.store(to[None, :] + place, score, mask=is_mine[None, :] & (n >= 0)[:, None])
        is_due = is_due & (sequence != current)
        current = tl.max(tl.where(is_due, sequence, -1), 0)
