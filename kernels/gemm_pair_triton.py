"""Two linear layers of one x in one launch, for gemm_pair.py: programs of the first come first, then the second's."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm_few_triton import few_share
from kernels.gemm_triton import many_share
from kernels.launch_order_triton import CHAIN

# Never turned into constants or hints.
INTEGERS = ("tokens", "splits_a", "splits_b", "blocks_a", "blocks_b")


@triton.jit(do_not_specialize=INTEGERS)
def few_pair_kernel(
    x_ptr, tokens, x_stride, out_a, w_a, scale_a, part_a, counter_a, stride_a, rows_a, pieces_a, blocks_a, splits_a,
    out_b, w_b, scale_b, part_b, counter_b, stride_b, rows_b, pieces_b, blocks_b, splits_b,
    NB: tl.constexpr,
    KIND_A: tl.constexpr, R_A: tl.constexpr, KS_A: tl.constexpr, RS_A: tl.constexpr, DEPTH_A: tl.constexpr,
    SHARES_A: tl.constexpr, ONCE_A: tl.constexpr, EVEN_A: tl.constexpr, LEAN_A: tl.constexpr,
    KIND_B: tl.constexpr, R_B: tl.constexpr, KS_B: tl.constexpr, RS_B: tl.constexpr, DEPTH_B: tl.constexpr,
    SHARES_B: tl.constexpr, ONCE_B: tl.constexpr, EVEN_B: tl.constexpr, LEAN_B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs of both, 1, tokens). Constants as few_kernel's, of each matrix."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < blocks_a * splits_a:
        few_share(
            out_a, x_ptr, w_a, scale_a, None, part_a, counter_a, tokens, x_stride, stride_a, 0.0, rows_a, pieces_a, 0,
            tl.program_id(1), program % blocks_a, blocks_a, program // blocks_a, splits_a,
            0, KIND_A, R_A, KS_A, RS_A, NB, DEPTH_A, SHARES_A, ONCE_A, EVEN_A, LEAN_A, None, CHAIN, PDL,
        )  # fmt: skip
    else:
        program -= blocks_a * splits_a
        few_share(
            out_b, x_ptr, w_b, scale_b, None, part_b, counter_b, tokens, x_stride, stride_b, 0.0, rows_b, pieces_b, 0,
            tl.program_id(1), program % blocks_b, blocks_b, program // blocks_b, splits_b,
            0, KIND_B, R_B, KS_B, RS_B, NB, DEPTH_B, SHARES_B, ONCE_B, EVEN_B, LEAN_B, None, CHAIN, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def many_pair_kernel(
    x_ptr, tokens, x_stride, channels, out_a, w_a, scale_a, part_a, counter_a, stride_a, rows_a, blocks_a, splits_a,
    out_b, w_b, scale_b, part_b, counter_b, stride_b, rows_b, blocks_b, splits_b,
    BLOCK_T: tl.constexpr,
    KIND_A: tl.constexpr, BLOCK_R_A: tl.constexpr, BLOCK_K_A: tl.constexpr, SHARES_A: tl.constexpr,
    EVEN_A: tl.constexpr,
    KIND_B: tl.constexpr, BLOCK_R_B: tl.constexpr, BLOCK_K_B: tl.constexpr, SHARES_B: tl.constexpr,
    EVEN_B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs of both, 1, tokens). Constants as many_kernel's, of each matrix."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < blocks_a * splits_a:
        many_share(
            out_a, x_ptr, None, w_a, scale_a, None, part_a, counter_a, tokens, x_stride, 0, stride_a, 0.0, rows_a,
            channels, 0, tl.program_id(1), program % blocks_a, blocks_a, program // blocks_a, splits_a,
            0, KIND_A, BLOCK_R_A, BLOCK_T, BLOCK_K_A, SHARES_A, EVEN_A, None, None, CHAIN, PDL,
        )  # fmt: skip
    else:
        program -= blocks_a * splits_a
        many_share(
            out_b, x_ptr, None, w_b, scale_b, None, part_b, counter_b, tokens, x_stride, 0, stride_b, 0.0, rows_b,
            channels, 0, tl.program_id(1), program % blocks_b, blocks_b, program // blocks_b, splits_b,
            0, KIND_B, BLOCK_R_B, BLOCK_T, BLOCK_K_B, SHARES_B, EVEN_B, None, None, CHAIN, PDL,
        )  # fmt: skip
