"""Packed rows as tiles of keys for kernels of many tokens: rows are read whole, none masked, the tail as last group.

Other than in row_load.py no group of channels is free to carry a verdict: it is added to the scores.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_load import keep, to_f16, unpack_f16
from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def load_queries(at, is_query, R: tl.constexpr, WIDTH: tl.constexpr):
    """Return the WIDTH channels from pointers at [R] on as f16 [R, WIDTH]; zeros for what is no query."""
    q = tl.load(at[:, None] + tl.arange(0, WIDTH)[None, :], mask=is_query[:, None], other=0.0)
    return keep(to_f16(q.to(tl.float32)))


@triton.jit
def anew(x):
    """Return an integer x as something that is computed from here on, not before a loop and kept in registers."""
    if not _PLAIN:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def settle(at, scale_at, is_key, wrong, own, D: tl.constexpr):
    """Return (at, scales, wrong) of located keys: `own`, with scales of 0, for what is no key, or wrong.

    own: a row that the queries see.   wrong: those, too, that have a scale beyond f16.
    """
    readable = is_key & (wrong == 0)
    scales = tl.load(scale_at, mask=readable, other=0)
    # Bytes above 134, eight at a time: bit 7 is set, and adding 121 to the rest carries into it.
    high = (scales & 0x7F7F7F7F7F7F7F7F) + 0x7979797979797979
    high &= scales & (0x0080808080808080 >> (64 - D // 8))
    return tl.where(readable, at, own), scales, is_key & (wrong | (high != 0))


@triton.jit
def read_codes(at, D: tl.constexpr):
    """Return words of four codes [N, D // 64, 16]; in place of the last group, the tail's, the one before it."""
    g = tl.arange(0, D // 64)
    back = tl.where(g == D // 64 - 1, 1, 0)
    word = (g - back)[:, None] * 16 + tl.arange(0, 16)[None, :]
    return tl.load(at[:, None, None] + word[None, :, :])


@triton.jit
def read_tail(at, D: tl.constexpr):
    """Return the tail's words [N, 2, 16]: a lane has the 16 channels that it has of each group of codes."""
    j = tl.arange(0, 16)[None, :]
    word = (D // 64 - 1) * 16 + j // 4 * 8 + tl.arange(0, 2)[:, None] * 4 + j % 4
    return tl.load(at[:, None, None] + word[None, :, :])


@triton.jit
def split_scales(scales, D: tl.constexpr):
    """Return the scales of a row's groups [N, D // 64] as float32, from words of one byte for each group, [N]."""
    g = tl.arange(0, D // 64)
    exponent = ((scales[:, None] >> (8 * g)[None, :]) & 255).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def unpack_keys(codes, tail, scale, N: tl.constexpr, D: tl.constexpr):
    """Return N keys as f16 [N, D] from scales [N, D // 64]; what f16 can't hold comes out as NaN."""
    G: tl.constexpr = D // 64
    g = tl.arange(0, G)
    k = tl.reshape(unpack_f16(codes, scale, N, G), (N, G, 64))
    even, odd = to_f16((tail << 16).to(tl.float32, bitcast=True)), to_f16((tail & -65536).to(tl.float32, bitcast=True))
    k_tail = tl.reshape(tl.join(even, odd), (N, 2, 4, 8))
    k_tail = tl.reshape(tl.permute(k_tail, (0, 2, 1, 3)), (N, 1, 64))
    return tl.reshape(tl.where((g == G - 1)[None, :, None], k_tail, k), (N, D))


@triton.jit
def verdict_of(is_key, wrong, N: tl.constexpr):
    """Return what to add to the scores of N keys: 0, -inf for none, NaN for a wrong one.

    By way of a sum, so that the compiler moves it to the scores' layout and does not compute all it comes from there.
    """
    verdict = tl.where(is_key, tl.where(wrong, float("nan"), 0.0), -float("inf"))
    return tl.sum(tl.where(tl.arange(0, 2)[None, :] == 0, verdict[:, None], 0.0), 1)
