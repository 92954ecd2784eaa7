"""Operands of linear layers as the tensor cores want them: weights and tokens loaded into a warp's registers, widened.

Lane t of a quad holds 16 consecutive bytes of a row of weights, and the same channels of x: the order of channels
inside a product is free as long as both operands agree.

An e4m3 weight becomes bf16, exactly. A float32 operand is three bf16 whose sum it is; of their products those below
2^-24 of the largest are left out.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

FP8, BF16, FP32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_PLAIN = tl.constexpr(INTERPRETED)

# Two words of four codes become eight bf16, by way of f16 and float32: four instructions for two.
_CODES = tl.constexpr("""{
    .reg .b16 a, b, c, d, low, high;
    .reg .b32 pair;
    .reg .f32 x, y;
    mov.b32 {a, b}, $4;
    mov.b32 {c, d}, $5;
    cvt.rn.f16x2.e4m3x2 pair, a;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.rn.f16x2.e4m3x2 pair, b;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    cvt.rn.bf16x2.f32 $1, y, x;
    cvt.rn.f16x2.e4m3x2 pair, c;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    cvt.rn.bf16x2.f32 $2, y, x;
    cvt.rn.f16x2.e4m3x2 pair, d;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    cvt.rn.bf16x2.f32 $3, y, x;
}""")

# The same for two.
_TWO_CODES = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 pair;
    .reg .f32 x, y;
    cvt.rn.f16x2.e4m3x2 pair, $1;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    cvt.rn.bf16x2.f32 $0, y, x;
}""")


@triton.jit
def widen(codes):
    """Return e4m3 codes as bf16. The compiler's own way, straight from f16, takes a slow instruction for each."""
    if _PLAIN:
        w = codes.to(tl.bfloat16)
    else:
        bits = codes.to(tl.uint8, bitcast=True)
        w = tl.inline_asm_elementwise(_TWO_CODES, "=r,h", [bits], dtype=tl.bfloat16, is_pure=True, pack=2)
    return w


@triton.jit
def lane_weights(
    w_ptr, row, chunk, onward, wanted, rows, channels, SHIFT: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return rows [8, W, R, 2] of w, 128 bytes each at chunks [W] + onward: [4, 8, W, R, 2, step 2, 16 bytes].

    SHIFT: channels of the first chunk that lie before the weight's first one.
    """
    L: tl.constexpr = 8 if KIND == BF16 else 4
    UNIT: tl.constexpr = 4 if KIND == FP8 else 1
    # Dimensions in the order in which the compiler hands them out: lanes, warps, then registers, the last one excepted.
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    s = tl.arange(0, 2)[None, None, None, None, None, :]
    at = ((chunk[None, None, :, None, None, None] * 2 + s) * 4 + t) * L - SHIFT // UNIT
    row = row[None, :, :, :, :, None]
    at, row = tl.broadcast(at, row)
    words = channels // UNIT
    place = (row * words + at)[:, :, :, :, :, :, None] + tl.arange(0, L)[None, None, None, None, None, None, :]
    w_ptr += onward * (8 * L)
    if EVEN:
        w = tl.load(w_ptr + place, cache_modifier=".cg")
    else:
        at += onward * (8 * L)
        live = (at >= 0) & (at < tl.where(wanted & (row < rows), words, 0))
        w = tl.load(w_ptr + place, mask=live[:, :, :, :, :, :, None], other=0, cache_modifier=".cg")
    return w


@triton.jit
def _widen(words, W: tl.constexpr, R: tl.constexpr):
    """Return the left operand [W, 16 R, 128] bf16 of words of four e4m3 codes [4, 8, W, R, 2, 2, 4]."""
    if _PLAIN:
        shift = tl.arange(0, 4)[None, None, None, None, None, None, None, :] * 8
        codes = (words[:, :, :, :, :, :, :, None] >> shift) & 255
        w = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _CODES, "=r,=r,=r,=r,r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
        # [.., two words 2, which code of a register 2, register of a word 2, word 2]
        w = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (4, 8, W, R, 2, 2, 2, 2, 2, 2))
        w = tl.permute(w, (0, 1, 2, 3, 4, 5, 6, 9, 8, 7))
    w = _left(w, W, R, 4)
    if not _PLAIN:  # as row_load.keep
        w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=tl.bfloat16, is_pure=False, pack=2)
    return w


@triton.jit
def _left(w, W: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Return the left operand [W, 16 R, 32 P] of [4, 8, W, R, 2, 2, P, 2, 2], P products a step."""
    w = tl.permute(tl.reshape(w, (4, 8, W, R, 2, 2, P, 2, 2)), (2, 3, 4, 1, 5, 6, 7, 0, 8))
    return tl.reshape(w, (W, 16 * R, 32 * P))


@triton.jit
def _right(x, W: tl.constexpr, NB: tl.constexpr, P: tl.constexpr):
    """Return the right operand [W, 32 P, 8 NB] of [4, 8, W, NB, 2, .., ..]."""
    x = tl.permute(tl.reshape(x, (4, 8, W, NB, 2, P, 2, 2)), (2, 4, 5, 6, 0, 7, 3, 1))
    return tl.reshape(x, (W, 32 * P, 8 * NB))


@triton.jit
def _thirds(x):
    """Return three bf16 whose sum is x, float32; NaN if x is infinite."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def lane_tokens(
    x_ptr, x_stride, token, tokens, chunk, channels, C: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return channels of tokens [8, NB] at chunks [W]: [4, 8, W, NB, step 2, C / V, V], V channels in 16 bytes."""
    V: tl.constexpr = min(C, 128 // x_ptr.dtype.element_ty.primitive_bitwidth)
    t = tl.arange(0, 4)[:, None, None, None, None]
    s = tl.arange(0, 2)[None, None, None, None, :]
    at = ((chunk[None, None, :, None, None] * 2 + s) * 4 + t) * C - SHIFT
    token = token[None, :, None, :, None]
    at, token = tl.broadcast(at, token)
    live = token < tokens
    if not EVEN:
        live = live & (at >= 0) & (at < channels)
    v = tl.arange(0, C // V)[:, None] * V + tl.arange(0, V)[None, :]
    place = (token * x_stride + at)[:, :, :, :, :, None, None] + v[None, None, None, None, None, :, :]
    return tl.load(x_ptr + place, mask=live[:, :, :, :, :, None, None], other=0.0)


@triton.jit
def lane_gamma(
    gamma_ptr, chunk, channels, C: tl.constexpr, SHIFT: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return the norm's weight in the order of lane_tokens: [4, 1, W, 1, 2, C / V, V]."""
    t = tl.arange(0, 4)[:, None, None, None, None]
    s = tl.arange(0, 2)[None, None, None, None, :]
    at = ((chunk[None, None, :, None, None] * 2 + s) * 4 + t) * C - SHIFT
    v = tl.arange(0, C // V)[:, None] * V + tl.arange(0, V)[None, :]
    place = at[:, :, :, :, :, None, None] + v[None, None, None, None, None, :, :]
    if EVEN:
        gamma = tl.load(gamma_ptr + place)
    else:
        gamma = tl.load(gamma_ptr + place, mask=(place >= 0) & (place < channels), other=0.0)
    return gamma


@triton.jit
def product(w, x, total):
    """Return total + w x of bf16 or float32 operands: float32 sums of exact products, the smallest first."""
    if w.dtype == tl.float32:
        u, v, z = _thirds(w)
        if x.dtype == tl.float32:
            a, b, c = _thirds(x)
            total = tl.dot(z, a, total)
            total = tl.dot(v, b, total)
            total = tl.dot(u, c, total)
            total = tl.dot(v, a, total)
            total = tl.dot(u, b, total)
            total = tl.dot(u, a, total)
        else:
            total = tl.dot(z, x, total)
            total = tl.dot(v, x, total)
            total = tl.dot(u, x, total)
    elif x.dtype == tl.float32:
        a, b, c = _thirds(x)
        total = tl.dot(w, c, total)
        total = tl.dot(w, b, total)
        total = tl.dot(w, a, total)
    else:
        total = tl.dot(w, x, total)
    return total


@triton.jit
def multiply(w, x, W: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, KIND: tl.constexpr):
    """Return [W, 16 R, 8 NB] float32: what lane_weights gave times what lane_tokens gave, without scales."""
    P: tl.constexpr = 4 if KIND == FP8 else (2 if KIND == BF16 else 1)
    left = _widen(w, W, R) if KIND == FP8 else _left(w, W, R, P)
    return product(left, _right(x, W, NB, P), tl.zeros((W, 16 * R, 8 * NB), tl.float32))


@triton.jit
def weigh(x, gamma, squares):
    """Return x times the norm's weight, rounded to x's dtype, and squares plus those of x over all but its lanes."""
    wide = x.to(tl.float32)
    squares += tl.sum(tl.sum(tl.sum(wide * wide, 6), 5), 4)
    if _PLAIN or x.dtype == tl.float32:
        x = (wide * gamma.to(tl.float32)).to(x.dtype)
    else:
        x *= gamma.to(x.dtype)
    return x, squares
