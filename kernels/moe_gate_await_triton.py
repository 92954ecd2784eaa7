"""Waiting for what other programs of the gate store: a thread asks for its own words until they are there.

No fence is needed: a word is its own sign that it has come, scores by not being 0, counts by the step's number. The
interpreter, which runs programs in order and has no assembly, reads them once.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)


def _await_scores(n: int) -> str:
    """Return assembly that reads n times eight words, 128 bytes apart, until none of them is 0.

    Operands: the words, n addresses, n numbers of lanes' words from here on that are to come (32 a word; others: 1.0),
    and what has the right layout for the compiler.
    """
    words, places, left = range(8 * n), range(8 * n, 9 * n), range(9 * n, 10 * n)
    lines = [f".reg .pred again, p<{8 * n}>;", f".reg .b32 m<{8 * n}>;"]
    lines += [f"setp.gt.s32 p{i}, ${left[i // 8]}, {32 * (i % 8)};" for i in words]
    lines += [f"mov.b32 ${i}, 0x3F800000;" for i in words]
    lines += ["ASK:"]
    lines += [f"@p{i} ld.relaxed.gpu.global.b32 ${i}, [${places[i // 8]} + {128 * (i % 8)}];" for i in words]
    lines += [f"min.u32 m{i}, ${2 * i}, ${2 * i + 1};" for i in range(4 * n)]
    lines += [f"min.u32 m{4 * n + i}, m{2 * i}, m{2 * i + 1};" for i in range(4 * n - 1)]
    return "\n".join(["{", *lines, f"setp.eq.u32 again, m{8 * n - 2}, 0;", "@again bra ASK;", "}"])


def _operands(n: int) -> str:
    return ",".join(["=&r"] * (8 * n) + ["l"] * n + ["r"] * n + ["r"])


_ONE, _TWO = tl.constexpr(_await_scores(1)), tl.constexpr(_await_scores(2))
_OF_ONE, _OF_TWO = tl.constexpr(_operands(1)), tl.constexpr(_operands(2))

# Read two pairs of words until their second ones are $3, if $4 isn't 0; give the first ones, else 0.
_COUNTS = tl.constexpr("""{
    .reg .pred wanted, again;
    .reg .b64 a, b;
    .reg .b32 step, other;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 step, $3;
    mov.b32 other, $3;
    setp.ne.s32 wanted, $4, 0;
ASK:
    @wanted ld.relaxed.gpu.global.v2.b64 {a, b}, [$2];
    @wanted mov.b64 {$0, step}, a;
    @wanted mov.b64 {$1, other}, b;
    setp.ne.u32 again, step, $3;
    @again bra ASK;
    setp.ne.u32 again, other, $3;
    @again bra ASK;
}""")


@triton.jit
def await_scores(at, left, layout, N: tl.constexpr):
    """Return 8 N tensors of words: at N addresses and every 32 words from there, once they are stored."""
    if _PLAIN:
        words = ()
        for i in tl.static_range(8 * N):
            words += (tl.load(at[i // 8] + i % 8 * 32, mask=left[i // 8] > i % 8 * 32, other=0x3F800000),)
    elif N == 1:
        words = tl.inline_asm_elementwise(
            _ONE, _OF_ONE, [at[0].to(tl.int64), left[0], layout],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            _TWO, _OF_TWO, [at[0].to(tl.int64), at[1].to(tl.int64), left[0], left[1], layout],
            dtype=(
                tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32,
                tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32,
            ),
            is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def await_counts(at, wanted, step, layout):
    """Return the lower halves of words of 8 bytes, two at each address, once their upper halves are `step`; else 0."""
    if _PLAIN:
        a = tl.load(at, mask=wanted, other=0).to(tl.int32)
        b = tl.load(at + 1, mask=wanted, other=0).to(tl.int32)
    else:
        a, b = tl.inline_asm_elementwise(
            _COUNTS, "=&r,=&r,l,r,r,r", [at.to(tl.int64), step, wanted.to(tl.int32), layout],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return a, b
