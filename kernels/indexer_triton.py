"""Scores of the indexer over paged keys, in Triton; indexer_decode.py says what is computed and where it lies.

A fixed number of programs share the tiles of BLOCK_N keys that tokens really have, evenly: each takes a run of them,
whatever tokens it belongs to, and loads a token's query once. So time follows the real lengths. Up to QUERIES tokens
of a sequence are scored over one reading of its keys.

FP8 keys go into tensor cores as they are. FP4 keys become f16: a code's three magnitude bits in the low exponent and
top mantissa bits of f16 are its value times 2^-14, and one multiplication by 2^14 times the group's scale over the
row's largest follows; the largest is the row's factor. That is exact while scales of a row differ by less than 2^23;
what lies below adds nothing to a float32 sum.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_load import keep
from kernels.triton_env import INTERPRETED

FP8, FP4 = tl.constexpr(0), tl.constexpr(1)
FORMATS = {"fp8_index": 0, "fp4_index": 1}

# Never turned into constants or hints, so that one binary serves every batch and pool.
INTEGERS = ["stride_u", "stride_su", "table_width", "num_blocks", "tokens", "capacity"]

_PLAIN = tl.constexpr(INTERPRETED)

# A word of eight codes in $8, two equal factors in $9; code i to $i.
_UNPACK = tl.constexpr("""{
    .reg .b32 s, m, x;
    shl.b32 s, $8, 12;
    and.b32 s, s, 0x80008000;
    shl.b32 m, $8, 9;
    lop3.b32 x, m, 0x0E000E00, s, 0xEA;
    mul.rn.f16x2 x, x, $9;
    mov.b32 {$0, $4}, x;
    shl.b32 s, $8, 8;
    and.b32 s, s, 0x80008000;
    shl.b32 m, $8, 5;
    lop3.b32 x, m, 0x0E000E00, s, 0xEA;
    mul.rn.f16x2 x, x, $9;
    mov.b32 {$1, $5}, x;
    shl.b32 s, $8, 4;
    and.b32 s, s, 0x80008000;
    shl.b32 m, $8, 1;
    lop3.b32 x, m, 0x0E000E00, s, 0xEA;
    mul.rn.f16x2 x, x, $9;
    mov.b32 {$2, $6}, x;
    and.b32 s, $8, 0x80008000;
    shr.b32 m, $8, 3;
    lop3.b32 x, m, 0x0E000E00, s, 0xEA;
    mul.rn.f16x2 x, x, $9;
    mov.b32 {$3, $7}, x;
}""")


@triton.jit
def regions(
    positions_ptr, sequence_ptr, query_start_ptr, tokens,
    TOKENS: tl.constexpr, QUERIES: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (visible, tiles, is_first) of each token [TOKENS]: entries it sees, tiles of its scores, whether it leads.

    Tokens of a sequence are scored in groups of QUERIES, over the tiles that the last of them needs; none if it sees
    no more than TOP_K entries.
    """
    t = tl.arange(0, TOKENS)
    sequence = tl.load(sequence_ptr + t, mask=t < tokens, other=-1)
    position = tl.load(positions_ptr + t, mask=t < tokens, other=-1)
    is_real = sequence >= 0
    if QUERIES > 1:
        first = tl.load(query_start_ptr + sequence, mask=is_real, other=0)
        end = tl.load(query_start_ptr + sequence + 1, mask=is_real, other=0)
        place = (t - first) % QUERIES
        behind = tl.minimum(QUERIES - 1 - place, end - 1 - t)
        is_first = place == 0
    else:
        behind = 0
        is_first = t >= 0
    visible = tl.where(is_real, (position + 1) // RATIO, 0)
    seen = tl.where(is_real, (position + 1 + behind) // RATIO, 0)
    tiles = tl.where(seen > TOP_K, (seen + (BLOCK_N - 1)) // BLOCK_N, 0)
    return visible, tiles, is_first


@triton.jit
def _segment(
    item, end, totals, tiles, sequence_ptr, TOKENS: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Return of the tile `item`: its token and sequence, its number among the token's, their number, their region."""
    t = tl.arange(0, TOKENS)
    before = totals <= item
    token = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, totals, 0), 0)
    own = tl.sum(tl.where(t == token, tiles, 0), 0)
    region = first
    if QUERIES > 1:
        region = tl.sum(tl.where(t < token, tiles, 0), 0)
    sequence = tl.load(sequence_ptr + token, mask=item < end, other=-1)
    return token, tl.maximum(sequence, 0), item - first, own, region


@triton.jit
def _block(
    table_ptr, sequence, tile, table_width, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the blocks of a tile's keys, [BLOCK_N] or one for all; -1 where the table ends."""
    column = tile * (BLOCK_N // ROWS) if BLOCK_N >= ROWS else tile // (ROWS // BLOCK_N)
    if BLOCK_N > ROWS:
        column += tl.arange(0, BLOCK_N) // ROWS
    return tl.load(table_ptr + sequence.to(tl.int64) * table_width + column, mask=column < table_width, other=-1)


@triton.jit
def _unpacked(words, factor, BLOCK_N: tl.constexpr, D: tl.constexpr):
    """Return f16 [BLOCK_N, D] of words of eight codes [BLOCK_N, D / 8] and exponents of factors, likewise."""
    if _PLAIN:
        factor = (factor << 10).to(tl.int16).to(tl.float16, bitcast=True)
        x0 = _code(words) * factor
        x1 = _code(words >> 4) * factor
        x2 = _code(words >> 8) * factor
        x3 = _code(words >> 12) * factor
        x4 = _code(words >> 16) * factor
        x5 = _code(words >> 20) * factor
        x6 = _code(words >> 24) * factor
        x7 = _code(words >> 28) * factor
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = tl.inline_asm_elementwise(
            _UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, factor * 0x04000400],
            dtype=(
                tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
            ), is_pure=True, pack=1,
        )  # fmt: skip
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return keep(tl.reshape(tl.join(even, odd), (BLOCK_N, D)))


@triton.jit
def _code(words):
    """Return the e2m1 code in the low four bits of each word as f16, times 2^-14."""
    return (((words & 8) << 12) | ((words & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _fp4_scales(scales, G: tl.constexpr):
    """Return (exponents of factors [N, G], the rows' factors [N]) of scale bytes [N], G in a word."""
    byte = (scales.to(tl.int32)[:, None] >> (8 * tl.arange(0, G))[None, :]) & 255
    top = tl.max(byte, 1)
    bits = tl.where(top == 255, 0x7FC00000, tl.where(top == 0, 0x00400000, top << 23))
    return tl.maximum(byte - top[:, None] + 29, 0), bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=INTEGERS)
def logits_kernel(
    q_ptr, weight_ptr, score_ptr, positions_ptr, sequence_ptr, query_start_ptr, table_ptr, key_ptr, key_scale_ptr,
    stride_u, stride_su, table_width, num_blocks, tokens, capacity,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, RATIO: tl.constexpr,
    TOP_K: tl.constexpr, FORMAT: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a run of tiles. stride_u: 16-byte pieces from unit to unit; stride_su: scale words. HEADS: padded H.

    score: tiles of BLOCK_N, those of a token together, tokens in order; `capacity` tiles, more are not written.
    """
    program = tl.program_id(0)
    _, tiles, is_first = regions(
        positions_ptr, sequence_ptr, query_start_ptr, tokens, TOKENS, QUERIES, RATIO, TOP_K, BLOCK_N
    )
    led = tl.where(is_first, tiles, 0)
    totals = tl.cumsum(led, 0)
    total = tl.sum(led, 0)
    share, rest = total // tl.num_programs(0), total % tl.num_programs(0)
    item = program * share + tl.minimum(program, rest)
    end = item + share + tl.where(program < rest, 1, 0)
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, QUERIES * HEADS)
    h = column % HEADS
    WIDTH: tl.constexpr = D if FORMAT == FP8 else D // 8  # values or words of a row
    PIECE: tl.constexpr = 16 if FORMAT == FP8 else 4
    word = tl.arange(0, WIDTH)
    token, sequence, tile, own, region = _segment(item, end, totals, tiles, sequence_ptr, TOKENS, QUERIES)
    next0 = _block(table_ptr, sequence, tile, table_width, ROWS, BLOCK_N)
    next1 = _block(table_ptr, sequence, tile + 1, table_width, ROWS, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    while item < end:
        count = tl.minimum(own - tile, end - item)
        row = token + column // HEADS
        # Those of the group, not of the sequence behind it.
        used = (h < H) & (row < tokens)
        if QUERIES > 1:
            used = used & (tl.load(sequence_ptr + row, mask=row < tokens, other=-1) == sequence)
        at = row.to(tl.int64) * H + h
        weight = tl.load(weight_ptr + at, mask=used, other=0.0)
        query = tl.load(q_ptr + at[None, :] * D + tl.arange(0, D)[:, None], mask=used[None, :], other=0.0)
        for i in tl.range(tile, tile + count, num_stages=STAGES):
            # Moved on by an operation, since what is only handed on keeps the compiler from pipelining the loop.
            block, next0 = next0, tl.maximum(next1, -1)
            next1 = _block(table_ptr, sequence, i + 2, table_width, ROWS, BLOCK_N)
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
            first = (region + i).to(tl.int64) * BLOCK_N
            if QUERIES == 1:
                score = tl.sum(dots, 1) * factor
                tl.store(score_ptr + first + n, score, mask=(n >= 0) & (region + i < capacity))
            else:
                score = tl.sum(tl.reshape(dots, (BLOCK_N, QUERIES, HEADS)), 2) * factor[:, None]
                j = tl.arange(0, QUERIES)
                fits = (region + j * own + i < capacity) & (token + j < tokens)
                fits = fits & (tl.load(sequence_ptr + token + j, mask=token + j < tokens, other=-1) == sequence)
                to = first + (j * own)[None, :].to(tl.int64) * BLOCK_N + n[:, None]
                tl.store(score_ptr + to, score, mask=fits[None, :] & (n >= 0)[:, None])
        item += count
        token, sequence, tile, own, region = _segment(item, end, totals, tiles, sequence_ptr, TOKENS, QUERIES)
        next0 = _block(table_ptr, sequence, tile, table_width, ROWS, BLOCK_N)
        next1 = _block(table_ptr, sequence, tile + 1, table_width, ROWS, BLOCK_N)
