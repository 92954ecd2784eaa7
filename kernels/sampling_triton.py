"""The Triton kernels of sampling_decode.py: what they compute is described there.

A row is cut into blocks of R Q E tokens, and a block into Q groups: group q has tokens (r Q + q) E + e of its block. So
a thread holds much of a group, and reads 16 bytes at a time.

    scan_kernel     every block of every row: the largest logit of each group, sums of exponents, the block's best token
    choose_kernel   every row, one program: the best of the blocks, or, if the row truncates, a search:
                    maxima of groups bound what top-k and top-p keep from below; groups that reach the bound are read
                    again and their tokens listed; the list is cut exactly

The order of tokens is that of (value, lower id first), as one 64-bit integer: no two are equal, so a cut is a number.
It is searched with eight pivots at a time until no more than SMALL tokens are in doubt, and these are compared with
each other. Sums are over the same tiles whatever the batch: equal rows give equal bits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import GREEDY_TEMPERATURE
from kernels.triton_env import INTERPRETED

WORDS = 16  # int32 of a row's settings, see sampling_decode.pack_settings
_WORDS = tl.constexpr(WORDS)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_LOWEST = tl.constexpr(-1e30)
_ALL = tl.constexpr(2**30)  # more tokens than there are
_MOST_COUNTED = tl.constexpr(0x7FFF)
_PLAIN = tl.constexpr(INTERPRETED)
_HIGHEST = tl.constexpr(2**62)
_STEP = tl.constexpr(2**24)  # more than there are tokens: from one value to the next in numbers


@triton.jit
def _float(words, at):
    return tl.load(words + at).to(tl.float32, bitcast=True)


@triton.jit
def _settings(words, vocab):
    """Return (temperature, k, p, least) of a row and whether it is greedy; k _ALL, p 1 and least 0 for off."""
    temperature, p, least = _float(words, 0), _float(words, 2), _float(words, 3)
    k = tl.load(words + 1)
    is_greedy = ((temperature < _GREEDY) | (k == 1) | (p <= 0.0) | (least >= 1.0)).to(tl.int32)
    temperature = tl.where(is_greedy > 0, 1.0, temperature)
    k = tl.where((k > 0) & (k < vocab), k, _ALL)
    return temperature, k, p, least, is_greedy


@triton.jit
def _truncates(k, p, least, is_greedy):
    return (is_greedy == 0) & ((k < _ALL) | (p < 1.0) | (least > 0.0))


@triton.jit
def _mix(x):
    """Mix 32-bit numbers, as sampling._mix_int."""
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return x ^ (x >> 16)


@triton.jit
def _keys(words, position):
    """Return what a row's seed and position contribute to its noise."""
    low = _mix(_mix(tl.load(words + 7).to(tl.uint32, bitcast=True)) ^ position.to(tl.uint32))
    high = _mix(tl.load(words + 8).to(tl.uint32, bitcast=True))
    return low, _mix(high ^ low ^ (position >> 32).to(tl.uint32))


@triton.jit
def _log(x):
    """Return log x by the hardware's approximation: exact to 2^-22 of itself, near 1 to 2^-22 of 1."""
    if _PLAIN:
        x = tl.log2(x)
    else:
        x = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x * 0.6931471805599453


@triton.jit
def _gumbel(token, low, high):
    """Return the noise of tokens, as sampling.gumbel_noise."""
    x = _mix((token + 1).to(tl.uint32)) ^ low
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) + high
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    x = x ^ (x >> 16)
    u = ((x >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    # -log u. Noise that wins comes from u near 1, where nothing would be left of the approximation: a series there.
    v = 1.0 - u
    near = 1.0 / 5.0 + v * (1.0 / 6.0 + v * (1.0 / 7.0))
    near = v + v * v * (1.0 / 2.0 + v * (1.0 / 3.0 + v * (1.0 / 4.0 + v * near)))
    exponential = tl.where(v < 0.1, near, -_log(u))
    return -_log(exponential)


@triton.jit
def _adjust(x, token, inside, words, rows, bias_ptr, history_ptr, mask_ptr, vocab):
    """Return logits x with bias, penalties and mask.   rows: (of history, of bias, of masks), -1 for none."""
    history_row, bias_row, mask_row = rows
    if bias_row >= 0:
        x += tl.load(bias_ptr + bias_row.to(tl.int64) * vocab + token, mask=inside, other=0.0)
    if history_row >= 0:
        presence, frequency, repetition = _float(words, 4), _float(words, 5), _float(words, 6)
        seen = tl.load(history_ptr + history_row.to(tl.int64) * vocab + token, mask=inside, other=0).to(tl.int32)
        count = (seen & _MOST_COUNTED).to(tl.float32)
        factor = tl.where(x > 0.0, tl.math.div_rn(1.0, repetition), repetition)
        x = tl.where(seen != 0, x * factor, x)
        x = x - frequency * count - tl.where(count > 0.0, presence, 0.0)
    if mask_row >= 0:
        width = (vocab + 31) // 32
        word = tl.load(mask_ptr + mask_row.to(tl.int64) * width + token // 32, mask=inside, other=0)
        allowed = ((word >> (token % 32)) & 1) != 0
        x = tl.where(allowed, tl.where(x < _LOWEST, _LOWEST, x), -float("inf"))
    return x


@triton.jit
def _summarise(x, rate, maxima, stats, block, has_sum, Q: tl.constexpr, BLOCKS: tl.constexpr):
    """Write the maxima of a block's groups, of the block, and its sum of exp(rate (x - its maximum))."""
    group = tl.max(tl.max(x, 0), 1)
    tl.store(maxima + block * Q + tl.arange(0, Q), group)
    top = tl.max(group, 0)
    tl.store(stats + block, top)
    if has_sum:
        safe = tl.where(top > -float("inf"), top, 0.0)
        tl.store(stats + BLOCKS + block, tl.sum(tl.sum(tl.sum(tl.exp((x - safe) * rate), 0), 1), 0))


@triton.jit
def scan_kernel(
    logits_ptr, words_ptr, position_ptr, sequence_ptr, bias_ptr, history_ptr, mask_ptr, maxima_ptr, stats_ptr,
    best_ptr, best_id_ptr, vocab,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, row). Of a row, first as adjusted and then as given (if it wants log probabilities):

    maxima [2, BLOCKS Q];   stats [2, 2, BLOCKS]: maxima of blocks, their sums;   best, best_id [BLOCKS]: the best
    token of a block, with noise if the row is noisy and keeps all tokens.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    words = words_ptr + row * _WORDS
    temperature, k, p, least, is_greedy = _settings(words, vocab)
    rows = (tl.load(words + 9), tl.load(words + 10), tl.load(words + 11))
    num_top = tl.load(words + 12)
    is_real = (tl.load(sequence_ptr + row) >= 0).to(tl.int32)
    low, high = _keys(words, tl.load(position_ptr + row))
    r, q = tl.arange(0, R)[:, None, None], tl.arange(0, Q)[None, :, None]
    token = block * (R * Q * E) + (r * Q + q) * E + tl.arange(0, E)[None, None, :]
    inside = token < vocab
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if is_real > 0:
        x = tl.load(logits_ptr + row.to(tl.int64) * vocab + token, mask=inside, other=-float("inf")).to(tl.float32)
        maxima = maxima_ptr + row.to(tl.int64) * (2 * BLOCKS * Q)
        stats = stats_ptr + row * (4 * BLOCKS)
        if num_top >= 0:
            _summarise(x, 1.0, maxima + BLOCKS * Q, stats + 2 * BLOCKS, block, True, Q, BLOCKS)
        x = _adjust(x, token, inside, words, rows, bias_ptr, history_ptr, mask_ptr, vocab)
        rate = 1.0 / temperature
        _summarise(x, rate, maxima, stats, block, p < 1.0, Q, BLOCKS)
        if (is_greedy == 0) & (_truncates(k, p, least, is_greedy) == 0):
            x = x * rate + _gumbel(token, low, high)
        best = tl.max(tl.max(tl.max(x, 0), 1), 0)
        at = tl.min(tl.min(tl.min(tl.where(x == best, token, _ALL), 0), 1), 0)
        tl.store(best_ptr + row * BLOCKS + block, best)
        tl.store(best_id_ptr + row * BLOCKS + block, at)


@triton.jit
def _floor(value):
    """Return the number that is not above those of all tokens with this value."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key.to(tl.int64) << 24


@triton.jit
def _ordered(value, token):
    """Return numbers that order like (value, lower token first)."""
    return _floor(value) + (_STEP - 1 - token)


@triton.jit
def _value(ordered):
    """Return the value of tokens with this number."""
    key = (ordered >> 24).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(
    value_ptr, id_ptr, n, left, k, limit, divisor, top, lo, hi, ENOUGH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return (lo, hi, count, mass, left): what is below lo is beyond the k best, or has `limit` of mass before it;
    what is hi or above is not, `count` entries with `mass`; `left` entries between them are in doubt.

    Of n entries, `left` of them lo or more, all less than hi. An entry's mass is exp(value - top). Without ids: values
    are still to be divided, and ids are their places.
    """
    count, least, mass = 0, left, 0.0
    GAP: tl.constexpr = 0 if id_ptr is not None else _STEP  # without ids, equal values need not be told apart
    while (left > ENOUGH) & (hi - lo > GAP):
        # Pivots that part values evenly, one above all that equal the lowest, and three that part the interval of
        # numbers, so that it shrinks in any case.
        j = tl.arange(0, 8)
        first, last = _value(lo), _value(hi)
        even = _floor(first + (last - first) * (j.to(tl.float32) / 5.0))
        even = tl.where(j == 0, _floor(first) + _STEP, even)
        pivot = tl.where(j < 5, even, lo + ((hi - lo) >> 2) * (j - 4))
        pivot = tl.where(pivot <= lo, lo + 1, tl.where(pivot >= hi, hi - 1, pivot))
        counts = tl.zeros((TILE, 8), tl.int32)
        masses = tl.zeros((TILE, 8), tl.float32)
        for start in range(0, n, TILE):
            i = start + tl.arange(0, TILE)
            value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
            if id_ptr is not None:
                token = tl.load(id_ptr + i, mask=i < n, other=0)
            else:
                value, token = tl.math.div_rn(value, divisor), i
            is_above = (_ordered(value, token)[:, None] >= pivot[None, :]) & (i < n)[:, None]
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp(value - top)[:, None], 0.0)
        counts, masses = tl.sum(counts, 0), tl.sum(masses, 0)
        is_kept = (counts <= k) & (masses < limit)
        hi = tl.min(tl.where(is_kept, pivot, hi), 0)
        lo = tl.max(tl.where(is_kept, lo, pivot), 0)
        count = tl.maximum(count, tl.max(tl.where(is_kept, counts, 0), 0))
        mass = tl.maximum(mass, tl.max(tl.where(is_kept, masses, 0.0), 0))
        least = tl.minimum(least, tl.min(tl.where(is_kept, _ALL, counts), 0))
        left = least - count
    return lo, hi, count, mass, left


@triton.jit
def _pack(value_ptr, id_ptr, n, lo, hi, to, TILE: tl.constexpr, SMALL: tl.constexpr):
    """Copy the entries of a list between lo and hi, less than hi, to its place `to`: SMALL of them at most."""
    done = 0
    tl.debug_barrier()  # what is there has been read
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
        token = tl.load(id_ptr + i, mask=i < n, other=0)
        number = _ordered(value, token)
        wanted = ((number >= lo) & (number < hi) & (i < n)).to(tl.int32)
        place = done + tl.cumsum(wanted, 0) - wanted
        tl.store(value_ptr + to + place, value, mask=(wanted > 0) & (place < SMALL))
        tl.store(id_ptr + to + place, token, mask=(wanted > 0) & (place < SMALL))
        done += tl.sum(wanted, 0)
    tl.debug_barrier()


@triton.jit
def _rank(value_ptr, id_ptr, n, top, SMALL: tl.constexpr, STEP: tl.constexpr):
    """Return (value, id, rank, mass before it) of the n entries, SMALL or less, of a list."""
    i = tl.arange(0, SMALL)
    value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
    token = tl.load(id_ptr + i, mask=i < n, other=0)
    number = _ordered(value, token)
    rank = tl.zeros((SMALL,), tl.int32)
    before = tl.zeros((SMALL,), tl.float32)
    for start in range(0, n, STEP):
        j = start + tl.arange(0, STEP)
        other = tl.load(value_ptr + j, mask=j < n, other=-float("inf"))
        beats = _ordered(other, tl.load(id_ptr + j, mask=j < n, other=0))[None, :] > number[:, None]
        beats = beats & (j < n)[None, :]
        rank += tl.sum(beats.to(tl.int32), 1)
        before += tl.sum(tl.where(beats, tl.exp(other - top)[None, :], 0.0), 1)
    return value, token, rank, before


@triton.jit
def _cut(
    value_ptr, id_ptr, n, left, k, limit, top, lowest, vocab,
    TILE: tl.constexpr, PIVOTED: tl.constexpr, SMALL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the least number that is kept of a list's n entries, how many are kept, and their mass.

    `left` of them are `lowest` or more. Of these are kept the k best that have less than `limit` of mass before them;
    the best in any case.
    """
    lo, hi, count, mass, left = _narrow(
        value_ptr, id_ptr, n, left, k, limit, 1.0, top, lowest, _floor(top) + _STEP, SMALL, PIVOTED
    )  # fmt: skip
    at = 0
    if n > SMALL:
        at = vocab
        _pack(value_ptr, id_ptr, n, lo, hi, vocab, TILE, SMALL)
    else:
        left = n
    value, token, rank, before = _rank(value_ptr + at, id_ptr + at, left, top, SMALL, STEP)
    number = _ordered(value, token)
    rank += count
    is_kept = (tl.arange(0, SMALL) < left) & (number >= lo) & (rank < k) & ((mass + before < limit) | (rank == 0))
    least = tl.min(tl.where(is_kept, number, hi), 0)
    count += tl.sum(is_kept.to(tl.int32), 0)
    return least, count, mass + tl.sum(tl.where(is_kept, tl.exp(value - top), 0.0), 0)


@triton.jit
def _collect(
    logits, words, rows, bias_ptr, history_ptr, mask_ptr, maxima, groups, value_ptr, id_ptr, vocab,
    temperature, k, limit, floor, top,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, GATHER: tl.constexpr,
    PIVOTED: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """List tokens of a row: all that are among the k best, or have less than `limit` of mass before them, and some
    more; none below `floor`. Return how many, and the least of their values."""
    num_groups = tl.cdiv(vocab, R * Q * E) * Q
    i = tl.arange(0, BLOCKS * Q)
    highest = tl.math.div_rn(tl.load(maxima + i, mask=i < num_groups, other=-float("inf")), temperature)
    exists = highest > -float("inf")
    number = tl.sum(exists.to(tl.int32), 0)
    bound = -float("inf")
    # As many groups reach the bound as tokens are wanted, so as many tokens do.
    if (number > k) | (tl.sum(tl.where(exists, tl.exp(highest - top), 0.0), 0) >= limit):
        lowest = tl.min(tl.where(exists, highest, top), 0)
        lo, _, _, _, _ = _narrow(
            maxima, None, num_groups, number, k, limit, temperature, top, _floor(lowest),
            _floor(top) + _STEP, SMALL // 4, PIVOTED,
        )  # fmt: skip
        bound = _value(lo)
    bound = tl.where(bound < floor, floor, bound)
    is_active = (exists & (highest >= bound)).to(tl.int32)
    active = tl.sum(is_active, 0)
    tl.debug_barrier()  # lists of an earlier use have been read
    tl.store(groups + tl.cumsum(is_active, 0) - is_active, i, mask=is_active > 0)
    tl.debug_barrier()
    n, least = 0, top
    r, e = tl.arange(0, R)[None, :, None], tl.arange(0, E)[None, None, :]
    for start in tl.range(0, active, GATHER, num_stages=2):
        g = start + tl.arange(0, GATHER)
        group = tl.load(groups + g, mask=g < active, other=0)[:, None, None]
        token = group // Q * (R * Q * E) + (r * Q + group % Q) * E + e
        inside = (token < vocab) & (g < active)[:, None, None]
        x = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32)
        x = _adjust(x, token, inside, words, rows, bias_ptr, history_ptr, mask_ptr, vocab)
        x = tl.reshape(tl.math.div_rn(x, temperature), (GATHER * R * E,))
        token = tl.reshape(token, (GATHER * R * E,))
        wanted = ((x >= bound) & (x > -float("inf"))).to(tl.int32)
        place = n + tl.cumsum(wanted, 0) - wanted
        tl.store(value_ptr + place, x, mask=wanted > 0)
        tl.store(id_ptr + place, token, mask=wanted > 0)
        n += tl.sum(wanted, 0)
        least = tl.minimum(least, tl.min(tl.where(wanted > 0, x, top), 0))
    tl.debug_barrier()
    return n, least


@triton.jit
def _draw(value_ptr, id_ptr, n, least, low, high, TILE: tl.constexpr):
    """Return the token of a list, `least` or more, that is best with its noise; 0 if there is none."""
    best, chosen = -float("inf"), 0
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(value_ptr + i, mask=i < n, other=-float("inf"))
        token = tl.load(id_ptr + i, mask=i < n, other=0)
        is_kept = (_ordered(value, token) >= least) & (i < n)
        score = tl.where(is_kept, value + _gumbel(token, low, high), -float("inf"))
        top = tl.max(score, 0)
        first = tl.min(tl.where((score == top) & is_kept, token, _ALL), 0)
        chosen = tl.where((top > best) | ((top == best) & (first < chosen)), first, chosen)
        best = tl.where(top > best, top, best)
    return chosen


@triton.jit
def _total(stats, blocks, rate, top, BLOCKS: tl.constexpr):
    """Return the sum of a row's exp(rate (x - top)) from those of its blocks."""
    b = tl.arange(0, BLOCKS)
    tops = tl.load(stats + b, mask=b < blocks, other=-float("inf"))
    sums = tl.load(stats + BLOCKS + b, mask=b < blocks, other=0.0)
    return tl.sum(tl.where(tops > -float("inf"), sums * tl.exp((tops - top) * rate), 0.0), 0)


@triton.jit(do_not_specialize=["width"])
def choose_kernel(
    token_ptr, logprob_ptr, top_id_ptr, top_logprob_ptr, logits_ptr, words_ptr, position_ptr, sequence_ptr, bias_ptr,
    history_ptr, mask_ptr, maxima_ptr, stats_ptr, best_ptr, best_id_ptr, group_ptr, value_ptr, id_ptr, vocab, width,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
    PIVOTED: tl.constexpr, SMALL: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program row. Inputs and the results of scan_kernel as there.

    group [BLOCKS Q], value and id [vocab + SMALL] of each row: scratch.   top_id, top_logprob [rows, width], WIDTH or
    less.
    """
    row = tl.program_id(0)
    words = words_ptr + row * _WORDS
    temperature, k, p, least, is_greedy = _settings(words, vocab)
    history_row, bias_row, mask_row = tl.load(words + 9), tl.load(words + 10), tl.load(words + 11)
    num_top = tl.load(words + 12)
    is_real = (tl.load(sequence_ptr + row) >= 0).to(tl.int32)
    low, high = _keys(words, tl.load(position_ptr + row))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chosen, logprob = row * 0, 0.0
    total = 0.0
    c = tl.arange(0, WIDTH)
    tl.store(top_id_ptr + row * width + c, -1, mask=c < width)
    tl.store(top_logprob_ptr + row * width + c, 0.0, mask=c < width)
    if is_real > 0:
        blocks = tl.cdiv(vocab, R * Q * E)
        b = tl.arange(0, BLOCKS)
        logits = logits_ptr + row.to(tl.int64) * vocab
        values = value_ptr + row.to(tl.int64) * (vocab + SMALL)
        ids = id_ptr + row.to(tl.int64) * (vocab + SMALL)
        # First the token, then the best by the logits as given; one loop, so that both share the code.
        for task in range(2):
            is_choice = task == 0
            wanted = tl.where(is_choice, _truncates(k, p, least, is_greedy), num_top > 0)
            maxima = maxima_ptr + row.to(tl.int64) * (2 * BLOCKS * Q) + task * (BLOCKS * Q)
            stats = stats_ptr + row * (4 * BLOCKS) + task * (2 * BLOCKS)
            if wanted:
                divisor = tl.where(is_choice, temperature, 1.0)
                top = tl.math.div_rn(
                    tl.max(tl.load(stats + b, mask=b < blocks, other=-float("inf")), 0), divisor
                )  # fmt: skip
                most = tl.where(is_choice, k, num_top)
                has_p = is_choice & (p < 1.0)
                has_floor = is_choice & (least > 0.0)
                floor = tl.where(has_floor, top + tl.log(tl.where(has_floor, least, 1.0)), -float("inf"))
                rows = (
                    tl.where(is_choice, history_row, -1), tl.where(is_choice, bias_row, -1),
                    tl.where(is_choice, mask_row, -1),
                )  # fmt: skip
                limit = float("inf")
                if has_p & (most == _ALL) & (least <= 0.0):  # else what top-p is a part of is known later
                    total = _total(stats, blocks, 1.0 / divisor, top * divisor, BLOCKS)
                    limit = p * total * 1.0001
                    # All tokens at this value or below have no more mass than top-p leaves out.
                    floor = top + tl.log((1.0 - p) * total / vocab) - 1e-3
                n, lowest_value = _collect(
                    logits, words, rows, bias_ptr, history_ptr, mask_ptr, maxima, group_ptr + row * (BLOCKS * Q),
                    values, ids, vocab, divisor, most, limit, floor, top, R, Q, E, BLOCKS, GATHER, PIVOTED, SMALL,
                )  # fmt: skip
                lowest, left = _floor(lowest_value), n
                # By rank; then by probability among what is left.
                for stage in range(2):
                    is_first = stage == 0
                    if tl.where(is_first, (most < _ALL) | has_p & has_floor, has_p):
                        number = tl.where(is_first, most, _ALL)
                        part = tl.where(is_first, float("inf"), p * total)
                        lowest, left, mass = _cut(
                            values, ids, n, left, number, part, top, lowest, vocab, TILE, PIVOTED, SMALL, STEP
                        )  # fmt: skip
                        total = tl.where(is_first, mass, total)
                if is_choice:
                    chosen = _draw(values, ids, n, lowest, low, high, TILE)
                else:
                    at = 0
                    if n > SMALL:
                        at = vocab
                        _pack(values, ids, n, lowest, _HIGHEST, vocab, TILE, SMALL)
                    small = tl.where(n > SMALL, left, n)
                    value, token, rank, _ = _rank(values + at, ids + at, small, top, SMALL, STEP)
                    shown = (tl.arange(0, SMALL) < small) & (rank < num_top) & (rank < width)
                    lowered = value - (top + tl.log(_total(stats, blocks, 1.0, top, BLOCKS)))
                    tl.debug_barrier()  # the defaults are stored
                    tl.store(top_id_ptr + row * width + rank, token, mask=shown)
                    tl.store(top_logprob_ptr + row * width + rank, lowered, mask=shown)
            elif is_choice:
                best = tl.load(best_ptr + row * BLOCKS + b, mask=b < blocks, other=-float("inf"))
                at = tl.load(best_id_ptr + row * BLOCKS + b, mask=b < blocks, other=_ALL)
                chosen = tl.min(tl.where(best == tl.max(best, 0), at, _ALL), 0)
        chosen = tl.where((chosen >= 0) & (chosen < vocab), chosen, 0)  # a row of NaN has no best
        if num_top >= 0:
            stats = stats_ptr + row * (4 * BLOCKS) + 2 * BLOCKS
            top = tl.max(tl.load(stats + b, mask=b < blocks, other=-float("inf")), 0)
            logprob = tl.load(logits + chosen).to(tl.float32) - (
                top + tl.log(_total(stats, blocks, 1.0, top, BLOCKS))
            )  # fmt: skip
        if history_row >= 0:
            at = history_ptr + history_row.to(tl.int64) * vocab + chosen
            seen = tl.load(at)
            tl.debug_barrier()  # all threads have read it
            tl.store(at, tl.where((seen & _MOST_COUNTED) < _MOST_COUNTED, seen + 1, seen).to(tl.int16))
    tl.store(token_ptr + row, chosen.to(tl.int64))
    tl.store(logprob_ptr + row, logprob)
