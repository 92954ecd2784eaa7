"""The indexer's queries made ready, in Triton, as a launch or as part of another; formulas: indexer_decode.py."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.indexer_triton import FP8
from kernels.row_store import _e4m3_pairs, _magnitude, _scale_byte, _times_power_of_two, e2m1_code, load_rotation


@triton.jit
def _walsh_rows(x, B: tl.constexpr):
    """Return the 64 sums of each row of x [B, 64] with signs (-1)^popcount(i & j): eight along each axis."""
    both = tl.arange(0, 8)[:, None] & tl.arange(0, 8)[None, :]
    sign = 1.0 - 2.0 * ((both ^ (both >> 1) ^ (both >> 2)) & 1).to(tl.float32)
    x = tl.reshape(x, (B, 8, 8))
    y = tl.sum(x[:, :, None, :] * sign[None, :, :, None], 1)
    return tl.reshape(tl.sum(y[:, :, :, None] * sign[None, None, :, :], 2), (B, 64))


@triton.jit
def store_queries(
    x, weight, used, token, h, cos, sin, scale, out_ptr, out_weight_ptr,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, IS_FP8: tl.constexpr, HADAMARD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Turn, round and store heads h of a token: x [BLOCK_H, D], weight [BLOCK_H] float32, 0 where not used.

    cos, sin: of load_rotation, one group.   out: pairs of e4m3 codes in 16 bits, or f16.
    """
    c, pair = tl.arange(0, D), tl.arange(0, D // 2)
    e, o = tl.split(tl.reshape(x, (BLOCK_H, D // 2, 2)))
    turned = (pair >= (D - ROPE) // 2)[None, :]
    e, o = tl.where(turned, e * cos - o * sin, e), tl.where(turned, o * cos + e * sin, o)
    if HADAMARD:
        factor: tl.constexpr = 0.08838834764831845  # 128^-0.5
        e, o = _walsh_rows(e + o, BLOCK_H) * factor, _walsh_rows(e - o, BLOCK_H) * factor
    row = token.to(tl.int64) * H + h
    if IS_FP8:
        top, low, high = _e4m3_pairs(e, o)
        tl.store(
            out_ptr + row[:, None] * (D // 2) + pair[None, :], (low | (high << 8)).to(tl.int16), mask=(h < H)[:, None]
        )
    else:
        G: tl.constexpr = D // 32
        e, o = tl.reshape(e, (BLOCK_H * G, 16)), tl.reshape(o, (BLOCK_H * G, 16))
        amax = tl.max(tl.maximum(_magnitude(e), _magnitude(o)), 1)
        byte = _scale_byte(amax, 0x01C00000, 0x3FFFFF, 2)  # the bits of 6 * 2^-126
        exponent = (127 - byte)[:, None]
        low, high = e2m1_code(_times_power_of_two(e, exponent)), e2m1_code(_times_power_of_two(o, exponent))
        byte = tl.reshape(byte, (BLOCK_H, G))
        top = tl.max(byte, 1)
        # As keys are unpacked: magnitude bits stand for the value times 2^-14.
        lift = (tl.maximum(byte - top[:, None] + 29, 0) << 10).to(tl.int16).to(tl.float16, bitcast=True)
        lift = tl.reshape(tl.broadcast_to(lift[:, :, None], (BLOCK_H, G, 16)), (BLOCK_H * G, 16))
        low = (((low & 8) << 12) | ((low & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True) * lift
        high = (((high & 8) << 12) | ((high & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True) * lift
        values = tl.reshape(tl.join(low, high), (BLOCK_H, D))
        tl.store(out_ptr + row[:, None] * D + c[None, :], values, mask=(h < H)[:, None])
    bits = tl.where(top == 255, 0x7FC00000, top << 23)
    folded = weight * scale * bits.to(tl.float32, bitcast=True)
    tl.store(out_weight_ptr + row, tl.where(used, folded, 0.0), mask=h < H)


@triton.jit(do_not_specialize=["stride_q", "stride_w"])
def query_kernel(
    q_ptr, weight_ptr, out_ptr, out_weight_ptr, rotation_ptr, sequence_ptr, scale, stride_q, stride_w,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, HADAMARD: tl.constexpr,
    BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of a token; out as of store_queries.   stride_q: of 16 bytes."""
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, D)
    cos, sin = load_rotation(rotation_ptr + token * ROPE, D, D, ROPE)
    used = tl.where(tl.load(sequence_ptr + token) >= 0, h, H) < H
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PIECE: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    at = q_ptr + token.to(tl.int64) * stride_q * PIECE + h[:, None] * D + c[None, :]
    x = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + token.to(tl.int64) * stride_w + h, mask=used, other=0.0).to(tl.float32)
    store_queries(
        x, weight, used, token, h, cos, sin, scale, out_ptr, out_weight_ptr,
        H, D, ROPE, FORMAT == FP8, HADAMARD, BLOCK_H,
    )  # fmt: skip
