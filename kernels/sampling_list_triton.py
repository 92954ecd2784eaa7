"""A row's list: the tokens that may be kept, from the groups whose maxima say so, and how it is cut.

Up to SMALL tokens are compared with each other. A longer list is first searched with eight pivots at a time, until no
more than SMALL are in doubt. Sums are over the same tiles whatever the batch: equal rows give equal bits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_row_triton import ALL, GAP, adjust, gumbel, number_below, number_of, value_of

_BINS = tl.constexpr(64)
_REACH = tl.constexpr(64.0)  # from the best: what is lower is no different from what is no token at all


@triton.jit
def _bound(highest, exists, top, k):
    """Return a maximum that at least k groups reach, so that k tokens do; -inf if there are fewer groups."""
    reach = tl.where(exists, top - highest, 0.0)
    reach = tl.where(reach < _REACH, reach, _REACH)
    span = tl.max(reach, 0)
    place = (reach * ((_BINS - 1) / tl.where(span > 0.0, span, 1.0))).to(tl.int32)
    place = tl.where(place < 0, 0, tl.where(place < _BINS, place, _BINS - 1))
    count = tl.cumsum(tl.histogram(place, _BINS, mask=exists), 0)
    last = tl.min(tl.where(count >= k, tl.arange(0, _BINS), _BINS), 0)
    return tl.where(last < _BINS, tl.min(tl.where(exists & (place <= last), highest, top), 0), -float("inf"))


@triton.jit
def collect(
    logits, words, rows, bias_ptr, history_ptr, mask_ptr, maxima, groups, value_ptr, id_ptr, vocab,
    temperature, k, floor, lowered,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """List tokens of a row: all that are among the k best, and some more; none below `floor`, or below the best value
    and `lowered`.

    Return how many, the best value, and the least of theirs.
    """
    num_groups = tl.cdiv(vocab, R * Q * E) * Q
    i = tl.arange(0, BLOCKS * Q)
    highest = tl.load(maxima + i, mask=i < num_groups, other=-float("inf"))
    exists = highest > -float("inf")
    best = tl.max(highest, 0)
    top = tl.math.div_rn(best, temperature)
    bound = tl.where(top + lowered > floor, top + lowered, floor)
    if k < ALL:
        reached = tl.math.div_rn(_bound(highest, exists, best, k), temperature)
        bound = tl.where(reached > bound, reached, bound)
    # Undivided maxima and a little less: all groups that can have a token, without a division for each.
    least = bound * temperature
    is_active = (exists & (highest >= least - 1e-6 * tl.abs(least))).to(tl.int32)
    through = tl.cumsum(is_active, 0)
    active = tl.max(through, 0)
    tl.debug_barrier()  # lists of an earlier use have been read
    tl.store(groups + through - is_active, i, mask=is_active > 0)
    tl.debug_barrier()
    n, lowest = 0, top
    r, e = tl.arange(0, R)[None, :, None], tl.arange(0, E)[None, None, :]
    for start in range(0, active, GATHER):
        g = start + tl.arange(0, GATHER)
        group = tl.load(groups + g, mask=g < active, other=0)[:, None, None]
        first = group // Q * (R * Q * E) + (r * Q + group % Q) * E
        token = first + e
        inside = (token < vocab) & (g < active)[:, None, None]
        x = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32)
        x = adjust(x, token, first, inside, words, rows, bias_ptr, history_ptr, mask_ptr, vocab)
        x = tl.reshape(tl.math.div_rn(x, temperature), (GATHER * R * E,))
        token = tl.reshape(token, (GATHER * R * E,))
        wanted = ((x >= bound) & (x > -float("inf"))).to(tl.int32)
        place = tl.cumsum(wanted, 0)
        tl.store(value_ptr + n + place - wanted, x, mask=wanted > 0)
        tl.store(id_ptr + n + place - wanted, token, mask=wanted > 0)
        n += tl.max(place, 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(wanted > 0, x, top), 0))
    tl.debug_barrier()
    return n, top, lowest


@triton.jit
def rank_all(value_ptr, id_ptr, n, top, SMALL: tl.constexpr, STEP: tl.constexpr):
    """Return (value, id, rank, mass before it) of the n entries, SMALL or less, of a list.

    An entry's mass is exp(value - top).
    """
    i = tl.arange(0, SMALL)
    value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
    token = tl.load(id_ptr + i, mask=i < n, other=0)
    number = number_of(value, token)
    rank = tl.zeros((STEP, SMALL), tl.int32)
    before = tl.zeros((STEP, SMALL), tl.float32)
    for start in range(0, n, STEP):
        j = start + tl.arange(0, STEP)
        other = tl.load(value_ptr + j, mask=j < n, other=-float("inf"))
        other_number = number_of(other, tl.load(id_ptr + j, mask=j < n, other=0))
        beats = (other_number[:, None] > number[None, :]) & (j < n)[:, None]
        rank += beats.to(tl.int32)
        before += tl.where(beats, tl.exp(other - top)[:, None], 0.0)
    return value, token, tl.sum(rank, 0), tl.sum(before, 0)


@triton.jit
def _narrow(
    value_ptr, id_ptr, n, left, k, limit, top, lo, hi, ENOUGH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return (lo, hi, count, mass, left): what is below lo is beyond the k best, or has `limit` of mass before it;
    what is hi or above is not, `count` entries with `mass`; `left` entries between them are in doubt.

    Of n entries, `left` of them lo or more, all less than hi.
    """
    count, least, mass = 0, left, 0.0
    while (left > ENOUGH) & (hi > lo):
        # Pivots that part values evenly, one above all that equal the lowest, and three that part the interval of
        # numbers, so that it shrinks in any case.
        j = tl.arange(0, 8)
        first, last = value_of(lo), value_of(hi)
        even = number_below(first + (last - first) * (j.to(tl.float32) / 5.0))
        even = tl.where(j == 0, number_below(first) + GAP, even)
        pivot = tl.where(j < 5, even, lo + ((hi - lo) >> 2) * (j - 4))
        pivot = tl.where(pivot <= lo, lo + 1, tl.where(pivot >= hi, hi - 1, pivot))
        counts = tl.zeros((8, TILE), tl.int32)
        masses = tl.zeros((8, TILE), tl.float32)
        for start in range(0, n, TILE):
            i = start + tl.arange(0, TILE)
            value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
            token = tl.load(id_ptr + i, mask=i < n, other=0)
            is_above = (number_of(value, token)[None, :] >= pivot[:, None]) & (i < n)[None, :]
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp(value - top)[None, :], 0.0)
        counts, masses = tl.sum(counts, 1), tl.sum(masses, 1)
        is_kept = (counts <= k) & (masses < limit)
        hi = tl.min(tl.where(is_kept, pivot, hi), 0)
        lo = tl.max(tl.where(is_kept, lo, pivot), 0)
        count = tl.maximum(count, tl.max(tl.where(is_kept, counts, 0), 0))
        mass = tl.maximum(mass, tl.max(tl.where(is_kept, masses, 0.0), 0))
        least = tl.minimum(least, tl.min(tl.where(is_kept, ALL, counts), 0))
        left = least - count
    return lo, hi, count, mass, left


@triton.jit
def pack(value_ptr, id_ptr, n, lo, hi, to, TILE: tl.constexpr, SMALL: tl.constexpr):
    """Copy the entries of a list between lo and hi, less than hi, to its place `to`: SMALL of them at most."""
    done = 0
    tl.debug_barrier()  # what is there has been read
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
        token = tl.load(id_ptr + i, mask=i < n, other=0)
        number = number_of(value, token)
        wanted = ((number >= lo) & (number < hi) & (i < n)).to(tl.int32)
        place = done + tl.cumsum(wanted, 0) - wanted
        tl.store(value_ptr + to + place, value, mask=(wanted > 0) & (place < SMALL))
        tl.store(id_ptr + to + place, token, mask=(wanted > 0) & (place < SMALL))
        done += tl.sum(wanted, 0)
    tl.debug_barrier()


@triton.jit
def cut(
    value_ptr, id_ptr, n, left, k, limit, top, lowest, vocab,
    TILE: tl.constexpr, PIVOTED: tl.constexpr, SMALL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the least number that is kept of a list's n entries, more than SMALL, how many are kept, and their mass.

    `left` of them are `lowest` or more. Of these are kept the k best that have less than `limit` of mass before them;
    the best in any case.
    """
    lo, hi, count, mass, left = _narrow(
        value_ptr, id_ptr, n, left, k, limit, top, lowest, number_below(top) + GAP, SMALL, PIVOTED
    )  # fmt: skip
    pack(value_ptr, id_ptr, n, lo, hi, vocab, TILE, SMALL)
    value, token, rank, before = rank_all(value_ptr + vocab, id_ptr + vocab, left, top, SMALL, STEP)
    number = number_of(value, token)
    rank += count
    is_kept = (tl.arange(0, SMALL) < left) & (number >= lo) & (rank < k) & ((mass + before < limit) | (rank == 0))
    least = tl.min(tl.where(is_kept, number, hi), 0)
    count += tl.sum(is_kept.to(tl.int32), 0)
    return least, count, mass + tl.sum(tl.where(is_kept, tl.exp(value - top), 0.0), 0)


@triton.jit
def draw(value_ptr, id_ptr, n, least, low, high, TILE: tl.constexpr):
    """Return the token of a list, number `least` or more, that is best with its noise; ALL if there is none."""
    best, chosen = -float("inf"), 0 * n + ALL
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
        token = tl.load(id_ptr + i, mask=i < n, other=0)
        score, first = best_of(value, token, (number_of(value, token) >= least) & (i < n), low, high)
        chosen = tl.where((score > best) | ((score == best) & (first < chosen)), first, chosen)
        best = tl.where(score > best, score, best)
    return chosen


@triton.jit
def best_of(value, token, is_kept, low, high):
    """Return the best score with noise of tokens that are kept, and its token; (-inf, ALL) if there is none."""
    score = tl.where(is_kept, value + gumbel(token, low, high), -float("inf"))
    best = tl.max(score, 0)
    return best, tl.min(tl.where((score == best) & is_kept, token, ALL), 0)
