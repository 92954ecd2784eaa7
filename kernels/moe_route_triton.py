"""The Triton kernel of moe_routing.py: what it computes and the arrays it writes are described there.

A token is one warp's work. Experts are counted with atomic additions, which also give each row its rank within its
expert; the last program to finish lists the experts that have rows. So the order of an expert's rows, which nothing
depends on, may differ from run to run: a row's sums do not depend on the rows beside it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_load import to_f16

_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def activate(u, RAW: tl.constexpr):
    """Return sqrt(softplus(u)). log(1 + z) with z's lost digits put back: small scores must not all become 0."""
    if RAW:
        z = tl.exp(-tl.abs(u))
        one = 1.0 + z
        log = tl.where(one == 1.0, z, tl.log(one) * (z / tl.where(one == 1.0, 1.0, one - 1.0)))
        u = tl.sqrt_rn(tl.where(u > 0.0, u, 0.0) + log)
    return u


@triton.jit
def choose(choice, e, k, E: tl.constexpr, TOP_K: tl.constexpr, PADDED: tl.constexpr):
    """Return ids [WIDTH] of the TOP_K largest of choice [PADDED], the lower one where equal; NaN first."""
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # orders like the numbers; integers, since a warp has an instruction then
    key = tl.where(choice != choice, 0x7FFFFFFF, key)
    key = tl.where(e < E, key, _LOWEST)
    chosen = k * 0
    for i in range(TOP_K):
        expert = tl.min(tl.where(key == tl.max(key, 0), e, PADDED), 0)
        chosen = tl.where(k == i, expert, chosen)
        key = tl.where(e == expert, _LOWEST, key)
    return chosen


@triton.jit
def list_experts(active_ptr, e, count, first, MANY: tl.constexpr):
    """Write the list of active experts: those with more than MANY rows, then the others, each by number."""
    is_many = (count > MANY).to(tl.int32)
    is_few = (count > 0).to(tl.int32) - is_many
    both = is_many + (is_few << 16)  # one sum over lanes instead of two
    before = tl.cumsum(both, 0) - both
    total = tl.sum(both, 0)
    many = total & 0xFFFF
    rank = tl.where(is_many > 0, before & 0xFFFF, many + (before >> 16))
    tl.store(active_ptr, many + (total >> 16))
    tl.store(active_ptr + 1, many)
    entry = active_ptr + 4 + 4 * rank
    tl.store(entry, e, mask=count > 0)
    tl.store(entry + 1, first, mask=count > 0)
    tl.store(entry + 2, count, mask=count > 0)


@triton.jit(do_not_specialize=["tokens", "size"])
def route_kernel(
    scores_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr, rank_ptr, token_ptr,
    weight_ptr, first_ptr, active_ptr, counter_ptr, x_ptr, few_ptr, many_ptr, tokens, size, scaling,
    E: tl.constexpr, TOP_K: tl.constexpr, RAW: tl.constexpr, MANY: tl.constexpr, PDL: tl.constexpr,
    CONVERTED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program t routes token t; programs beyond convert CONVERTED activations each.

    counter_ptr: PADDED + 1 zeros; zeros again in the end.
    """
    e, k = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    token = tl.program_id(0)
    if token >= tokens:
        # See expert_weights.to_pieces and to_products.
        to = (token - tokens) * CONVERTED + tl.arange(0, CONVERTED)
        half = to // 32 % 2
        channel = to // 64 * 64 + half * 8
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        x = tl.load(x_ptr + (channel + to // 8 % 4 * 16 + to % 8), mask=to < size, other=0.0).to(tl.float32)
        tl.store(few_ptr + to, to_f16(x), mask=to < size)
        if many_ptr is not None:
            from_pairs = channel + to // 2 % 4 * 16 + to // 8 % 4 * 2 + to % 2
            x = tl.load(x_ptr + from_pairs, mask=to < size, other=0.0).to(tl.float32)
            tl.store(many_ptr + to, to_f16(x), mask=to < size)
    else:
        # Written before the step began, so not waited for.
        is_real = 1
        if sequence_ptr is not None:
            is_real = (tl.load(sequence_ptr + token) >= 0).to(tl.int32)
        is_choice = k < TOP_K * is_real
        if table_ptr is not None:
            word = tl.load(token_ids_ptr + token)
            found = tl.load(table_ptr + tl.where(is_real > 0, word, 0) * TOP_K + k, mask=is_choice, other=0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        scores = scores_ptr + token * E
        is_wrong = 0
        if table_ptr is None:
            choice = activate(tl.load(scores + e, mask=e < E, other=0.0), RAW)
            if bias_ptr is not None:
                choice += bias
            chosen = choose(choice, e, k, E, TOP_K, PADDED)
        else:
            exists = (found >= 0) & (found < E)
            is_wrong = tl.max(tl.where(exists, 0, 1), 0)
            chosen = tl.where(exists, found, 0).to(tl.int32)
        rank = tl.atomic_add(counter_ptr + chosen, 1, mask=is_choice, sem="relaxed")
        a = tl.where(is_choice, activate(tl.load(scores + chosen, mask=is_choice, other=0.0), RAW), 0.0)
        weight = a / tl.sum(a, 0) * scaling
        weight = tl.where(is_wrong > 0, float("nan"), weight)
        at = token * TOP_K + k
        tl.store(ids_ptr + at, tl.where(is_choice, chosen, -1), mask=k < TOP_K)
        tl.store(weights_ptr + at, tl.where(is_choice, weight, 0.0), mask=k < TOP_K)
        tl.store(rank_ptr + at, tl.where(is_choice, rank, -1), mask=k < TOP_K)
        row = chosen.to(tl.int64) * (tokens * TOP_K) + rank
        tl.store(token_ptr + row, token + k * 0, mask=is_choice)
        tl.store(weight_ptr + row, weight, mask=is_choice)
        tl.debug_barrier()  # all lanes have counted before one says so; that releases theirs and acquires others'
        if tl.atomic_add(counter_ptr + PADDED, 1, sem="acq_rel", scope="gpu") == tokens - 1:
            count = tl.load(counter_ptr + e, cache_modifier=".cg")
            tl.store(counter_ptr + e, 0)  # for the next call
            tl.store(counter_ptr + PADDED, 0)
            first = tl.cumsum(count, 0) - count
            tl.store(first_ptr + e, first, mask=e < E)
            list_experts(active_ptr, e, count, first, MANY)
