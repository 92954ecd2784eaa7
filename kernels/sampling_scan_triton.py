"""The kernel that reads all logits: of every block of every row its maxima, its sums, and its tokens that may be drawn.

A row is cut into blocks of R Q E tokens, and a block into Q groups: group q has tokens (r Q + q) E + e of its block. So
a thread holds much of a group, and reads 16 bytes at a time.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_row_triton import ALL, LOG2_E, NUM_WORDS, adjust, exp2, gumbel, keys_of, settings_of, truncates


@triton.jit
def _summarise(x, rate, maxima, stats, block, has_sum, Q: tl.constexpr, BLOCKS: tl.constexpr):
    """Write the maxima of a block's groups, of the block, and its sum of exp(rate (x - its maximum))."""
    group = tl.max(tl.max(x, 0), 1)
    tl.store(maxima + block * Q + tl.arange(0, Q), group)
    top = tl.max(group, 0)
    tl.store(stats + block, top)
    if has_sum:
        safe = tl.where(top > -float("inf"), top, 0.0)
        tl.store(stats + BLOCKS + block, tl.sum(exp2((x - safe) * (rate * LOG2_E))))


@triton.jit
def _best(score, token):
    """Return the largest score and its token, the lower of equals."""
    best = tl.max(score)
    return best, tl.min(tl.where(score == best, token, ALL))


@triton.jit
def scan_kernel(
    logits_ptr, words_ptr, position_ptr, sequence_ptr, bias_ptr, history_ptr, mask_ptr, maxima_ptr, stats_ptr,
    best_ptr, best_id_ptr, vocab,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (s, row), as many of a row as it has blocks or fewer: then each takes several, one after the other.

    Of each block, first as adjusted if the row truncates, and then as given if it wants log probabilities:

    maxima [2, BLOCKS Q];   stats [2, 2, BLOCKS]: maxima of blocks, and their sums where top-p is a part of all tokens.

    best, best_id [2, BLOCKS], unless the row has a top-k: the best token of a block, with noise if the row is not
    greedy; if it truncates, the second best, too.
    """
    program, row = tl.program_id(0), tl.program_id(1)
    words = words_ptr + row * NUM_WORDS
    temperature, k, p, least, is_greedy = settings_of(words, vocab)
    rows = (tl.load(words + 9), tl.load(words + 10), tl.load(words + 11))
    num_top = tl.load(words + 12)
    is_real = (tl.load(sequence_ptr + row) >= 0).to(tl.int32)
    low, high = keys_of(words, tl.load(position_ptr + row))
    cuts = truncates(k, p, least, is_greedy)
    has_sum = (k == ALL) & (p < 1.0) & (least <= 0.0)
    rate = 1.0 / temperature
    blocks = tl.cdiv(vocab, R * Q * E)
    share = tl.cdiv(blocks, tl.num_programs(0))
    first = program * share
    last = tl.minimum(first + share, blocks)
    run = (tl.arange(0, R)[:, None, None] * Q + tl.arange(0, Q)[None, :, None]) * E
    place = run + tl.arange(0, E)[None, None, :]
    logits = logits_ptr + row.to(tl.int64) * vocab
    maxima = maxima_ptr + row.to(tl.int64) * (2 * BLOCKS * Q)
    stats = stats_ptr + row * (4 * BLOCKS)
    best, best_id = best_ptr + row * (2 * BLOCKS), best_id_ptr + row * (2 * BLOCKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if is_real > 0:
        token = first * (R * Q * E) + place
        given = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        for block in range(first, last):
            token = block * (R * Q * E) + place
            inside, later = token < vocab, token + R * Q * E
            # Arrives while this one is summed up.
            ahead = tl.load(logits + later, mask=(later < vocab) & (block + 1 < last), other=-float("inf"))
            x = given.to(tl.float32)
            if num_top >= 0:
                _summarise(x, 1.0, maxima + BLOCKS * Q, stats + 2 * BLOCKS, block, True, Q, BLOCKS)
            x = adjust(x, token, block * (R * Q * E) + run, inside, words, rows, bias_ptr, history_ptr, mask_ptr, vocab)
            if cuts:
                _summarise(x, rate, maxima, stats, block, has_sum, Q, BLOCKS)
            if (k == ALL) | (is_greedy > 0):
                if is_greedy == 0:
                    x = x * rate + gumbel(token, low, high)
                score, at = _best(x, token)
                tl.store(best + block, score)
                tl.store(best_id + block, at)
                if cuts:
                    second, second_at = _best(tl.where(token == at, -float("inf"), x), token)
                    tl.store(best + BLOCKS + block, second)
                    tl.store(best_id + BLOCKS + block, second_at)
            given = ahead
