"""A row that truncates without top-k: its best tokens by score are put to the test, one pass for all of them.

The token to choose is the one of best score (value + noise) among those that are kept. scan_kernel has the two best
scores of each block, whether they are kept or not. The TESTED best of all are candidates: a token is kept if the tokens
before it have less mass than top-p wants, and that mass is one sum over the row, which several programs share. No
threshold is looked for. choose_kernel judges.

The best candidate that is kept is the choice unless a block holds two tokens with better scores, as it might hold a
third one that is kept. It rarely does: with probability p the first candidate is kept already.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_row_triton import (
    ALL,
    LOG2_E,
    NUM_WORDS,
    PLAIN,
    adjust,
    exp2,
    float_of,
    key_of,
    number_of,
    settings_of,
    token_of,
    truncates,
)

CANDIDATES = 8  # sums at a time: of TESTED candidates and of all that min-p keeps
NUM_CANDIDATES = tl.constexpr(CANDIDATES)
TESTED = tl.constexpr(CANDIDATES - 1)
NUMBERS = 16  # floats that choose_kernel is told of a row
NUM_NUMBERS = tl.constexpr(NUMBERS)
_NONE = tl.constexpr(-(2**62))  # below all numbers


@triton.jit
def pairs_of(pointer, blocks, absent, BLOCKS: tl.constexpr):
    """Return what scan_kernel wrote of each block's best token and of its second best."""
    b = tl.arange(0, BLOCKS)
    inside = b < blocks
    return tl.load(pointer + b, mask=inside, other=absent), tl.load(pointer + BLOCKS + b, mask=inside, other=absent)


@triton.jit
def numbers_of(score, token):
    """Return numbers of (score, token), _NONE where there is no token with a finite score."""
    return tl.where((score > -float("inf")) & (token < ALL), number_of(score, token), _NONE)


@triton.jit
def values_of(logits, token, words, rows, bias_ptr, history_ptr, mask_ptr, vocab, temperature):
    """Return what tokens have without noise, divided by the temperature."""
    exists = (token >= 0) & (token < vocab)
    x = tl.load(logits + token, mask=exists, other=-float("inf")).to(tl.float32)
    x = adjust(x, token, token, exists, words, rows, bias_ptr, history_ptr, mask_ptr, vocab)
    return tl.math.div_rn(x, temperature)


@triton.jit
def candidates_of(first, second, first_value, second_value, floor, block_size):
    """Return (numbers of (score, token) of the best candidates with values of at least floor, _NONE beyond; their
    values; the best number that is the second of its block).   first, second: numbers of each block's two."""
    hidden = tl.max(second, 0)
    # A block's better one that may be kept, and the other after it.
    is_low = first_value < floor
    behind = tl.where(second_value < floor, _NONE, second)
    front, behind = tl.where(is_low, behind, first), tl.where(is_low, _NONE, behind)
    c = tl.arange(0, NUM_CANDIDATES)
    found = tl.zeros((NUM_CANDIDATES,), tl.int64) + _NONE
    for j in range(TESTED):
        highest = tl.max(front, 0)
        found = tl.where(c == j, highest, found)
        is_taken = front == highest
        front, behind = tl.where(is_taken, behind, front), tl.where(is_taken, _NONE, behind)
    exists = found > _NONE
    at = tl.where(exists, token_of(found) // block_size, 0)
    value = tl.where(tl.gather(first, at, 0) == found, tl.gather(first_value, at, 0), tl.gather(second_value, at, 0))
    return found, tl.where(exists, value, -float("inf")), hidden


@triton.jit
def fours(TOKENS: tl.constexpr):
    """Return 0 to TOKENS - 1 as [1, TOKENS / 4, 4]: of four in a row each thread adds the masses alone."""
    return tl.arange(0, TOKENS // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _fourth(x, at: tl.constexpr, TOKENS: tl.constexpr):
    """Return x [1, TOKENS / 4, 4] at one of four as [1, TOKENS / 4]."""
    pairs = tl.split(tl.reshape(x, (1, TOKENS // 4, 2, 2)))
    return tl.split(pairs[at % 2])[at // 2]


@triton.jit
def _add_each(mass, y, bound, weight, TOKENS: tl.constexpr):
    """Return mass [CANDIDATES, TOKENS / 4] and the weights of y [1, TOKENS / 4, 4] that are bound or more.

    bound [CANDIDATES, 1]. One instruction of comparing and one of adding for each.
    """
    for at in tl.static_range(4):
        value, more = _fourth(y, at, TOKENS), _fourth(weight, at, TOKENS)
        if PLAIN:
            mass += tl.where(value >= bound, more, 0.0)
        else:
            mass = tl.inline_asm_elementwise(
                "{.reg .pred p; setp.ge.f32 p, $2, $3; mov.f32 $0, $1; @p add.f32 $0, $1, $4;}", "=f,f,f,f,f",
                [mass, value, bound, more], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
    return mass


@triton.jit
def weigh(
    x, ahead, logits, words, rows, bias_ptr, history_ptr, mask_ptr, mass_ptr, vocab, temperature, top, found, value,
    floor, first, last, SHARE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write for each of the shares first to last of SHARE tokens the mass before each candidate; last that of what is
    floor or more.

    x, ahead [1, TOKENS / 4, 4]: logits of the first tokens, and of those after them.
    """
    c = tl.arange(0, NUM_CANDIDATES)
    exists = found > _NONE
    id_of = token_of(found)
    key = key_of(value)
    end = tl.minimum(last * SHARE, vocab)
    run = tl.arange(0, TOKENS // 4)[None, :, None] * 4
    for share in range(first, last):
        # Of a candidate's equals those of shares in front come before it; of its own share, those in front of it.
        is_home = exists & (share == id_of // SHARE)
        bound = float_of(tl.where(share >= id_of // SHARE, key + 1, key))
        bound = tl.where(c == TESTED, floor, tl.where(exists, bound, float("nan")))[:, None]
        home = tl.max(tl.where(is_home, id_of // TOKENS, -1), 0)
        mass = tl.zeros((NUM_CANDIDATES, TOKENS // 4), tl.float32)
        for part in range(share * (SHARE // TOKENS), (share + 1) * (SHARE // TOKENS)):
            token = part * TOKENS + fours(TOKENS)
            later = token + 2 * TOKENS
            after = tl.load(logits + later, mask=later < end, other=-float("inf"))  # arrives while two are summed
            y = adjust(
                x.to(tl.float32), token, part * TOKENS + run, token < vocab, words, rows, bias_ptr, history_ptr,
                mask_ptr, vocab,
            )  # fmt: skip
            if temperature != 1.0:
                y = tl.math.div_rn(y, temperature)
            weight = exp2((y - top) * LOG2_E)
            mass = _add_each(mass, y, bound, weight, TOKENS)
            if part <= home:
                equal = tl.where(is_home, value, float("nan"))[:, None, None]
                place = (id_of - part * TOKENS)[:, None, None]
                mass += tl.sum(tl.where((y == equal) & (fours(TOKENS) < place), weight, 0.0), 2)
            x, ahead = ahead, after
        tl.store(mass_ptr + share * NUM_CANDIDATES + c, tl.sum(mass, 1))


@triton.jit
def weigh_kernel(
    logits_ptr, words_ptr, sequence_ptr, bias_ptr, history_ptr, mask_ptr, stats_ptr, best_ptr, best_id_ptr, found_ptr,
    number_ptr, mass_ptr, vocab,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, SHARE: tl.constexpr,
    TOKENS: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (s, row), as many of a row as it has shares of SHARE tokens or fewer. If it truncates without top-k:

    found [CANDIDATES] int64: the candidates, then the best number that is the second of its block.   number [NUMBERS]:
    values of candidates, then what is less is surely not kept, then the sum of all exp(value - the best).
    mass [SHARES, CANDIDATES], if top-p is asked for: as weigh. Inputs and the results of scan_kernel as there.
    """
    s, row = tl.program_id(0), tl.program_id(1)
    words = words_ptr + row * NUM_WORDS
    temperature, k, p, least, is_greedy = settings_of(words, vocab)
    rows = (tl.load(words + 9), tl.load(words + 10), tl.load(words + 11))
    is_real = tl.load(sequence_ptr + row) >= 0
    is_tested = is_real & truncates(k, p, least, is_greedy) & (k == ALL)
    shares = tl.cdiv(vocab, SHARE)
    each = tl.cdiv(shares, tl.num_programs(0))
    first = s * each
    last = tl.minimum(first + each, shares)
    blocks = tl.cdiv(vocab, R * Q * E)
    logits = logits_ptr + row.to(tl.int64) * vocab
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if is_tested & ((p < 1.0) | (s == 0)):
        # All loads before the first sum, so that their ways overlap.
        best, best_id, stats = (
            best_ptr + row * (2 * BLOCKS),
            best_id_ptr + row * (2 * BLOCKS),
            stats_ptr + row * (4 * BLOCKS),
        )
        at, second_at = pairs_of(best_id, blocks, ALL, BLOCKS)
        score, second_score = pairs_of(best, blocks, -float("inf"), BLOCKS)
        b = tl.arange(0, BLOCKS)
        tops = tl.load(stats + b, mask=b < blocks, other=-float("inf"))
        token = first * SHARE + fours(TOKENS)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        ahead = tl.load(logits + token + TOKENS, mask=token + TOKENS < vocab, other=-float("inf"))
        value = values_of(logits, at, words, rows, bias_ptr, history_ptr, mask_ptr, vocab, temperature)
        second_value = values_of(logits, second_at, words, rows, bias_ptr, history_ptr, mask_ptr, vocab, temperature)
        highest = tl.max(tops, 0)
        top = tl.math.div_rn(highest, temperature)
        total = 0.0
        if least > 0.0:
            floor = top + tl.log(least)
        else:
            sums = tl.load(stats + BLOCKS + b, mask=b < blocks, other=0.0)
            share_of = exp2((tops - highest) * (LOG2_E / temperature))
            total = tl.sum(tl.where(tops > -float("inf"), sums * share_of, 0.0), 0)
            # All tokens at this value or below have no more mass than top-p leaves out.
            floor = top + tl.log((1.0 - p) * total / vocab) - 1e-3
        found, value, hidden = candidates_of(
            numbers_of(score, at), numbers_of(second_score, second_at), value, second_value, floor, R * Q * E
        )  # fmt: skip
        if s == 0:
            c = tl.arange(0, NUM_CANDIDATES)
            numbers = number_ptr + row * NUM_NUMBERS
            tl.store(found_ptr + row * NUM_CANDIDATES + c, tl.where(c == TESTED, hidden, found))
            tl.store(numbers + c, tl.where(c == TESTED, floor, value))
            tl.store(numbers + NUM_CANDIDATES, total)
        if p < 1.0:
            weigh(
                x, ahead, logits, words, rows, bias_ptr, history_ptr, mask_ptr,
                mass_ptr + row * (SHARES * NUM_CANDIDATES), vocab, temperature, top, found, value, floor, first, last,
                SHARE, TOKENS,
            )  # fmt: skip


@triton.jit
def judge(found, numbers, masses, shares, p, least, SHARES: tl.constexpr):
    """Return (whether the choice is certain, the choice if so, a floor that is higher if candidates were dropped, the
    mass that top-p is a part of).

    What weigh_kernel has written of a row; shares: of which masses are added, 0 if all candidates are kept.
    """
    c, b = tl.arange(0, NUM_CANDIDATES), tl.arange(0, SHARES)
    number, value = tl.load(found + c), tl.load(numbers + c)
    hidden, floor = tl.load(found + TESTED), tl.load(numbers + TESTED)
    total = tl.load(numbers + NUM_CANDIDATES)
    at = masses + b[None, :] * NUM_CANDIDATES + c[:, None]
    mass = tl.sum(tl.load(at, mask=(b[None, :] < shares) & (c[:, None] >= 0), other=0.0), 1)
    if least > 0.0:
        total = tl.sum(tl.where(c == TESTED, mass, 0.0), 0)
    limit = tl.where(shares > 0, p * total, float("inf"))
    exists = (number > _NONE) & (c < TESTED)
    best = tl.max(tl.where(exists & (mass < limit), number, _NONE), 0)
    is_certain = (best > _NONE) & (best >= hidden)
    dropped = tl.max(tl.where(exists & (mass >= limit), value, floor), 0)
    return is_certain.to(tl.int32), token_of(best), dropped, total
