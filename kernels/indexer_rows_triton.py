"""The best k of many rows of scores, a program for each, in Triton; indexer_decode.py has the rules.

Where there are more rows than a device has places for programs, none need be cut: see indexer_topk_triton.py for how
a row is searched.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.indexer_board_triton import board_of, start
from kernels.indexer_topk_triton import _UNSEEN, _conclude, _search

INTEGERS = ["first", "width", "row_stride"]


@triton.jit(do_not_specialize=INTEGERS)
def row_top_k_kernel(
    score_ptr, out_ptr, positions_ptr, sequence_ptr, first, width, row_stride,
    K: tl.constexpr, KP: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: the token first + program_id(0) and its row. out [T, K] int32.

    score: rows of `row_stride` times 16, of which `width` have been scored: a token that sees more has no sound row.
    KP: a power of two, at least K.   TILE: at least four times the threads.
    """
    row = tl.program_id(0)
    token = first + row
    sequence = tl.load(sequence_ptr + token)
    position = tl.load(positions_ptr + token)
    visible = tl.where(sequence >= 0, (position + 1) // RATIO, 0)
    out = out_ptr + token.to(tl.int64) * K
    if (visible > K) & (visible <= width):
        board = board_of(row)
        start(board, BINS)
        values = score_ptr + row.to(tl.int64) * row_stride * 16
        bar, need, taken, is_finite = _search(values, visible, board, K, BINS, TILE, True)
        _conclude(values, None, visible, bar, need, taken, is_finite, board, out, None, token, K, KP, TILE, True)
    else:
        p = tl.arange(0, KP)
        entry = tl.where(p < visible, p, -1)
        # More than there are scores: a block table that ends too early.
        entry = tl.where(visible > K, tl.where(p == 0, _UNSEEN, -1), entry)
        tl.store(out + p, entry, mask=p < K)
