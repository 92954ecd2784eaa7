"""A row that truncates without top-k: its best tokens by score are put to the test, one pass for all of them.

The token to choose is the one of best score (value + noise) among those that are kept. scan_kernel has the two best
scores of each block, whether they are kept or not. The TESTED best of all are candidates: a token is kept if the tokens
before it have less mass than top-p wants, and that mass is one sum over the row, which all programs of a row share. No
threshold is looked for.

The best candidate that is kept is the choice unless a block holds two tokens with better scores, as it might hold a
third one that is kept. It rarely does: with probability p the first candidate is kept already.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_row_triton import ALL, adjust, key_of, number_of, token_of

CANDIDATES = 8  # sums at a time: of TESTED candidates and of all that min-p keeps
NUM_CANDIDATES = tl.constexpr(CANDIDATES)
TESTED = tl.constexpr(CANDIDATES - 1)
_NONE = tl.constexpr(-(2**62))  # below all numbers
_HIGHEST_KEY = tl.constexpr(0x7FFFFFFF)  # above those of all values


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
def candidates_of(first, second, first_value, second_value, ids, values, floor, block_size, BLOCKS: tl.constexpr):
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
    token = token_of(found)
    at = tl.where(exists, token // block_size, 0)
    is_first = tl.load(ids + at) == token
    value = tl.where(is_first, tl.load(values + at), tl.load(values + BLOCKS + at, mask=exists, other=0.0))
    return found, tl.where(exists, value, -float("inf")), hidden


@triton.jit
def weigh(
    x, logits, words, rows, bias_ptr, history_ptr, mask_ptr, mass_ptr, vocab, temperature, top, found, value, floor,
    program, programs, SHARE: tl.constexpr,
):  # fmt: skip
    """Write for each of a program's shares of SHARE tokens the mass before each candidate; last that of what is floor
    or more.

    x: logits of the first of its shares.
    """
    c, i = tl.arange(0, NUM_CANDIDATES), tl.arange(0, SHARE)
    exists = found > _NONE
    id_of = token_of(found)
    home = id_of // SHARE
    key = tl.where(exists, key_of(value), _HIGHEST_KEY)
    for share in range(program, tl.cdiv(vocab, SHARE), programs):
        token = share * SHARE + i
        later = token + programs * SHARE
        ahead = tl.load(logits + later, mask=later < vocab, other=-float("inf"))  # arrives while this one is summed
        y = adjust(x.to(tl.float32), token, token < vocab, words, rows, bias_ptr, history_ptr, mask_ptr, vocab)
        if temperature != 1.0:
            y = tl.math.div_rn(y, temperature)
        mine = key_of(y)
        weight = tl.exp(y - top)
        # Of a candidate's equals those of shares in front come before it.
        least = tl.where(exists & (share >= home), key + 1, key)
        least = tl.where(c == TESTED, key_of(floor), least)
        mass = tl.sum(tl.where(mine[None, :] >= least[:, None], weight[None, :], 0.0), 1)
        is_home = exists & (share == home)
        if tl.max(is_home.to(tl.int32), 0) > 0:
            is_equal = (mine[None, :] == key[:, None]) & (token[None, :] < id_of[:, None]) & is_home[:, None]
            mass += tl.sum(tl.where(is_equal, weight[None, :], 0.0), 1)
        tl.store(mass_ptr + share * NUM_CANDIDATES + c, mass)
        x = ahead


@triton.jit
def masses_of(mass_ptr, shares, SHARES: tl.constexpr):
    """Return the sums over a row's shares of what weigh wrote, by whichever program."""
    c, b = tl.arange(0, NUM_CANDIDATES)[:, None], tl.arange(0, SHARES)[None, :]
    at = mass_ptr + b * NUM_CANDIDATES + c
    return tl.sum(tl.load(at, mask=(b < shares) & (c >= 0), other=0.0, cache_modifier=".cg"), 1)


@triton.jit
def judge(found, value, mass, limit, hidden, floor):
    """Return (whether the choice is certain, the choice if so, a floor that is higher if candidates were dropped)."""
    exists = found > _NONE
    best = tl.max(tl.where(exists & (mass < limit), found, _NONE), 0)
    is_certain = (best > _NONE) & (best >= hidden)
    dropped = tl.max(tl.where(exists & (mass >= limit), value, floor), 0)
    return is_certain.to(tl.int32), token_of(best), dropped
