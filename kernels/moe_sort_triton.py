"""The Triton kernels of moe_sort.py: experts of many tokens are chosen and counted, then each expert lists its rows.

Counts are sums of ones, and an expert goes through all choices in their order: the same rows each time.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.moe_route_triton import activate, choose
from kernels.row_load import to_f16


@triton.jit(do_not_specialize=["tokens", "size"])
def expert_choice_kernel(
    scores_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr, count_ptr, x_ptr, half_ptr,
    tokens, size, scaling,
    E: tl.constexpr, TOP_K: tl.constexpr, RAW: tl.constexpr, CONVERTED: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Program t chooses the experts of token t; programs beyond convert CONVERTED activations each.

    count_ptr: zeros, to which the rows of each expert are added.
    """
    e, k = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    token = tl.program_id(0)
    if token >= tokens:
        # See expert_weights.to_products.
        to = (token - tokens) * CONVERTED + tl.arange(0, CONVERTED)
        channel = to // 64 * 64 + to // 32 % 2 * 8 + to // 2 % 4 * 16 + to // 8 % 4 * 2 + to % 2
        x = tl.load(x_ptr + channel, mask=to < size, other=0.0).to(tl.float32)
        tl.store(half_ptr + to, to_f16(x), mask=to < size)
    else:
        is_real = 1
        if sequence_ptr is not None:
            is_real = (tl.load(sequence_ptr + token) >= 0).to(tl.int32)
        is_choice = k < TOP_K * is_real
        scores = scores_ptr + token * E
        is_wrong = 0
        if table_ptr is None:
            choice = activate(tl.load(scores + e, mask=e < E, other=0.0), RAW)
            if bias_ptr is not None:
                choice += tl.load(bias_ptr + e, mask=e < E, other=0.0)
            chosen = choose(choice, e, k, E, TOP_K, PADDED)
        else:
            word = tl.load(token_ids_ptr + token)
            found = tl.load(table_ptr + tl.where(is_real > 0, word, 0) * TOP_K + k, mask=is_choice, other=0)
            exists = (found >= 0) & (found < E)
            is_wrong = tl.max(tl.where(exists, 0, 1), 0)
            chosen = tl.where(exists, found, 0).to(tl.int32)
        tl.atomic_add(count_ptr + chosen, 1, mask=is_choice, sem="relaxed")
        a = tl.where(is_choice, activate(tl.load(scores + chosen, mask=is_choice, other=0.0), RAW), 0.0)
        weight = a / tl.sum(a, 0) * scaling
        weight = tl.where(is_wrong > 0, float("nan"), weight)
        at = token * TOP_K + k
        tl.store(ids_ptr + at, tl.where(is_choice, chosen, -1), mask=k < TOP_K)
        tl.store(weights_ptr + at, tl.where(is_choice, weight, 0.0), mask=k < TOP_K)


@triton.jit(do_not_specialize=["choices"])
def sort_kernel(
    ids_ptr, weights_ptr, count_ptr, rank_ptr, token_ptr, weight_ptr, first_ptr, block_ptr, choices,
    E: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program e lists the rows of expert e, and its blocks of up to ROWS rows; the one behind, padding's ranks."""
    expert = tl.program_id(0)
    e = tl.arange(0, PADDED)
    count = tl.load(count_ptr + e, mask=e < E, other=0)
    before = e < expert
    first = tl.sum(tl.where(before, count, 0), 0)
    blocks = (count + (ROWS - 1)) // ROWS
    place = tl.sum(tl.where(before, blocks, 0), 0)
    if expert < E:
        own = tl.sum(tl.where(e == expert, count, 0), 0)
        tl.store(first_ptr + expert, first)
        for begin in range(0, own, ROWS):
            entry = block_ptr + 4 + 4 * (place + begin // ROWS)
            tl.store(entry, expert)
            tl.store(entry + 1, first + begin)
            tl.store(entry + 2, tl.minimum(own - begin, ROWS))
    else:
        tl.store(block_ptr, place)
    wanted = tl.where(expert < E, expert, -1)
    found = 0
    for begin in range(0, choices, AT_ONCE):
        at = begin + tl.arange(0, AT_ONCE)
        is_own = tl.load(ids_ptr + at, mask=at < choices, other=-2) == wanted
        one = is_own.to(tl.int32)
        rank = found + tl.cumsum(one, 0) - one
        tl.store(rank_ptr + at, tl.where(wanted < 0, -1, rank), mask=is_own)
        is_row = is_own & (wanted >= 0)
        tl.store(token_ptr + first + rank, at // TOP_K, mask=is_row)
        tl.store(weight_ptr + first + rank, tl.load(weights_ptr + at, mask=is_row, other=0.0), mask=is_row)
        found += tl.sum(one, 0)
