"""float32 arithmetic of a hyper-connection that no compiler rearranges.

A token's bits must not depend on what else is compiled with a kernel: no product may be rounded or not before it is
added to something.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"
# ruff: noqa: RUF005, SIM300 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def inverse(x):
    """Return 1 / x for x of ordinary size, one unit in the last place off at most."""
    if _PLAIN:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def exponential(x):
    """Return e^x for x not above 0, as tl.exp does but for what that adds where a result is subnormal."""
    if _PLAIN:
        y = tl.exp(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def product(x, y):
    """Return x * y, rounded before anything is added to it, whatever else a compilation holds."""
    if _PLAIN:
        z = x * y
    else:
        z = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return z


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Return x float32 in DTYPE. Two values at once, which the compiler does not find where they go separate ways."""
    if DTYPE == tl.float32:
        y = x
    elif _PLAIN:
        y = x.to(DTYPE)
    else:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return y


@triton.jit
def pieces(x, COUNT: tl.constexpr):
    """Return x float32 as a sum of COUNT bf16 values, cut off: exact if COUNT is 3, or 1 and x a bf16 value."""
    found = ()
    for _ in tl.static_range(COUNT):
        bits = x.to(tl.int32, bitcast=True)
        x = x - (bits & -65536).to(tl.float32, bitcast=True)
        found = found + ((bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),)
    return found
