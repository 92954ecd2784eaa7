"""What the sampling kernels know of a row: its settings, its noise, its logits as adjusted, the order of its tokens.

The order of tokens is that of (value, lower id first), as one 64-bit integer, a token's number: no two are equal, so
that a cut is a number, too.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import GREEDY_TEMPERATURE
from kernels.triton_env import INTERPRETED

WORDS = 16  # int32 of a row's settings, see sampling_decode.pack_settings
NUM_WORDS = tl.constexpr(WORDS)
ALL = tl.constexpr(2**30)  # more tokens than there are
MOST_COUNTED = tl.constexpr(0x7FFF)
GAP = tl.constexpr(2**24)  # more than there are tokens: from one value to the next in numbers
HIGHEST = tl.constexpr(2**62)  # above all numbers
LOG2_E = tl.constexpr(1.4426950408889634)
_LOG_LOG2_E = tl.constexpr(0.36651292058166435)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_LOWEST = tl.constexpr(-1e30)
PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def _float(words, at):
    return tl.load(words + at).to(tl.float32, bitcast=True)


@triton.jit
def settings_of(words, vocab):
    """Return (temperature, k, p, least) of a row and whether it is greedy; k ALL, p 1 and least 0 for off."""
    temperature, p, least = _float(words, 0), _float(words, 2), _float(words, 3)
    k = tl.load(words + 1)
    is_greedy = ((temperature < _GREEDY) | (k == 1) | (p <= 0.0) | (least >= 1.0)).to(tl.int32)
    temperature = tl.where(is_greedy > 0, 1.0, temperature)
    k = tl.where((k > 0) & (k < vocab), k, ALL)
    return temperature, k, p, least, is_greedy


@triton.jit
def truncates(k, p, least, is_greedy):
    return (is_greedy == 0) & ((k < ALL) | (p < 1.0) | (least > 0.0))


@triton.jit
def _mix(x):
    """Mix 32-bit numbers, as sampling._mix_int."""
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return x ^ (x >> 16)


@triton.jit
def keys_of(words, position):
    """Return what a row's seed and position contribute to its noise."""
    low = _mix(_mix(tl.load(words + 7).to(tl.uint32, bitcast=True)) ^ position.to(tl.uint32))
    high = _mix(tl.load(words + 8).to(tl.uint32, bitcast=True))
    return low, _mix(high ^ low ^ (position >> 32).to(tl.uint32))


@triton.jit
def _log2(x):
    """Return log2 x of a normal number by the hardware's approximation: exact to 2^-22 of itself, near 1 of 1."""
    if PLAIN:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def exp2(x):
    """Return 2^x by the hardware's approximation, exact to 2^-22 of itself, 0 below 2^-126."""
    if PLAIN:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def gumbel(token, low, high):
    """Return the noise of tokens, as sampling.gumbel_noise."""
    x = _mix((token + 1).to(tl.uint32)) ^ low
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) + high
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    x = x ^ (x >> 16)
    # ((x >> 9) + 1/2) / 2^23, from a float of 1 to 2 with these bits; all of it is exact.
    u = ((x >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - 2.0**-24)
    # -log2 u. Noise that wins comes from u near 1, where nothing would be left of the approximation: a series there.
    v = 1.0 - u
    near = LOG2_E + v * (LOG2_E / 2 + v * (LOG2_E / 3 + v * (LOG2_E / 4 + v * (LOG2_E / 5))))
    exponential = tl.where(v < 0.0625, v * near, -_log2(u))
    # -log of it, and of what a logarithm to the base of 2 has too much.
    return _LOG_LOG2_E - 0.6931471805599453 * _log2(exponential)


@triton.jit
def adjust(x, token, first, inside, words, rows, bias_ptr, history_ptr, mask_ptr, vocab):
    """Return logits x with bias, penalties and mask.   rows: (of history, of bias, of masks), -1 for none.

    first: of every run of tokens that share a word of a mask the first, in a shape that is stretched to that of x.
    """
    history_row, bias_row, mask_row = rows
    if bias_row >= 0:
        x += tl.load(bias_ptr + bias_row.to(tl.int64) * vocab + token, mask=inside, other=0.0)
    if history_row >= 0:
        presence, frequency, repetition = _float(words, 4), _float(words, 5), _float(words, 6)
        seen = tl.load(history_ptr + history_row.to(tl.int64) * vocab + token, mask=inside, other=0).to(tl.int32)
        count = (seen & MOST_COUNTED).to(tl.float32)
        factor = tl.where(x > 0.0, tl.math.div_rn(1.0, repetition), repetition)
        x = tl.where(seen != 0, x * factor, x)
        x = x - frequency * count - tl.where(count > 0.0, presence, 0.0)
    if mask_row >= 0:
        width = (vocab + 31) // 32
        word = tl.load(mask_ptr + mask_row.to(tl.int64) * width + first // 32, mask=first < vocab, other=0)
        allowed = inside & (((word >> (token % 32)) & 1) != 0)
        x = tl.where(allowed, tl.where(x < _LOWEST, _LOWEST, x), -float("inf"))
    return x


@triton.jit
def key_of(value):
    """Return integers that order like values."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(key):
    """Return the value with this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def number_below(value):
    """Return the number that is not above those of all tokens with this value."""
    return key_of(value).to(tl.int64) << 24


@triton.jit
def number_of(value, token):
    """Return numbers that order like (value, lower token first)."""
    return number_below(value) + (GAP - 1 - token)


@triton.jit
def value_of(number):
    """Return the value of tokens with this number."""
    return float_of((number >> 24).to(tl.int32))


@triton.jit
def token_of(number):
    """Return the token with this number."""
    return ((number ^ -1) & (GAP - 1)).to(tl.int32)
