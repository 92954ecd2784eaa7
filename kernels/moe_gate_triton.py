"""The Triton kernel of moe_gate.py: what it computes is described there, the arrays that it writes in moe_routing.py.

Weights are the left operand and never touch shared memory (gemm_fragment_triton.py): a program has some experts, for a
group of tokens, and asks for all its weights before it waits for the kernel that writes x. What it finds goes to the
last programs, the routers, each of which routes eight tokens (moe_gate_route_triton.py).

Nobody counts who has come, and there are no fences: memory is zero where a score will be, no score is stored as zero,
and the router, its only reader, asks until it isn't, then puts the zero back. Programs wait only for those in front of
them, which the hardware starts first. Aside of another launch (launch_order.py) that holds as well: this one begins
when all programs of the other run, so they need no room that these hold, and wait for none of these.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated,operator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm_few_triton import few_share
from kernels.gemm_fragment_triton import BF16, FP8, lane_tokens, lane_weights, multiply
from kernels.launch_order_triton import CHAIN, await_inputs, begin, end
from kernels.moe_gate_route_triton import ROUTED, activate, prepare, route
from kernels.row_load import to_f16
from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
_MINUS_ZERO = tl.constexpr(-(2**31))


@triton.jit
def _zero_after_all():
    """Return 0.0 once all threads are here. The compiler doesn't know, so products that add to it come after it."""
    if _PLAIN:
        zero = 0.0
    else:
        zero = tl.inline_asm_elementwise(
            "{.reg .pred none; setp.ne.b32 none, $1, $1; bar.red.popc.u32 $0, 0, none;}", "=r,r", [tl.program_id(0)],
            dtype=tl.int32, is_pure=False, pack=1,
        ).to(tl.float32, bitcast=True)  # fmt: skip
    return zero


@triton.jit
def _products(
    weights, xs, zero, BEGIN: tl.constexpr, COUNT: tl.constexpr, KS: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """Return the sum of COUNT products, by halves: a tensor core takes long to add to what it has just given."""
    if COUNT <= 2:
        total = multiply(weights[BEGIN], xs[BEGIN], KS, 1, NB, BF16) + zero
        for d in tl.static_range(BEGIN + 1, BEGIN + COUNT):
            total += multiply(weights[d], xs[d], KS, 1, NB, BF16)
    else:
        HALF: tl.constexpr = COUNT // 2
        total = _products(weights, xs, zero, BEGIN, HALF, KS, NB)
        total += _products(weights, xs, zero, BEGIN + HALF, COUNT - HALF, KS, NB)
    return total


@triton.jit
def _convert(x_ptr, few_ptr, many_ptr, piece, size, CONVERTED: tl.constexpr):
    """Turn CONVERTED activations into f16, in the orders of expert_weights.to_pieces and to_products."""
    eight = piece * (CONVERTED // 8) + tl.arange(0, CONVERTED // 8)[:, None]
    i = tl.arange(0, 8)[None, :]
    to = eight * 8 + i
    chunk = eight // 8 * 64 + eight // 4 % 2 * 8
    x = tl.load(x_ptr + (chunk + eight % 4 * 16 + i), mask=to < size, other=0.0).to(tl.float32)
    tl.store(few_ptr + to, to_f16(x), mask=to < size)
    if many_ptr is not None:
        from_pairs = chunk + i // 2 * 16 + eight % 4 * 2 + i % 2
        x = tl.load(x_ptr + from_pairs, mask=to < size, other=0.0).to(tl.float32)
        tl.store(many_ptr + to, to_f16(x), mask=to < size)


@triton.jit(do_not_specialize=["tokens", "many"])
def gate_kernel(
    x_ptr, w_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr, rank_ptr, token_ptr,
    weight_ptr, first_ptr, active_ptr, part_ptr, count_ptr, step_ptr, few_ptr, many_ptr, tokens, many, scaling,
    E: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, NB: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr, CONVERTED: tl.constexpr, PADDED: tl.constexpr,
    ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 8 NB tokens, share of the channels, 16 experts), which convert activations, too; then routers.

    KS: warps that share a program's channels.   GROUPED: there is more than one router.   many: rows beyond which an
    expert has many.   part [SPLIT, tokens of all groups, PADDED]: zeros, again in the end.   count, step: see route.
    """
    begin(ORDER, PDL)
    gate_share(
        tl.program_id(0), x_ptr, w_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr,
        rank_ptr, token_ptr, weight_ptr, first_ptr, active_ptr, part_ptr, count_ptr, step_ptr, few_ptr, many_ptr,
        tokens, many, scaling, E, K, TOP_K, KS, NB, SPLIT, GROUPED, CONVERTED, PADDED, ORDER, PDL,
    )  # fmt: skip
    end(ORDER, PDL)


@triton.jit(do_not_specialize=["tokens", "many"])
def gate_beside_kernel(
    x_ptr, w_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr, rank_ptr, token_ptr,
    weight_ptr, first_ptr, active_ptr, part_ptr, count_ptr, step_ptr, few_ptr, many_ptr, tokens, many, scaling,
    out_ptr, layer_ptr, scale_ptr, out_stride, rows, pieces,
    E: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, NB: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr, CONVERTED: tl.constexpr, PADDED: tl.constexpr,
    LAYER_NB: tl.constexpr, R: tl.constexpr, LAYER_KS: tl.constexpr, RS: tl.constexpr, DEPTH: tl.constexpr,
    ONCE: tl.constexpr, EVEN: tl.constexpr, LEAN: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gate_kernel's programs; behind them those of a gated linear layer of e4m3 weights: see few_kernel.

    Routers wait for programs in front of them, and for none of the layer's.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    groups = (tokens + (8 * NB - 1)) // (8 * NB)
    ahead = groups * ((E + 15) // 16 * SPLIT) + (tokens + ROUTED - 1) // ROUTED
    program = tl.program_id(0)
    if program < ahead:
        gate_share(
            program, x_ptr, w_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr,
            rank_ptr, token_ptr, weight_ptr, first_ptr, active_ptr, part_ptr, count_ptr, step_ptr, few_ptr, many_ptr,
            tokens, many, scaling, E, K, TOP_K, KS, NB, SPLIT, GROUPED, CONVERTED, PADDED, CHAIN, PDL,
        )  # fmt: skip
    else:
        few_share(
            out_ptr, x_ptr, layer_ptr, scale_ptr, None, None, None, tokens, K, out_stride, 0.0, rows, pieces, 0,
            tl.program_id(1), program - ahead, tl.num_programs(0) - ahead, 0, 1,
            0, FP8, R, LAYER_KS, RS, LAYER_NB, DEPTH, 1, ONCE, EVEN, LEAN, LIMIT, CHAIN, PDL,
        )  # fmt: skip


@triton.jit
def gate_share(
    program, x_ptr, w_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr, rank_ptr, token_ptr,
    weight_ptr, first_ptr, active_ptr, part_ptr, count_ptr, step_ptr, few_ptr, many_ptr, tokens, many, scaling,
    E: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, NB: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr, CONVERTED: tl.constexpr, PADDED: tl.constexpr,
    ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a program of gate_kernel does."""
    N: tl.constexpr = 8 * NB
    ROWS: tl.constexpr = 16
    TILES: tl.constexpr = (E + ROWS - 1) // ROWS
    CHUNKS: tl.constexpr = K // 64
    SHARE: tl.constexpr = (CHUNKS + KS * SPLIT - 1) // (KS * SPLIT)
    EVEN: tl.constexpr = CHUNKS == SHARE * KS * SPLIT and E % ROWS == 0
    groups = (tokens + N - 1) // N
    programs, routers = groups * (TILES * SPLIT), (tokens + ROUTED - 1) // ROUTED
    router = program - programs
    if program < programs:
        # Neighbours share weights: of all groups, the same experts.
        group, tile, split = program % groups, program // groups % TILES, program // groups // TILES
        chunk = split * (SHARE * KS) + tl.arange(0, KS)
        half = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, 2)[None, None, None, :] * 8
        row = tl.broadcast_to(tile * ROWS + half, (8, KS, 1, 2))
        weights = ()
        for d in tl.static_range(SHARE):
            weights += (lane_weights(w_ptr, row, chunk, d * KS, True, E, K, 0, BF16, EVEN),)
        await_inputs(ORDER, PDL)
        token = group * N + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
        xs = ()
        for d in tl.static_range(SHARE):
            xs += (lane_tokens(x_ptr + d * (KS * 64), K, token, tokens, chunk, K - d * (KS * 64), 8, 0, EVEN),)
        zero = 0.0
        if NB <= 2:  # not before all have been asked for: the compiler would wait for the first ones in between
            zero = _zero_after_all()
        total = _products(weights, xs, zero, 0, SHARE, KS, NB)
        u = tl.sum(tl.reshape(tl.permute(total, (0, 2, 1)), (KS, N * ROWS)), 0)
        bits = (activate(u) if SPLIT == 1 else u).to(tl.int32, bitcast=True)
        bits = tl.where(bits == 0, _MINUS_ZERO, bits)
        i = tl.arange(0, N * ROWS)
        t = group * N + i // ROWS
        at = (split * (groups * N) + t) * PADDED + tile * ROWS + i % ROWS
        tl.store(part_ptr + at, bits, mask=t < tokens)
        for piece in range(program, (tokens * K + CONVERTED - 1) // CONVERTED, programs):
            _convert(x_ptr, few_ptr, many_ptr, piece, tokens * K, CONVERTED)
    else:
        known = prepare(bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, router, tokens, E, TOP_K, PADDED)
        await_inputs(ORDER, PDL)
        route(
            known, ids_ptr, weights_ptr, rank_ptr, token_ptr, weight_ptr, first_ptr, active_ptr, part_ptr, count_ptr,
            step_ptr, router, routers, tokens, groups * N, many, scaling, E, TOP_K, SPLIT, TILES * ROWS, GROUPED,
            PADDED, table_ptr is not None,
        )  # fmt: skip
