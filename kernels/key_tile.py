"""Packed rows as tiles of D channels for kernels of many tokens: read whole, none masked, the tail as last group.

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
def load_queries(at, is_query, R: tl.constexpr, D: tl.constexpr):
    """Return rows of queries at [R] as f16 [R, D]; zeros for what is no query."""
    q = tl.load(at[:, None] + tl.arange(0, D)[None, :], mask=is_query[:, None], other=0.0)
    return keep(to_f16(q.to(tl.float32)))


@triton.jit
def anew(x):
    """Return integers x as something that the compiler computes from here on, not before a loop to keep for long."""
    if not _PLAIN:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def read_tile(at, scale_at, is_key, wrong, own, D: tl.constexpr):
    """Return (body, tail, scales, wrong) of located keys; of what is no key, or wrong, the row `own` times 0.

    own: a row that the queries see.   Every row is read, so no register needs a value in advance.   wrong: with those that have a scale beyond f16, too.
    """
    G: tl.constexpr = D // 64
    readable = is_key & (wrong == 0)
    at = tl.where(readable, at, own)
    scales = tl.load(scale_at, mask=readable, other=0)
    # Bytes above 134, eight at a time: bit 7 is set, and adding 121 to the rest carries into it.
    high = (scales & 0x7F7F7F7F7F7F7F7F) + 0x7979797979797979
    wrong = wrong | ((high & scales & (0x0080808080808080 >> (64 - 8 * G))) != 0)
    g = tl.minimum(tl.arange(0, G), G - 2)  # what the tail replaces is read as the group before it
    body = tl.load(at[:, None, None] + (g[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :])
    # A lane's eight words are those of the 16 channels that it has of each group.
    j = tl.arange(0, 16)[None, :]
    word = (G - 1) * 16 + j // 4 * 8 + tl.arange(0, 2)[:, None] * 4 + j % 4
    tail = tl.load(at[:, None, None] + word[None, :, :])
    return body, tail, scales, is_key & wrong


@triton.jit
def _any(bits):
    """Return whether any bit of x [N, .., ..] is set, [N]."""
    return tl.max(tl.max(bits.to(tl.uint32, bitcast=True), 2), 1) != 0


@triton.jit
def mend(body, tail, scales, wrong):
    """Return rows as read, but zeros for those that are wrong, hold NaN, or what f16 can't hold, and which these are.

    For tiles that several tokens share: a weight of 0 does not silence a NaN.
    """
    bits = (((body & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80) | wrong[:, None, None].to(tl.int32)  # NaN: all ones
    spoilt = _any(bits)
    bits = ((tail & 0x7FFF7FFF) + 0x38803880) & -0x7FFF8000  # bf16 from 65,536 on
    spoilt = spoilt | _any(bits)
    whole = tl.where(spoilt, 0, -1)
    return body & whole[:, None, None], tail & whole[:, None, None], tl.where(spoilt, 0, scales), spoilt


@triton.jit
def unpack_tile(body, tail, scales, N: tl.constexpr, D: tl.constexpr):
    """Return N rows as f16 [N, D]; what f16 can't hold comes out as NaN."""
    G: tl.constexpr = D // 64
    g = tl.arange(0, G)
    exponent = ((scales[:, None] >> (8 * g)[None, :]) & 255).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    k = tl.reshape(unpack_f16(body, scale, N, G), (N, G, 64))
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
