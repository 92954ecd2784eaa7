"""Waiting for what other programs of a launch store: words that are their own sign of having come.

Memory where words will be holds NONE, which no word is that gets stored; the only reader of a word asks for it until it
is something else, then puts NONE back for the next launch. No fence is needed, since no word says anything of others.
The interpreter, which runs programs in order and has no assembly, reads once.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,no-any-return"
# ruff: noqa: RUF005 (Triton knows no unpacking into a tuple)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

NONE = -1  # as float32, or as two bf16 values: NaN, of a kind that no operation of a GPU makes
_NONE = tl.constexpr(NONE)
_PLAIN = tl.constexpr(INTERPRETED)


@triton.constexpr_function
def _taking(n):
    """Return assembly that takes n times four words. Operands: the words, n addresses, n numbers: 0 if not wanted."""
    words = [f"{{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}}" for i in range(n)]
    lines = [f".reg .pred again, p<{n}>;", ".reg .b32 none;", f"mov.b32 none, {NONE};"]
    lines += [f"setp.ne.s32 p{i}, ${5 * n + i}, 0;" for i in range(n)]
    lines += [f"mov.b32 ${i}, 0;" for i in range(4 * n)]
    lines += ["ASK:"]
    lines += [f"@p{i} ld.relaxed.gpu.global.v4.b32 {words[i]}, [${4 * n + i}];" for i in range(n)]
    left = [f"${i}" for i in range(4 * n)]
    while len(left) > 1:  # a tree: its branches don't wait for each other
        names = [f"m{len(left)}_{i}" for i in range(len(left) // 2)]
        lines += [f".reg .b32 {', '.join(names)};"]
        lines += [f"max.u32 {name}, {left[2 * i]}, {left[2 * i + 1]};" for i, name in enumerate(names)]
        left = names + left[2 * len(names) :]
    lines += [f"setp.eq.u32 again, {left[0]}, none;", "@again bra ASK;"]
    lines += [f"@p{i} st.global.v4.b32 [${4 * n + i}], {{none, none, none, none}};" for i in range(n)]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _operands(n):
    return ",".join(["=&r"] * (4 * n) + ["l"] * n + ["r"] * n)


@triton.jit
def take(at, wanted, N: tl.constexpr):
    """Return 4 N tensors of words: four from each of N addresses on, a multiple of 16 bytes, once all are there.

    at, wanted: N tensors each, of pointers to int32 and of 0 where nothing is to come: words are 0 there. As many
    elements as threads, or threads would wait for one word after the other.
    """
    if _PLAIN:
        words = ()
        for i in tl.static_range(N):
            for j in tl.static_range(4):
                words = words + (tl.load(at[i] + j, mask=wanted[i] != 0, other=0),)
        for i in tl.static_range(4 * N):
            tl.device_assert(words[i] != _NONE, "a word has not come")
            tl.store(at[i // 4] + i % 4, words[i] * 0 + _NONE, mask=wanted[i // 4] != 0)
    else:
        args = ()
        for i in tl.static_range(N):
            args = args + (at[i].to(tl.int64),)
        for i in tl.static_range(N):
            args = args + (wanted[i],)
        words = tl.inline_asm_elementwise(
            _taking(N), _operands(N), args, dtype=(tl.int32,) * (4 * N), is_pure=False, pack=1
        )  # fmt: skip
    return words


@triton.jit
def put(at, words):
    """Store four words from each address on, a multiple of 16 bytes, at once."""
    if _PLAIN:
        for j in tl.static_range(4):
            tl.store(at + j, words[j])
    else:
        tl.inline_asm_elementwise(
            "{st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;}", "=r,l,r,r,r,r",
            [at.to(tl.int64), words[0], words[1], words[2], words[3]], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
