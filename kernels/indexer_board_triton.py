"""Shared memory that the threads of a program write for each other by hand: counts of bins, a short list, one finding.

Triton's own histogram asks all lanes for every bit of a bin and counts each bin in a register; that is too slow for
the thousand bins that leave few entries of a bin in doubt. Here a thread adds to a bin where it lies. The order in
which threads come makes no difference: counts are integers, and nobody may ask for a list's order.

A board has counts, a ticket, two findings and the extremes of four words each, and a list of LIST values. Triton does
not know of it: between writing and reading there must be a barrier, and it is said at each function who has one. In
the interpreter there is no board, and functions give the same from tensors.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

LIST = tl.constexpr(64)
MOST_BINS = 2048
NO_BIN = tl.constexpr(MOST_BINS + 1)
PLAIN = tl.constexpr(INTERPRETED)

_FINDINGS = tl.constexpr(MOST_BINS + 4)  # after the counts and the ticket
_KEYS = tl.constexpr(MOST_BINS + 16)
_TICKET = tl.constexpr(4 * MOST_BINS)
_BOARD = tl.constexpr(f"{{ .shared .align 16 .b32 board[{MOST_BINS + 16 + 64}]; mov.u32 $0, board; }}")
_EXTREMES = tl.constexpr(4 * MOST_BINS + 48)
# Of four values of each thread the least and the greatest as keys, and how many count: one atomic operation a warp.
_WIDEN = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 a, b, c, m;
    min.f32 a, $8, $9;
    min.f32 b, $10, $11;
    min.f32 a, a, b;
    add.f32 a, a, 0f00000000;
    shr.s32 m, a, 31;
    and.b32 m, m, 0x7FFFFFFF;
    xor.b32 a, a, m;
    redux.sync.min.s32 a, a, 0xFFFFFFFF;
    max.f32 b, $12, $13;
    max.f32 c, $14, $15;
    max.f32 b, b, c;
    add.f32 b, b, 0f00000000;
    shr.s32 m, b, 31;
    and.b32 m, m, 0x7FFFFFFF;
    xor.b32 b, b, m;
    redux.sync.max.s32 b, b, 0xFFFFFFFF;
    add.s32 c, $16, $17;
    add.s32 c, c, $18;
    add.s32 c, c, $19;
    redux.sync.add.s32 c, c, 0xFFFFFFFF;
    mov.u32 m, %laneid;
    setp.eq.u32 p, m, 0;
    @p red.shared.min.s32 [$4], a;
    @p red.shared.max.s32 [$4 + 4], b;
    @p red.shared.add.u32 [$4 + 8], c;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
}""")
_OF_WIDEN = tl.constexpr("=r,=r,=r,=r,r,r,r,r" + ",f,f,f,f" * 2 + ",r,r,r,r")
_START = tl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $4}; mov.b32 $0, $4;")
_CLEAR = tl.constexpr("{ st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, $2; }")
# Those without a bin count in a word that nobody reads: that is quicker than to ask each value.
_ADD = tl.constexpr(f"""{{
    .reg .b32 place;
    min.u32 place, $2, {MOST_BINS + 1};
    mad.lo.u32 place, place, 4, $1;
    red.shared.add.u32 [place], 1;
    mov.b32 $0, 0;
}}""")
_NOTE = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 place;
    setp.eq.s32 p, $3, $4;
    @p atom.shared.add.u32 place, [$1], 1;
    @p mad.lo.u32 place, place, 4, $1;
    @p st.shared.b32 [place + 64], $2;
    mov.b32 $0, 0;
}""")
_TELL = tl.constexpr("""{
    .reg .pred p;
    setp.ne.s32 p, $5, 0;
    @p st.shared.v4.b32 [$1], {$2, $3, $4, $4};
    mov.b32 $0, 0;
}""")
_STORE = tl.constexpr("""{
    .reg .pred p;
    .reg .b64 place;
    setp.ne.s32 p, $4, 0;
    mad.wide.u32 place, $2, 4, $1;
    @p st.global.b32 [place], $3;
    mov.b32 $0, 0;
}""")
_FOUR = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_ONE = tl.constexpr("ld.shared.b32 $0, [$1];")
_NAN = tl.constexpr(0x7FC00000)
_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def board_of(program):
    """Return the address of the program's board. Call it once."""
    if PLAIN:
        board = program
    else:
        board = tl.inline_asm_elementwise(_BOARD, "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1)
    return board


@triton.jit
def start(board, BINS: tl.constexpr):
    """Make the board ready for `extremes` and for a first round of counting. Has a barrier behind it."""
    if not PLAIN:
        tl.inline_asm_elementwise(
            _START, "=r,r,r,r,r", [board + _EXTREMES, _MOST, _LEAST, 0], dtype=tl.int32, is_pure=False, pack=1
        )
        keys = board + 4 * _KEYS + 16 * tl.arange(0, LIST // 4)
        least = tl.full((LIST // 4,), _NAN, tl.int32)
        tl.inline_asm_elementwise(_CLEAR, "=r,r,r", [keys, least], dtype=tl.int32, is_pure=False, pack=1)
    clear(board, BINS)


@triton.jit
def clear(board, BINS: tl.constexpr):
    """Put counts and the ticket back to zero. Has a barrier behind it."""
    if not PLAIN:
        quarter = tl.arange(0, BINS // 4)
        zero = tl.zeros((BINS // 4,), tl.int32)
        tl.inline_asm_elementwise(_CLEAR, "=r,r,r", [board + 16 * quarter, zero], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(_CLEAR, "=r,r,r", [board + _TICKET, 0], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def key_of(x):
    """Return integers that order like x, zeros of either sign alike; x is not NaN."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _LEAST, 0, bits)
    return bits ^ ((bits >> 31) & _MOST)


@triton.jit
def extremes(board, least, most, count):
    """Return the keys of the least of floats `least` and of the greatest of `most`, and the sum of counts.

    No NaN; as many as four times the threads, or more. Has a barrier inside.
    """
    if PLAIN:
        lo, hi, total = key_of(tl.min(least, 0)), key_of(tl.max(most, 0)), tl.sum(count, 0)
    else:
        at = board + _EXTREMES
        tl.inline_asm_elementwise(_WIDEN, _OF_WIDEN, [at, least, most, count], dtype=tl.int32, is_pure=False, pack=4)
        tl.debug_barrier()
        lo, hi, total, _ = tl.inline_asm_elementwise(
            _FOUR, "=r,=r,=r,=r,r", [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )
    return lo, hi, total


@triton.jit
def add(board, counts, bins, BINS: tl.constexpr):
    """Add to the bins of values, and return counts [BINS], which the interpreter carries. NO_BIN and above: none."""
    if PLAIN:
        counts += tl.histogram(tl.where(bins < BINS, bins, 0), BINS, mask=bins < BINS)
    else:
        tl.inline_asm_elementwise(_ADD, "=r,r,r", [board, bins], dtype=tl.int32, is_pure=False, pack=1)
    return counts


@triton.jit
def find(board, counts, need, BINS: tl.constexpr):
    """Return (the first bin with `need` or more values in it and before it, how many before it, how many in it).

    Has barriers before it and inside.
    """
    quarter = tl.arange(0, BINS // 4)
    if PLAIN:
        even, odd = tl.split(tl.reshape(counts, (BINS // 4, 2, 2)))
        h0, h2 = tl.split(even)
        h1, h3 = tl.split(odd)
    else:
        tl.debug_barrier()
        h0, h1, h2, h3 = tl.inline_asm_elementwise(
            _FOUR, "=r,=r,=r,=r,r", [board + 16 * quarter], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    mine = h0 + h1 + h2 + h3
    end = tl.cumsum(mine, 0)
    p0 = end - mine
    p1, p2, p3 = p0 + h0, p0 + h0 + h1, end - h3
    is_home = (p0 < need) & (end >= need)
    j = (p1 < need).to(tl.int32) + (p2 < need).to(tl.int32) + (p3 < need).to(tl.int32)
    before = tl.where(j < 2, tl.where(j == 0, p0, p1), tl.where(j == 2, p2, p3))
    count = tl.where(j < 2, tl.where(j == 0, h0, h1), tl.where(j == 2, h2, h3))
    return tell(board, 0, 4 * quarter + j, before, count, is_home)


@triton.jit
def tell(board, turn, a, b, c, is_home):
    """Return a, b and c of where is_home is true: there is one, or all are alike. Has a barrier inside.

    turn: 0 and 1 if it is called again without a barrier between.
    """
    if PLAIN:
        x = tl.max(tl.where(is_home, a, _LEAST), 0)
        y = tl.max(tl.where(is_home, b, _LEAST), 0)
        z = tl.max(tl.where(is_home, c, _LEAST), 0)
    else:
        to = board + 4 * _FINDINGS + 16 * turn
        tl.inline_asm_elementwise(
            _TELL, "=r,r,r,r,r,r", [to, a, b, c, is_home.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        x, y, z, _ = tl.inline_asm_elementwise(
            _FOUR, "=r,=r,=r,=r,r", [to], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )
    return x, y, z


@triton.jit
def note(board, keys, listed, x, bins, home):
    """Put the values in bin `home` on the list, in any order; return (keys [LIST], listed), as the interpreter has it.

    listed: how many are on it.
    """
    if PLAIN:
        inside = bins == home
        place = listed + tl.cumsum(inside.to(tl.int32), 0) - 1
        is_here = (place[None, :] == tl.arange(0, LIST)[:, None]) & inside[None, :]
        keys = tl.maximum(keys, tl.max(tl.where(is_here, key_of(x)[None, :], _LEAST), 1))
        listed += tl.sum(inside.to(tl.int32), 0)
    else:
        tl.inline_asm_elementwise(
            _NOTE, "=r,r,f,r,r", [board + _TICKET, x, bins, home], dtype=tl.int32, is_pure=False, pack=1
        )
    return keys, listed


@triton.jit
def nth_listed(board, keys, listed, need):
    """Return (the key on the list of which `need` are as great or greater, how many are greater).

    Has barriers before it and inside.
    """
    i = tl.arange(0, LIST)
    greater = tl.zeros((LIST,), tl.int32)
    as_great = tl.zeros((LIST,), tl.int32)
    if PLAIN:
        mine = keys
        greater += tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
        as_great += tl.sum((keys[None, :] >= keys[:, None]).to(tl.int32), 1)
    else:
        tl.debug_barrier()
        at = board + 4 * _KEYS
        x = tl.inline_asm_elementwise(_ONE, "=f,r", [at + 4 * i], dtype=tl.float32, is_pure=False, pack=1)
        for _ in range(0, listed, 4):
            a, b, c, d = tl.inline_asm_elementwise(
                _FOUR, "=f,=f,=f,=f,r", [at], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False,
                pack=1,
            )  # fmt: skip
            greater += (a > x).to(tl.int32) + (b > x).to(tl.int32)
            greater += (c > x).to(tl.int32) + (d > x).to(tl.int32)
            as_great += (a >= x).to(tl.int32) + (b >= x).to(tl.int32)
            as_great += (c >= x).to(tl.int32) + (d >= x).to(tl.int32)
            at += 16
        mine = key_of(x)
    key, before, _ = tell(board, 1, mine, greater, greater, (i < listed) & (greater < need) & (as_great >= need))
    return key, before


@triton.jit
def scatter(pointer, place, value, inside):
    """Store 4-byte values that are inside, so many places behind the pointer, from the threads that have them.

    tl.store would hand them over to other threads first, through shared memory, in the hope of longer runs.
    """
    if PLAIN:
        tl.store(pointer + place, value, mask=inside)
    else:
        tl.inline_asm_elementwise(
            _STORE, "=r,l,r,r,r",
            [pointer.to(tl.int64), place, value.to(tl.int32, bitcast=True), inside.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
