"""The kernel that reads all logits: of every block of every row its maxima, its sums, and its tokens that may be drawn.

A row is cut into blocks of R Q E tokens, and a block into Q groups: group q has tokens (r Q + q) E + e of its block. So
a thread holds much of a group, and reads 16 bytes at a time.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_row_triton import ALL, NUM_WORDS, adjust, gumbel, keys_of, settings_of, truncates


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
def _best(score, token):
    """Return the largest score and its token, the lower of equals."""
    best = tl.max(tl.max(tl.max(score, 0), 1), 0)
    return best, tl.min(tl.min(tl.min(tl.where(score == best, token, ALL), 0), 1), 0)


@triton.jit
def scan_kernel(
    logits_ptr, words_ptr, position_ptr, sequence_ptr, bias_ptr, history_ptr, mask_ptr, maxima_ptr, stats_ptr,
    best_ptr, best_id_ptr, best_value_ptr, arrived_ptr, vocab,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, row). Of a row, first as adjusted and then as given (if it wants log probabilities):

    maxima [2, BLOCKS Q];   stats [2, 2, BLOCKS]: maxima of blocks, their sums.   best, best_id [2, BLOCKS]: the best
    token of a block, with noise if the row is noisy and has no top-k. If such a row truncates: the second best, too,
    and best_value [2, BLOCKS], both without noise and divided by the temperature.   arrived: set to 0.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    words = words_ptr + row * NUM_WORDS
    temperature, k, p, least, is_greedy = settings_of(words, vocab)
    rows = (tl.load(words + 9), tl.load(words + 10), tl.load(words + 11))
    num_top = tl.load(words + 12)
    is_real = (tl.load(sequence_ptr + row) >= 0).to(tl.int32)
    low, high = keys_of(words, tl.load(position_ptr + row))
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
        x = adjust(x, token, inside, words, rows, bias_ptr, history_ptr, mask_ptr, vocab)
        rate = 1.0 / temperature
        _summarise(x, rate, maxima, stats, block, p < 1.0, Q, BLOCKS)
        if (is_greedy == 0) & (k == ALL):
            x = x * rate + gumbel(token, low, high)
        best, at = _best(x, token)
        place = row * (2 * BLOCKS) + block
        tl.store(best_ptr + place, best)
        tl.store(best_id_ptr + place, at)
        if (k == ALL) & truncates(k, p, least, is_greedy):
            second, second_at = _best(tl.where(token == at, -float("inf"), x), token)
            tl.store(best_ptr + place + BLOCKS, second)
            tl.store(best_id_ptr + place + BLOCKS, second_at)
            # Their values are read again: to keep all until here would take registers from every row.
            c = tl.arange(0, 2)
            both = tl.where(c == 0, at, second_at)
            exists = both < vocab
            value = tl.load(logits_ptr + row.to(tl.int64) * vocab + both, mask=exists, other=-float("inf"))
            value = adjust(
                value.to(tl.float32), both, exists, words, rows, bias_ptr, history_ptr, mask_ptr, vocab
            )  # fmt: skip
            tl.store(best_value_ptr + place + c * BLOCKS, tl.math.div_rn(value, temperature))
            if block == 0:
                tl.store(arrived_ptr + row, 0)
