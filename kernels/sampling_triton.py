"""The kernel that chooses: what it computes is described in sampling_decode.py.

A row is the business of one program, which takes the best of the blocks, or judges the candidates of a row that
truncates without top-k (sampling_candidates_triton), or cuts a list (sampling_list_triton). The best by the logits as
given are listed by another.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_candidates_triton import NUM_CANDIDATES, NUM_NUMBERS, judge
from kernels.sampling_list_triton import best_of, collect, cut, draw, pack, rank_all
from kernels.sampling_row_triton import (
    ALL,
    HIGHEST,
    MOST_COUNTED,
    NUM_WORDS,
    keys_of,
    number_below,
    settings_of,
    truncates,
)


@triton.jit
def _log_total(stats, blocks, BLOCKS: tl.constexpr):
    """Return the logarithm of the sum of a row's exp(x), of the maxima and sums of its blocks."""
    b = tl.arange(0, BLOCKS)
    tops = tl.load(stats + b, mask=b < blocks, other=-float("inf"))
    sums = tl.load(stats + BLOCKS + b, mask=b < blocks, other=0.0)
    top = tl.max(tops, 0)
    return top + tl.log(tl.sum(tl.where(tops > -float("inf"), sums * tl.exp(tops - top), 0.0), 0))


@triton.jit
def _show(ids, logprobs, width, value, token, rank, is_shown, log_total):
    """Write what is shown of the best tokens, each at its rank, and defaults beyond."""
    is_shown = is_shown & (rank < width)
    tl.debug_barrier()  # the defaults are stored
    tl.store(ids + rank, token, mask=is_shown)
    tl.store(logprobs + rank, value - log_total, mask=is_shown)


@triton.jit(do_not_specialize=["width"])
def choose_kernel(
    token_ptr, logprob_ptr, top_id_ptr, top_logprob_ptr, logits_ptr, words_ptr, position_ptr, sequence_ptr, bias_ptr,
    history_ptr, mask_ptr, maxima_ptr, stats_ptr, best_ptr, best_id_ptr, found_ptr, number_ptr, mass_ptr, group_ptr,
    value_ptr, id_ptr, vocab, width,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
    PIVOTED: tl.constexpr, SMALL: tl.constexpr, STEP: tl.constexpr, SHARE: tl.constexpr, SHARES: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (s, row), 1 of a row or, if width is not 0, 2: the last lists the best.

    Inputs and the results of scan_kernel and of weigh_kernel as there. Scratch of each row: group [lists, BLOCKS Q],
    value and id [lists, vocab + SMALL], as many lists as programs.   top_id, top_logprob [rows, width], WIDTH or less.
    """
    s, row = tl.program_id(0), tl.program_id(1)
    words = words_ptr + row * NUM_WORDS
    temperature, k, p, least, is_greedy = settings_of(words, vocab)
    history_row, bias_row, mask_row = tl.load(words + 9), tl.load(words + 10), tl.load(words + 11)
    num_top = tl.load(words + 12)
    is_real = tl.load(sequence_ptr + row) >= 0
    low, high = keys_of(words, tl.load(position_ptr + row))
    cuts = is_real & truncates(k, p, least, is_greedy)
    is_last = (s == tl.num_programs(0) - 1) & (width > 0)
    is_shown = is_last & is_real & (num_top > 0)
    c = tl.arange(0, WIDTH)
    top_ids, top_logprobs = top_id_ptr + row * width, top_logprob_ptr + row * width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if is_last:
        tl.store(top_ids + c, -1, mask=c < width)
        tl.store(top_logprobs + c, 0.0, mask=c < width)
    blocks = tl.cdiv(vocab, R * Q * E)
    logits = logits_ptr + row.to(tl.int64) * vocab
    stats = stats_ptr + row * (4 * BLOCKS)
    is_known = (cuts == 0).to(tl.int32)
    chosen, floor, total = row * 0, -float("inf"), 0.0
    lowered = tl.where(least > 0.0, tl.log(tl.where(least > 0.0, least, 1.0)), -float("inf"))
    if (s == 0) & cuts & (k == ALL):
        is_known, chosen, floor, total = judge(
            found_ptr + row * NUM_CANDIDATES, number_ptr + row * NUM_NUMBERS,
            mass_ptr + row * (SHARES * NUM_CANDIDATES), tl.where(p < 1.0, tl.cdiv(vocab, SHARE), 0), p, least, SHARES,
        )  # fmt: skip
    elif (s == 0) & is_real & (cuts == 0):
        b = tl.arange(0, BLOCKS)
        best, best_id = best_ptr + row * (2 * BLOCKS), best_id_ptr + row * (2 * BLOCKS)
        scores = tl.load(best + b, mask=b < blocks, other=-float("inf"))
        at = tl.load(best_id + b, mask=b < blocks, other=ALL)
        chosen = tl.min(tl.where(scores == tl.max(scores, 0), at, ALL), 0)
    # What is not known yet, then the best by the logits as given; one loop, so that both share the code.
    for task in range(2):
        is_choice = task == 0
        if tl.where(is_choice, (s == 0) & (is_known == 0), is_shown):
            number = row * tl.where(width > 0, 2, 1) + task * (width > 0).to(tl.int32)
            group = group_ptr + number.to(tl.int64) * (BLOCKS * Q)
            values = value_ptr + number.to(tl.int64) * (vocab + SMALL)
            ids = id_ptr + number.to(tl.int64) * (vocab + SMALL)
            maxima = maxima_ptr + (row * 2 + task).to(tl.int64) * (BLOCKS * Q)
            rows = (
                tl.where(is_choice, history_row, -1), tl.where(is_choice, bias_row, -1),
                tl.where(is_choice, mask_row, -1),
            )  # fmt: skip
            divisor = tl.where(is_choice, temperature, 1.0)
            most = tl.where(is_choice, k, num_top)
            has_p = is_choice & (p < 1.0)
            is_bounded = most < ALL  # what top-p is a part of is known when it is cut; else it is total
            n, top, lowest_value = collect(
                logits, words, rows, bias_ptr, history_ptr, mask_ptr, maxima, group, values, ids, vocab, divisor,
                most, tl.where(is_choice, floor, -float("inf")), tl.where(is_choice, lowered, -float("inf")),
                R, Q, E, BLOCKS, GATHER,
            )  # fmt: skip
            lowest, at = number_below(lowest_value), 0
            if n > SMALL:
                # By rank; then by probability among what is left.
                left = n
                for stage in range(2):
                    is_first = stage == 0
                    if tl.where(is_first, is_bounded, has_p):
                        lowest, left, mass_kept = cut(
                            values, ids, n, left, tl.where(is_first, most, ALL),
                            tl.where(is_first, float("inf"), p * total), top, lowest, vocab, TILE, PIVOTED, SMALL,
                            STEP,
                        )  # fmt: skip
                        total = tl.where(is_first, mass_kept, total)
                if is_choice:
                    chosen = draw(values, ids, n, lowest, low, high, TILE)
                else:
                    pack(values, ids, n, lowest, HIGHEST, vocab, TILE, SMALL)
                at, n = vocab, left
            if (at == 0) | (task > 0):
                value, token, rank, before = rank_all(values + at, ids + at, n, top, SMALL, STEP)
                is_kept = (tl.arange(0, SMALL) < n) & (rank < most)
                if is_choice:
                    if has_p:
                        kept = tl.sum(tl.where(is_kept, tl.exp(value - top), 0.0), 0)
                        limit = p * tl.where(is_bounded, kept, total)
                        is_kept = is_kept & ((before < limit) | (rank == 0))
                    _, chosen = best_of(value, token, is_kept, low, high)
                else:
                    log_total = _log_total(stats + 2 * BLOCKS, blocks, BLOCKS)
                    _show(top_ids, top_logprobs, width, value, token, rank, is_kept, log_total)
    if s == 0:
        logprob = 0.0
        if is_real:
            chosen = tl.where((chosen >= 0) & (chosen < vocab), chosen, 0)  # a row of NaN has no best
            if num_top >= 0:
                x_chosen = tl.load(logits + chosen).to(tl.float32)
                logprob = x_chosen - _log_total(stats + 2 * BLOCKS, blocks, BLOCKS)
            if history_row >= 0:
                at_word = history_ptr + history_row.to(tl.int64) * vocab + chosen
                seen = tl.load(at_word)
                tl.debug_barrier()  # all threads have read it
                tl.store(at_word, tl.where((seen & MOST_COUNTED) < MOST_COUNTED, seen + 1, seen).to(tl.int16))
        tl.store(token_ptr + row, chosen.to(tl.int64))
        tl.store(logprob_ptr + row, logprob)
