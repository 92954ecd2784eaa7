"""The best k of each row of scores, in Triton; indexer_decode.py has the rules.

The k-th best score is looked for, and how many of its equals are taken. Scores are counted in bins that part the values
between the least and the greatest evenly; the bin of the k-th best leaves a handful in doubt, which are listed and
ranked. If they are too many, bins part what is in doubt again, now evenly as integers that order like scores, as often
as need be: one such round leaves a 2^-8th of the integers at most, so there are no more than four. Then one more pass
writes the entries in ascending order. A row comes from memory once: its first reading brings it into the L1 cache.

A row of more than CHUNK scores is cut: each part's best k are noted, and the program that finishes last among a row's
parts takes the best of those.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.indexer_board_triton import (
    LIST,
    NO_BIN,
    PLAIN,
    add,
    board_of,
    clear,
    extremes,
    find,
    key_of,
    note,
    nth_listed,
    scatter,
    start,
    tell,
)
from kernels.indexer_triton import regions

INTEGERS = ["row_stride", "tokens", "capacity"]

UNSEEN = 2**31 - 1  # an entry that no token sees, as the first of an unsound row

_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
_UNSEEN = tl.constexpr(UNSEEN)
_INFINITY = tl.constexpr(0x7F800000)
_BAD = tl.constexpr(1 << 20)  # in a counter of parts: more than a row has
_SECTOR = tl.constexpr(8)  # scores that memory gives at once


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & _MOST)).to(tl.float32, bitcast=True)


@triton.jit
def _read(value_ptr, i, n, PADDED: tl.constexpr):
    """Return values i of n, NaN beyond. PADDED: what fills 16 of them may be read; then loads can be 16 bytes wide."""
    end = (n + 15) // 16 * 16 if PADDED else n
    x = tl.load(value_ptr + i, mask=i < end, other=float("nan"))
    return tl.where(i < n, x, float("nan")) if PADDED else x


@triton.jit
def _lesser(a, b):
    """Return the lesser one, a if b is NaN."""
    return tl.where(b < a, b, a) if PLAIN else tl.minimum(a, b)


@triton.jit
def _greater(a, b):
    """Return the greater one, a if b is NaN."""
    return tl.where(b > a, b, a) if PLAIN else tl.maximum(a, b)


@triton.jit
def _place(x, lo, hi, is_even, scale, shift):
    """Return the bins of values with keys from lo to hi, highest first: higher values, no later bins.

    Others have NO_BIN or a greater number.
    is_even: as even parts of the values, of which `scale` are in a unit; none is above hi, and -inf is the only one
    below lo. Else as parts of 2^shift keys.
    """
    if is_even:
        # To the nearest; infinities and NaN are far beyond.
        place = tl.fma(_value(hi) - x, scale, 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    else:
        key = key_of(x)
        inside = (x > -float("inf")) & (key >= lo) & (key <= hi)
        place = ((hi - key).to(tl.uint32, bitcast=True) >> shift).to(tl.int32)
        place = tl.where(inside, place, NO_BIN)
    return place


@triton.jit
def _extremes(value_ptr, n, board, TILE: tl.constexpr, PADDED: tl.constexpr):
    """Return keys of the least and the greatest of n values, NaN aside, and how many are not NaN or -inf."""
    i = tl.arange(0, TILE)
    least = tl.full((TILE,), float("inf"), tl.float32)
    most = tl.full((TILE,), -float("inf"), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    # One value of every sector, so that a long row is on its way at once.
    for first in range(0, tl.where(n > TILE, n, 0), TILE * _SECTOR):
        at = first + i * _SECTOR
        most = _greater(most, tl.load(value_ptr + at, mask=at < n, other=float("nan")))
    for first in range(0, n, TILE):
        x = _read(value_ptr, first + i, n, PADDED)
        least, most = _lesser(least, x), _greater(most, x)
        count += (x > -float("inf")).to(tl.int32)
    return extremes(board, least, most, count)


@triton.jit
def _wider(least_a, most_a, least_b, most_b):
    return tl.minimum(least_a, least_b), tl.maximum(most_a, most_b)


@triton.jit
def _extremes_of_bin(
    value_ptr, n, lo, hi, is_even, scale, shift, home, TILE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Return the least and the greatest key of the values in bin `home`."""
    least = tl.full((TILE,), _MOST, tl.int32)
    most = tl.full((TILE,), _LEAST, tl.int32)
    for first in range(0, n, TILE):
        x = _read(value_ptr, first + tl.arange(0, TILE), n, PADDED)
        inside = _place(x, lo, hi, is_even, scale, shift) == home
        key = key_of(x)
        least = tl.minimum(least, tl.where(inside, key, _MOST))
        most = tl.maximum(most, tl.where(inside, key, _LEAST))
    return tl.reduce((least, most), 0, _wider)


@triton.jit
def _nth_of_bin(
    value_ptr, n, lo, hi, is_even, scale, shift, home, count, need, board, TILE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Return (the key of the need-th greatest of the `count` in bin `home`, how many are greater); LIST at most."""
    keys = tl.full((LIST,), _LEAST, tl.int32)
    listed = 0
    for first in range(0, n, TILE):
        x = _read(value_ptr, first + tl.arange(0, TILE), n, PADDED)
        bins = _place(x, lo, hi, is_even, scale, shift)
        keys, listed = note(board, keys, listed, x, bins, home)
    return nth_listed(board, keys, count, need)


@triton.jit
def _search(value_ptr, n, board, K: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """Return (bar, need, taken, is_finite): of n values those above the bar and the first `need` equal to it are taken.

    The board has been made ready.
    """
    lo, hi, valid = _extremes(value_ptr, n, board, TILE, PADDED)
    is_finite = (valid == n) & (hi < _INFINITY)
    taken = tl.minimum(valid, K)
    is_full = valid > K
    need = tl.where(is_full, K, 0)
    hi = tl.where(is_full, hi, lo)
    span = _value(hi) - _value(lo)
    is_even = (span > 1e-30) & (span < 1e38)
    scale = (BINS - 1) / span
    while lo < hi:
        shift = 0
        if not is_even:
            between = (hi - lo).to(tl.uint32, bitcast=True)
            while (between >> shift) >= BINS:
                shift += 1
        counts = tl.zeros((BINS,), tl.int32) if PLAIN else 0
        for first in range(0, n, TILE):
            x = _read(value_ptr, first + tl.arange(0, TILE), n, PADDED)
            counts = add(board, counts, _place(x, lo, hi, is_even, scale, shift), BINS)
        home, before, count = find(board, counts, need, BINS)
        need -= before
        if count <= LIST:
            lo, before = _nth_of_bin(
                value_ptr, n, lo, hi, is_even, scale, shift, home, count, need, board, TILE, PADDED
            )
            hi = lo
            need -= before
        else:
            lo, hi = _extremes_of_bin(value_ptr, n, lo, hi, is_even, scale, shift, home, TILE, PADDED)
            is_even = n < 0
            clear(board, BINS)
    return tl.where(is_full, _value(lo), -float("inf")), need, taken, is_finite


@triton.jit
def _write(
    value_ptr, id_ptr, n, first, bar, need, taken, board, out_value_ptr, out_ptr,
    K: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write what _search found, in order: numbers `first` on or those of id_ptr, values too if wanted; then padding."""
    p = tl.arange(0, KP)
    tl.store(out_ptr + p, tl.full((KP,), -1, tl.int32), mask=(p >= taken) & (p < K))
    if out_value_ptr is not None:
        tl.store(out_value_ptr + p, tl.full((KP,), float("nan"), tl.float32), mask=(p >= taken) & (p < K))
    above_before, among_before, turn = 0, 0, 0
    for begin in range(0, n, TILE):
        i = begin + tl.arange(0, TILE)
        x = _read(value_ptr, i, n, PADDED)
        number = first + i if id_ptr is None else tl.load(id_ptr + i, mask=i < n, other=-1)
        is_above = x > bar
        is_among = x == bar
        both = is_above.to(tl.int32) | (is_among.to(tl.int32) << 16)
        end = tl.cumsum(both, 0)
        before = end - both
        among = among_before + (before >> 16)
        place = above_before + (before & 0xFFFF) + tl.minimum(among, need)
        kept = is_above | (is_among & (among < need))
        scatter(out_ptr, place, number, kept)
        if out_value_ptr is not None:
            scatter(out_value_ptr, place, x, kept)
        if begin + TILE < n:
            total, _b, _c = tell(board, turn, end, end, end, i == begin + TILE - 1)
            turn = 1 - turn
            above_before += total & 0xFFFF
            among_before += total >> 16


@triton.jit
def _conclude(
    value_ptr, id_ptr, n, bar, need, taken, is_sound, board, out_ptr, sound_ptr, token,
    K: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write a token's row, and whether it is sound; without a place for that, an unsound row names what nobody sees."""
    if sound_ptr is not None:
        _write(value_ptr, id_ptr, n, 0, bar, need, taken, board, None, out_ptr, K, KP, TILE, PADDED)
        tl.store(sound_ptr + token, is_sound.to(tl.int8))
    else:
        if is_sound:
            _write(value_ptr, id_ptr, n, 0, bar, need, taken, board, None, out_ptr, K, KP, TILE, PADDED)
        else:
            p = tl.arange(0, KP)
            tl.store(out_ptr + p, tl.where(p == 0, _UNSEEN, -1), mask=p < K)


@triton.jit
def _own(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _parts(lengths, begins, IN_ROWS: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr):
    """Return (parts of tokens, what is done with them: 2 searched, 1 all taken, 0 not scored for want of room)."""
    is_searched = begins >= 0
    if not IN_ROWS:
        is_searched = is_searched & (lengths > K)
    parts = tl.where(is_searched, tl.maximum((lengths + (CHUNK - 1)) // CHUNK, 1), 1)
    return parts, tl.where(is_searched, 2, tl.where((lengths <= K) | (begins >= 0), 1, 0))


@triton.jit
def _item(
    item, lengths, begins, totals, tokens,
    IN_ROWS: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return of a part its token, the parts before the token's, then the token's length, begin, parts and state."""
    t = tl.arange(0, TOKENS)
    parts, state = _parts(lengths, begins, IN_ROWS, K, CHUNK)
    own = (totals > item) & (totals - parts <= item) & (t < tokens)
    return tl.reduce(
        (
            tl.where(own, t, 0), tl.where(own, totals - parts, 0), tl.where(own, lengths, 0), tl.where(own, begins, 0),
            tl.where(own, parts, 0), tl.where(own, state, 0),
        ), 0, _own,
    )  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def top_k_kernel(
    score_ptr, lengths_ptr, out_ptr, sound_ptr, part_value_ptr, part_id_ptr, counter_ptr,
    positions_ptr, sequence_ptr, query_start_ptr, row_stride, tokens, capacity,
    K: tl.constexpr, KP: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs take the parts of all rows in turn. out [T, K] int32; sound [T] int8, or None.

    lengths_ptr: rows of `row_stride` scores (PADDED: of 16 times that, and 16 bytes aligned), so many of them count;
    None: scores as logits_kernel leaves them, and a token that sees no more than K entries takes them all.
    KP: a power of two, at least K.   TILE: at least four times the threads.
    part_value, part_id [parts, K].   counter [T]: zeros, and zeros again at the end.
    """
    t = tl.arange(0, TOKENS)
    if lengths_ptr is not None:
        lengths = tl.load(lengths_ptr + t, mask=t < tokens, other=0)
        begins = t
    else:
        lengths, tiles, _is_first = regions(
            positions_ptr, sequence_ptr, query_start_ptr, tokens, TOKENS, QUERIES, RATIO, K, BLOCK_N
        )
        ends = tl.cumsum(tiles, 0)
        begins = tl.where(ends <= capacity, ends - tiles, -1)
    IN_ROWS: tl.constexpr = lengths_ptr is not None
    parts, _state = _parts(lengths, begins, IN_ROWS, K, CHUNK)
    totals = tl.cumsum(tl.where(t < tokens, parts, 0), 0)
    total = tl.max(totals, 0)
    board = board_of(tl.program_id(0))
    start(board, BINS)
    item = tl.program_id(0)
    found = _item(item, lengths, begins, totals, tokens, IN_ROWS, K, CHUNK, TOKENS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.arange(0, KP)
    while item < total:
        token, base, length, place, count, kind = found
        begin = place.to(tl.int64)
        out = out_ptr + token.to(tl.int64) * K
        if kind < 2:
            entry = tl.where(p < tl.where(kind == 1, length, 0), p, -1)
            if sound_ptr is None:
                entry = tl.where((p == 0) & (kind == 0), _UNSEEN, entry)
            else:
                tl.store(sound_ptr + token, kind.to(tl.int8))
            tl.store(out + p, entry, mask=p < K)
        else:
            part = item - base
            first = part * CHUNK
            n = tl.minimum(length - first, CHUNK)
            if lengths_ptr is not None:
                values = score_ptr + begin * row_stride * (16 if PADDED else 1) + first
            else:
                values = score_ptr + begin * BLOCK_N + first
            bar, need, taken, is_finite = _search(values, n, board, K, BINS, TILE, PADDED)
            if count == 1:
                _conclude(
                    values, None, n, bar, need, taken, is_finite, board, out, sound_ptr, token, K, KP, TILE, PADDED
                )
            else:
                to = (base + part).to(tl.int64) * K
                part_value, part_id = part_value_ptr + to, part_id_ptr + to
                _write(values, None, n, first, bar, need, taken, board, part_value, part_id, K, KP, TILE, PADDED)
                # All of this part is written; the count releases it and acquires the others'.
                tl.debug_barrier()
                mine = tl.where(is_finite, 1, 1 + _BAD)
                done = tl.atomic_add(counter_ptr + token, mine, sem="acq_rel", scope="gpu") + mine
                if done % _BAD == count:
                    tl.store(counter_ptr + token, 0)  # for the next launch
                    values = part_value_ptr + base.to(tl.int64) * K
                    ids = part_id_ptr + base.to(tl.int64) * K
                    n = count * K
                    start(board, BINS)
                    bar, need, taken, _is_all = _search(values, n, board, K, BINS, TILE, False)
                    _conclude(
                        values, ids, n, bar, need, taken, done < _BAD, board, out, sound_ptr, token, K, KP, TILE, False
                    )
        item += tl.num_programs(0)
        found = _item(item, lengths, begins, totals, tokens, IN_ROWS, K, CHUNK, TOKENS)
        if item < total:
            start(board, BINS)
