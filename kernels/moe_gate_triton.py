"""The Triton kernel of moe_gate.py: what it computes is described there, the arrays that it writes in moe_routing.py.

Weights are the left operand and never touch shared memory (gemm_fragment_triton.py): a program has 16 experts, for a
group of tokens, and asks for all its weights before it waits for the kernel that writes x. The last program of a group
adds what programs that share the channels have found, in order, and routes the group: a token is one warp's work. If
there is only one group, that program knows all there is to count; else experts are counted with atomic additions, and
the last group lists them, as in moe_route_triton.py.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm_fragment_triton import BF16, lane_tokens, lane_weights, multiply
from kernels.moe_route_triton import activate, list_experts
from kernels.row_load import to_f16

_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _least(x):
    return tl.min(tl.min(tl.min(x, 3), 2), 0)


@triton.jit
def _most(x):
    return tl.max(tl.max(tl.max(x, 3), 2), 0)


@triton.jit
def _convert(x_ptr, few_ptr, many_ptr, part, size, CONVERTED: tl.constexpr):
    """Turn CONVERTED activations into f16, in the orders of expert_weights.to_pieces and to_products."""
    to = part * CONVERTED + tl.arange(0, CONVERTED)
    channel = to // 64 * 64 + to // 32 % 2 * 8
    x = tl.load(x_ptr + (channel + to // 8 % 4 * 16 + to % 8), mask=to < size, other=0.0).to(tl.float32)
    tl.store(few_ptr + to, to_f16(x), mask=to < size)
    if many_ptr is not None:
        from_pairs = channel + to // 2 % 4 * 16 + to // 8 % 4 * 2 + to % 2
        x = tl.load(x_ptr + from_pairs, mask=to < size, other=0.0).to(tl.float32)
        tl.store(many_ptr + to, to_f16(x), mask=to < size)


@triton.jit
def _pick(
    u, known, e, N: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BY_TABLE: tl.constexpr,
):  # fmt: skip
    """Return experts and their activations [N, WIDTH] by scores u: the best, as moe_route_triton._choose has them.

    u, e: scores and numbers of experts [lanes, N tokens, .., 4].   known: bias of experts, or experts [N, WIDTH] by
    table.
    """
    a = activate(u, True)
    bits = a.to(tl.int32, bitcast=True)
    choice = a if BY_TABLE else a + known
    ordered = (choice + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    key = tl.where(choice != choice, 0x7FFFFFFF, key)
    key = tl.where(e < E, key, _LOWEST)
    k = tl.arange(0, WIDTH)[None, :]
    chosen = known if BY_TABLE else tl.zeros((N, WIDTH), tl.int32)
    found = tl.zeros((N, WIDTH), tl.int32)
    for i in range(TOP_K):
        if BY_TABLE:
            expert = tl.sum(tl.where(k == i, known, 0), 1)
        else:
            expert = _least(tl.where(key == _most(key)[None, :, None, None], e, PADDED))
            chosen = tl.where(k == i, expert[:, None], chosen)
        is_it = e == expert[None, :, None, None]
        found = tl.where(k == i, _most(tl.where(is_it, bits, _LOWEST))[:, None], found)
        key = tl.where(is_it, _LOWEST, key)
    return chosen, found.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens", "size", "many"])
def gate_kernel(
    x_ptr, w_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr, rank_ptr, token_ptr,
    weight_ptr, first_ptr, active_ptr, counter_ptr, part_ptr, few_ptr, many_ptr, tokens, size, many, scaling,
    E: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, NB: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr, CONVERTED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 8 NB tokens, share of the channels, 16 experts); those beyond convert activations.

    KS: warps that share a program's channels.   GROUPED: there is more than one group.   counter: PADDED + 1 + groups
    zeros; zeros again in the end.   many: rows beyond which an expert has many.   part [groups, SPLIT, 8 NB, PADDED]:
    scratch.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    N: tl.constexpr = 8 * NB
    TILES: tl.constexpr = (E + 15) // 16
    CHUNKS: tl.constexpr = K // 64
    SHARE: tl.constexpr = (CHUNKS + KS * SPLIT - 1) // (KS * SPLIT)
    EVEN: tl.constexpr = CHUNKS == SHARE * KS * SPLIT and E % 16 == 0
    groups = (tokens + N - 1) // N
    program = tl.program_id(0)
    if program >= groups * (SPLIT * TILES):
        if PDL:
            tl.extra.cuda.gdc_wait()
        _convert(x_ptr, few_ptr, many_ptr, program - groups * (SPLIT * TILES), size, CONVERTED)
    else:
        # Neighbours share weights: of all groups, the same experts.
        group, tile, split = program % groups, program // groups % TILES, program // groups // TILES
        chunk = split * (SHARE * KS) + tl.arange(0, KS)
        half = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, 2)[None, None, None, :] * 8
        row = tl.broadcast_to(tile * 16 + half, (8, KS, 1, 2))
        weights = ()
        for d in tl.static_range(SHARE):
            weights += (lane_weights(w_ptr, row, chunk, d * KS, True, E, K, 0, BF16, EVEN),)
        # What routes the group was written before the step began: it is not waited for, not even by who routes.
        LANES: tl.constexpr = min(32, PADDED // 4)
        g = tl.arange(0, PADDED // (4 * LANES))[None, None, :, None]
        e = (g * LANES + tl.arange(0, LANES)[:, None, None, None]) * 4 + tl.arange(0, 4)[None, None, None, :]
        t = group * N + tl.arange(0, N)[:, None]
        k = tl.arange(0, WIDTH)[None, :]
        is_real = tl.load(sequence_ptr + t, mask=t < tokens, other=-1) >= 0
        is_choice = is_real & (k < TOP_K)
        is_wrong = tl.zeros((N, 1), tl.int32)
        if table_ptr is not None:
            word = tl.load(token_ids_ptr + t, mask=is_real, other=0)
            listed = tl.load(table_ptr + word * TOP_K + k, mask=is_choice, other=0)
            exists = (listed >= 0) & (listed < E)
            is_wrong = tl.max(tl.where(exists, 0, 1), 1)[:, None]
            known = tl.where(exists, listed, 0).to(tl.int32)
        else:
            known = tl.load(bias_ptr + e, mask=e < E, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        token = group * N + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
        total = tl.zeros((KS, 16, N), tl.float32)
        for d in tl.static_range(SHARE):
            x = lane_tokens(x_ptr, K, token, tokens, chunk + d * KS, K, 8, 0, EVEN)
            total += multiply(weights[d], x, KS, 1, NB, BF16)
        whole = tl.sum(total, 0)
        part = part_ptr + group * (SPLIT * N * PADDED)
        n, r = tl.arange(0, N)[None, :], tile * 16 + tl.arange(0, 16)[:, None]
        tl.store(part + (split * N + n) * PADDED + r, whole, mask=r < PADDED + n * 0)
        tl.debug_barrier()  # all threads have stored before one counts; that releases their stores, acquires others'
        arrivals = counter_ptr + PADDED + 1 + group
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == SPLIT * TILES - 1:
            tl.store(arrivals, 0)  # for the next call
            at = part + tl.arange(0, N)[None, :, None, None] * PADDED + e
            u = tl.load(at, mask=e < E, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                u += tl.load(at + other * (N * PADDED), mask=e < E, other=0.0, cache_modifier=".cg")
            chosen, a = _pick(u, known, e, N, E, TOP_K, WIDTH, PADDED, table_ptr is not None)
            a = tl.where(is_choice, a, 0.0)
            weight = a / tl.sum(a, 1)[:, None] * scaling
            weight = tl.where(is_wrong > 0, float("nan"), weight)
            i = tl.arange(0, PADDED)
            if GROUPED:
                rank = tl.atomic_add(counter_ptr + chosen, 1, mask=is_choice, sem="relaxed")
            else:
                flat = tl.reshape(tl.where(is_choice, chosen, -1), (N * WIDTH,))
                j = tl.arange(0, N * WIDTH)
                before = (flat[:, None] == flat[None, :]) & (j[None, :] < j[:, None])
                rank = tl.reshape(tl.sum(before.to(tl.int32), 1), (N, WIDTH))
                count = tl.histogram(tl.where(flat >= 0, flat, 0), PADDED, mask=flat >= 0)
                first = tl.cumsum(count, 0) - count
                tl.store(first_ptr + i, first, mask=i < E)
                list_experts(active_ptr, i, count, first, many)
            at = t * TOP_K + k
            shown = (t < tokens) & (k < TOP_K)
            tl.store(ids_ptr + at, tl.where(is_choice, chosen, -1), mask=shown)
            tl.store(weights_ptr + at, tl.where(is_choice, weight, 0.0), mask=shown)
            tl.store(rank_ptr + at, tl.where(is_choice, rank, -1), mask=shown)
            place = chosen.to(tl.int64) * (tokens * TOP_K) + rank
            tl.store(token_ptr + place, t + k * 0, mask=is_choice)
            tl.store(weight_ptr + place, weight, mask=is_choice)
            if GROUPED:
                tl.debug_barrier()  # as above: all have counted
                if tl.atomic_add(counter_ptr + PADDED, 1, sem="acq_rel", scope="gpu") == groups - 1:
                    count = tl.load(counter_ptr + i, cache_modifier=".cg")
                    tl.store(counter_ptr + i, 0)
                    tl.store(counter_ptr + PADDED, 0)
                    first = tl.cumsum(count, 0) - count
                    tl.store(first_ptr + i, first, mask=i < E)
                    list_experts(active_ptr, i, count, first, many)
