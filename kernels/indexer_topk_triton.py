"""The best k of each row of scores, in Triton; indexer_decode.py has the rules.

Scores are compared as integers that order like them. A threshold is searched between the least and the greatest of a
row: eight pivots a pass, five that part the values evenly and three that quarter the integers, so that a pass leaves at
most a quarter of these: no more than 16 passes, six for scores as they come. The search ends where k entries lie at or
above the lower end, or where all that is in doubt is equal; then the lowest of them are taken. One more pass writes
the entries in ascending order.

A row of more than CHUNK scores is cut: each part's best k are noted, and the program that finishes last among a row's
parts takes the best of those.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.indexer_triton import regions
from kernels.triton_env import INTERPRETED

INTEGERS = ["row_stride", "tokens", "capacity"]

_PLAIN = tl.constexpr(INTERPRETED)
_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(0x7F800000)
_BAD = tl.constexpr(1 << 20)  # in a counter of parts: more than a row has


@triton.jit
def _key(x):
    """Return integers that order like x, zeros of either sign alike; the least one for NaN and -inf."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _LEAST, 0, bits)
    return tl.where(x > -float("inf"), bits ^ ((bits >> 31) & _MOST), _LEAST)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & _MOST)).to(tl.float32, bitcast=True)


@triton.jit
def _even(lo, hi, j: tl.constexpr):
    """Return the key at j sixths of the values between lo and hi, inside of them."""
    first, last = _value(lo), _value(hi - 1)
    bits = (first + (last - first) * (j / 6.0)).to(tl.int32, bitcast=True)
    return _inside(bits ^ ((bits >> 31) & _MOST), lo, hi)


@triton.jit
def _inside(key, lo, hi):
    return tl.minimum(tl.maximum(key, lo + 1), hi - 1)


@triton.jit
def _read(value_ptr, i, n, PADDED: tl.constexpr, FRESH: tl.constexpr):
    """Return values i of n, -inf beyond. PADDED: what fills 16 of them may be read; then loads can be 16 bytes wide."""
    end = (n + 15) // 16 * 16 if PADDED else n
    if FRESH:  # written by other programs of this launch
        x = tl.load(value_ptr + i, mask=i < end, other=-float("inf"), cache_modifier=".cg")
    else:
        x = tl.load(value_ptr + i, mask=i < end, other=-float("inf"))
    return tl.where(i < n, x, -float("inf")) if PADDED else x


@triton.jit
def _count(count, x, key):
    """Return count, and one more where x is at least the value of a key: as floats, two instructions each."""
    pivot = _value(key)
    if _PLAIN:
        count += (x >= pivot).to(tl.int32)
    else:
        count = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.f32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $0, 1; }",
            "=r,r,r,r", [count, x, pivot], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return count


@triton.jit
def _search(value_ptr, n, K: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, FRESH: tl.constexpr):
    """Return (lo, hi, need, is_finite): the best K of n values are those from hi on and `need` of those from lo on."""
    least = tl.full((TILE,), _MOST, tl.int32)
    most = tl.full((TILE,), _LEAST, tl.int32)
    valid = tl.zeros((TILE,), tl.int32)
    for start in range(0, n, TILE):
        key = _key(_read(value_ptr, start + tl.arange(0, TILE), n, PADDED, FRESH))
        least = tl.minimum(least, tl.where(key > _LEAST, key, _MOST))
        most = tl.maximum(most, key)
        valid += (key > _LEAST).to(tl.int32)
    lo, top, above_lo = tl.min(least, 0), tl.max(most, 0), tl.sum(valid, 0)
    is_finite = (above_lo == n) & (top < _INFINITY)
    hi = top + 1  # with no value at all, nothing is taken either way
    above_hi = 0
    f = tl.arange(0, 8)
    j = ((f & 1) << 2) | (f & 2) | (f >> 2)  # where the joins below put them
    while (above_lo > K) & (hi > lo + 1):
        mid = (lo >> 1) + (hi >> 1)
        p0, p1, p2, p3, p4 = _even(lo, hi, 1), _even(lo, hi, 2), _even(lo, hi, 3), _even(lo, hi, 4), _even(lo, hi, 5)
        p5 = _inside((lo >> 1) + (mid >> 1), lo, hi)
        p6 = _inside(mid, lo, hi)
        p7 = _inside((mid >> 1) + (hi >> 1), lo, hi)
        c0 = tl.zeros((TILE,), tl.int32)
        c1, c2, c3, c4, c5, c6, c7 = c0, c0, c0, c0, c0, c0, c0
        for start in range(0, n, TILE):
            x = _read(value_ptr, start + tl.arange(0, TILE), n, PADDED, FRESH)
            c0 = _count(c0, x, p0)
            c1 = _count(c1, x, p1)
            c2 = _count(c2, x, p2)
            c3 = _count(c3, x, p3)
            c4 = _count(c4, x, p4)
            c5 = _count(c5, x, p5)
            c6 = _count(c6, x, p6)
            c7 = _count(c7, x, p7)
        low = tl.join(tl.join(c0, c1), tl.join(c2, c3))
        high = tl.join(tl.join(c4, c5), tl.join(c6, c7))
        count = tl.sum(tl.reshape(tl.join(low, high), (TILE, 8)), 0)
        pivot = tl.where(j < 2, tl.where(j == 0, p0, p1), tl.where(j == 2, p2, p3))
        pivot = tl.where(j < 4, pivot, tl.where(j < 6, tl.where(j == 4, p4, p5), tl.where(j == 6, p6, p7)))
        is_enough = count >= K
        lo = tl.max(tl.where(is_enough, pivot, lo), 0)
        hi = tl.min(tl.where(is_enough, hi, pivot), 0)
        above_lo = tl.min(tl.where(is_enough, count, above_lo), 0)
        above_hi = tl.max(tl.where(is_enough, above_hi, count), 0)
    return lo, hi, K - above_hi, is_finite


@triton.jit
def _write(
    value_ptr, id_ptr, n, first, lo, hi, need, out_value_ptr, out_ptr,
    K: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Write what _search found, in order: numbers `first` on or those of id_ptr, values too if wanted; then padding."""
    above_before, among_before = 0, 0
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        key = _key(_read(value_ptr, i, n, PADDED, FRESH))
        is_above = key >= hi
        is_among = (key >= lo) & (key < hi) & (key > _LEAST)
        both = is_above.to(tl.int32) | (is_among.to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        among = among_before + (before >> 16)
        place = above_before + (before & 0xFFFF) + tl.minimum(among, need)
        taken = is_above | (is_among & (among < need))
        number = first + i if id_ptr is None else tl.load(id_ptr + i, mask=taken, other=-1, cache_modifier=".cg")
        tl.store(out_ptr + place, number, mask=taken)
        if out_value_ptr is not None:
            tl.store(out_value_ptr + place, _value(key), mask=taken)
        total = tl.sum(both, 0)
        above_before += total & 0xFFFF
        among_before += total >> 16
    count = above_before + tl.minimum(among_before, need)
    p = tl.arange(0, KP)
    tl.store(out_ptr + p, tl.full((KP,), -1, tl.int32), mask=(p >= count) & (p < K))
    if out_value_ptr is not None:
        tl.store(out_value_ptr + p, tl.full((KP,), float("nan"), tl.float32), mask=(p >= count) & (p < K))


@triton.jit(do_not_specialize=INTEGERS)
def top_k_kernel(
    score_ptr, lengths_ptr, out_ptr, sound_ptr, part_value_ptr, part_id_ptr, counter_ptr,
    positions_ptr, sequence_ptr, query_start_ptr, row_stride, tokens, capacity,
    K: tl.constexpr, KP: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs take the parts of all rows in turn. out [T, K] int32; sound [T] int8.

    lengths_ptr: rows of `row_stride` scores (PADDED: of 16 times that, and 16 bytes aligned), so many of them count;
    None: scores as logits_kernel leaves them, and a token that sees no more than K entries takes them all.
    KP: a power of two, at least K.
    part_value, part_id [parts, K].   counter [T]: zeros, and zeros again at the end.
    """
    t = tl.arange(0, TOKENS)
    if lengths_ptr is not None:
        if PDL:
            tl.extra.cuda.gdc_wait()
        lengths = tl.load(lengths_ptr + t, mask=t < tokens, other=0)
        begins = t
        is_scored = t >= 0
        fits = t >= 0
    else:
        lengths, tiles, _ = regions(
            positions_ptr, sequence_ptr, query_start_ptr, tokens, TOKENS, QUERIES, RATIO, K, BLOCK_N
        )
        ends = tl.cumsum(tiles, 0)
        begins = ends - tiles
        fits = ends <= capacity
        is_scored = (lengths > K) & fits
    parts = tl.where(is_scored, tl.maximum((lengths + (CHUNK - 1)) // CHUNK, 1), 1)
    parts = tl.where(t < tokens, parts, 0)
    totals = tl.cumsum(parts, 0)
    total = tl.sum(parts, 0)
    state = tl.where(is_scored, 2, tl.where((lengths <= K) | fits, 1, 0))  # to be searched, all taken, not scored
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.arange(0, KP)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        before = totals <= item
        token = tl.sum(before.to(tl.int32), 0)
        base = tl.max(tl.where(before, totals, 0), 0)
        own = t == token
        length = tl.sum(tl.where(own, lengths, 0), 0)
        begin = tl.sum(tl.where(own, begins, 0), 0).to(tl.int64)
        count = tl.sum(tl.where(own, parts, 0), 0)
        kind = tl.sum(tl.where(own, state, 0), 0)
        out = out_ptr + token.to(tl.int64) * K
        if kind < 2:
            taken = tl.where(kind == 1, length, 0)
            tl.store(out + p, tl.where(p < taken, p, -1), mask=p < K)
            tl.store(sound_ptr + token, kind.to(tl.int8))
        else:
            part = item - base
            first = part * CHUNK
            n = tl.minimum(length - first, CHUNK)
            if lengths_ptr is not None:
                values = score_ptr + begin * row_stride * (16 if PADDED else 1) + first
            else:
                values = score_ptr + begin * BLOCK_N + first
            lo, hi, need, is_finite = _search(values, n, K, TILE, PADDED, False)
            if count == 1:
                _write(values, None, n, 0, lo, hi, need, None, out, K, KP, TILE, PADDED, False)
                tl.store(sound_ptr + token, is_finite.to(tl.int8))
            else:
                to = (base + part).to(tl.int64) * K
                _write(
                    values,
                    None,
                    n,
                    first,
                    lo,
                    hi,
                    need,
                    part_value_ptr + to,
                    part_id_ptr + to,
                    K,
                    KP,
                    TILE,
                    PADDED,
                    False,
                )
                # All of this part is written; the count releases it and acquires the others'.
                tl.debug_barrier()
                mine = tl.where(is_finite, 1, 1 + _BAD)
                done = tl.atomic_add(counter_ptr + token, mine, sem="acq_rel", scope="gpu") + mine
                if done % _BAD == count:
                    tl.store(counter_ptr + token, 0)  # for the next launch
                    values = part_value_ptr + base.to(tl.int64) * K
                    ids = part_id_ptr + base.to(tl.int64) * K
                    lo, hi, need, is_finite = _search(values, count * K, K, TILE, False, True)
                    _write(values, ids, count * K, 0, lo, hi, need, None, out, K, KP, TILE, False, True)
                    tl.store(sound_ptr + token, (done < _BAD).to(tl.int8))
