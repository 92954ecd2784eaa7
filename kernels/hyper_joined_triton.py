"""Both launches of hyper_connection_decode.py as one: programs that spread, and behind them programs that finish.

The latter ask for the words that the former store (hyper_await_triton.py): sums, and a copy of the streams. They wait
for programs in front of them only, which the hardware starts first, and which wait for none of this launch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated,misc"
# ruff: noqa: RUF005 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.hyper_arithmetic_triton import product
from kernels.hyper_await_triton import put, take
from kernels.hyper_spread_triton import TOKENS, spread_channels
from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
_TOKENS = tl.constexpr(TOKENS)
_STREAMS = tl.constexpr(4)
_COLUMNS = tl.constexpr(32)  # 4 for pre, 4 for post, 16 logits, and the squares twice


@triton.jit
def _low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _pack(low, high):
    """Return two float32 as bf16 values of a word, to nearest even."""
    if _PLAIN:
        low = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        high = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        word = (low & 65535) | (high << 16)
    else:
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _add_five(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _add_groups(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11):
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9, a10 + b10, a11 + b11
    )  # fmt: skip


@triton.jit
def _places(part_ptr, token, group, n, SUMS: tl.constexpr, ADDED: tl.constexpr, HALF: tl.constexpr):
    """Return where lane n of HALF finds its sums of four columns, ADDED after one another, and which there are."""
    at, wanted = (), ()
    for start in tl.static_range(0, SUMS, HALF):
        place = start + n
        for part in tl.static_range(ADDED):
            four = (token.to(tl.int64) * (_COLUMNS // 4) + group) * (SUMS * ADDED) + place * ADDED + part
            at = at + (part_ptr + four * 4,)
            wanted = wanted + ((place < SUMS).to(tl.int32),)
    return at, wanted


@triton.jit
def _total(words, COLUMN: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, ADDED: tl.constexpr):
    """Return the sum of a column over COUNT fours of words from FIRST on, the ADDED of a place first."""
    for i in tl.static_range(0, COUNT, ADDED):
        one = words[4 * (FIRST + i) + COLUMN].to(tl.float32, bitcast=True)
        for part in tl.static_range(1, ADDED):
            one += words[4 * (FIRST + i + part) + COLUMN].to(tl.float32, bitcast=True)
        if i == 0:
            total = one
        else:
            total += one
    return total


@triton.jit
def _collapse(
    token, x_ptr, part_ptr, copy_ptr, base_ptr, scale_ptr, norm_ptr, eps, norm_eps,
    H: tl.constexpr, SUMS: tl.constexpr, ADDED: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x = norm(sum_j pre[j] streams[j]) of one token, by E threads with eight channels each of every 8 E."""
    HALF: tl.constexpr = E // 2
    FOURS: tl.constexpr = (SUMS + HALF - 1) // HALF * ADDED
    CHUNKS: tl.constexpr = H // (8 * E)
    e = tl.arange(0, E)
    scale = tl.load(scale_ptr)
    base = ()
    for j in tl.static_range(_STREAMS):
        base = base + (tl.load(base_ptr + j),)
    gains = ()
    for i in tl.static_range(8 * CHUNKS):
        gains = gains + (tl.load(norm_ptr + (i // 8 * (8 * E) + i % 8) + e * 8),)
    # The first half of the threads has the products with pre's rows of fn, the other one the squares.
    at, wanted = _places(part_ptr, token, e // HALF * (_COLUMNS // 4 - 1), e % HALF, SUMS, ADDED, HALF)
    for j in tl.static_range(_STREAMS):
        for chunk in tl.static_range(CHUNKS):
            word = (token.to(tl.int64) * _STREAMS + j) * (H // 2) + chunk * (4 * E)
            at = at + (copy_ptr + word + e * 4,)
            wanted = wanted + (e * 0 + 1,)
    if PDL:  # an earlier launch may not have taken its words yet
        tl.extra.cuda.gdc_wait()
    words = take(at, wanted, FOURS + _STREAMS * CHUNKS)
    own = ()
    for column in tl.static_range(4):
        own = own + (tl.where(e < HALF, _total(words, column, 0, FOURS, ADDED), 0.0),)
    squares = tl.where(e < HALF, 0.0, _total(words, 0, 0, FOURS, ADDED))
    sums = tl.reduce((own[0], own[1], own[2], own[3], squares), 0, _add_five)
    rms = tl.rsqrt(sums[4] / (_STREAMS * H) + norm_eps)
    pre = ()
    for j in tl.static_range(_STREAMS):
        pre = pre + (tl.sigmoid(tl.fma(sums[j] * rms, scale, base[j])) + eps,)
    x, squares = (), tl.zeros((E,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        for i in tl.static_range(4):
            low, high = tl.zeros((E,), tl.float32), tl.zeros((E,), tl.float32)
            for j in tl.static_range(_STREAMS):
                word = words[4 * (FOURS + j * CHUNKS + chunk) + i]
                factor = tl.broadcast_to(pre[j], low.shape)
                low, high = tl.fma(factor, _low(word), low), tl.fma(factor, _high(word), high)
            word = _pack(low, high)
            x = x + (word,)
            squares += product(_low(word), _low(word))
            squares += product(_high(word), _high(word))
    factor = tl.rsqrt(tl.sum(squares, 0) / H + norm_eps)
    for chunk in tl.static_range(CHUNKS):
        four = ()
        for i in tl.static_range(4):
            word = x[4 * chunk + i]
            low = _low(word) * factor * gains[8 * chunk + 2 * i]
            four = four + (_pack(low, _high(word) * factor * gains[8 * chunk + 2 * i + 1]),)
        put(x_ptr + (token.to(tl.int64) * (H // 2) + chunk * (4 * E)) + e * 4, four)


@triton.jit
def _carry(
    token, carry_ptr, part_ptr, base_ptr, scale_ptr, norm_eps,
    H: tl.constexpr, SUMS: tl.constexpr, ADDED: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store what the next spread needs of one token: post [4], and the logits [4, 4] of C, in the order of columns."""
    HALF: tl.constexpr = E // 2
    FOURS: tl.constexpr = (SUMS + HALF - 1) // HALF * ADDED
    e = tl.arange(0, E)
    at, wanted = (), ()
    for i in tl.static_range(3):  # groups of four columns: 1, 3, 5 by the first half, 2, 4, 6 by the other one
        more, there = _places(part_ptr, token, 1 + 2 * i + e // HALF, e % HALF, SUMS, ADDED, HALF)
        at, wanted = at + more, wanted + there
    base, scale = (), ()
    for i in tl.static_range(3):
        group = 1 + 2 * i + e // HALF
        scale = scale + (tl.load(scale_ptr + tl.where(group == 1, 1, 2)),)
        for column in tl.static_range(4):
            base = base + (tl.load(base_ptr + 4 * group + column, mask=group < 6, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    words = take(at, wanted, 3 * FOURS)
    own = ()
    for i in tl.static_range(3):
        for column in tl.static_range(4):
            own = own + (tl.reshape(_total(words, column, i * FOURS, FOURS, ADDED), (2, HALF)),)
    sums = tl.reduce(own, 1, _add_groups)
    everywhere = ()
    for i in tl.static_range(12):
        everywhere = everywhere + (tl.reshape(tl.broadcast_to(sums[i][:, None], (2, HALF)), (E,)),)
    squares = tl.sum(tl.where(e == HALF, everywhere[8], 0.0), 0)  # the last group is that of the squares
    rms = tl.rsqrt(squares / (_STREAMS * H) + norm_eps)
    for i in tl.static_range(3):
        group = 1 + 2 * i + e // HALF
        for column in tl.static_range(4):
            value = tl.fma(everywhere[4 * i + column] * rms, scale[i], base[4 * i + column])
            value = tl.where(group == 1, 2.0 * tl.sigmoid(value), value)
            place = token.to(tl.int64) * (4 * (1 + _STREAMS)) + (group - 1) * 4 + column
            tl.store(carry_ptr + place, value, mask=(e % HALF == 0) & (group < 6))


@triton.jit
def joined_kernel(
    out_ptr, x_ptr, next_ptr, part_ptr, word_ptr, copy_ptr, copy_word_ptr, streams_ptr, token_stride, stream_stride,
    y_ptr, ids_ptr, rank_ptr, first_ptr, add_ptr, carry_ptr, fn_ptr, base_ptr, scale_ptr, norm_ptr, sequence_ptr,
    tokens, eps, mixer_eps, norm_eps,
    H: tl.constexpr, ITERS: tl.constexpr, W: tl.constexpr, C: tl.constexpr, L: tl.constexpr, TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs that spread, then one a token that collapses, then one a token that makes the carry, W warps each.

    part, copy: scratch for sums and streams, full of NONE before and after; word_ptr, copy_word_ptr: the same as int32.
    x: bf16, by words.   next: the new carry.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SUMS: tl.constexpr = H // 32
    ADDED: tl.constexpr = 2 // L
    E: tl.constexpr = W * 32
    blocks = (tokens + _TOKENS * (W // C) - 1) // (_TOKENS * (W // C))
    programs = blocks * (H // (16 * L * C))
    program = tl.program_id(0)
    waiter = program - programs
    if waiter < 0:
        spread_channels(
            program % blocks, program // blocks, out_ptr, copy_ptr, part_ptr, streams_ptr, token_stride, stream_stride,
            y_ptr, ids_ptr, rank_ptr, first_ptr, add_ptr, carry_ptr, fn_ptr, sequence_ptr, tokens, eps,
            H, _STREAMS, 24, ITERS, _COLUMNS, W, C, L, True, TOP_K, PDL,
        )  # fmt: skip
    elif waiter < tokens:
        _collapse(
            waiter, x_ptr, word_ptr, copy_word_ptr, base_ptr, scale_ptr, norm_ptr, mixer_eps, norm_eps,
            H, SUMS, ADDED, E, PDL,
        )  # fmt: skip
    else:
        _carry(waiter - tokens, next_ptr, word_ptr, base_ptr, scale_ptr, norm_eps, H, SUMS, ADDED, E, PDL)
