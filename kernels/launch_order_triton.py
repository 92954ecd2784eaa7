"""The three places at which a kernel keeps its order among launches; see launch_order.py."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

CHAIN, LEAD, ASIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def begin(ORDER: tl.constexpr, PDL: tl.constexpr):
    """At the beginning of every program: in the chain, let the next launch begin."""
    if PDL and ORDER == CHAIN:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_inputs(ORDER: tl.constexpr, PDL: tl.constexpr):
    """In every program, before it reads what the launch before may have written, and before it writes anything.

    What leads lets the next launch begin here, since that relies on what this one has waited for. So does what is
    aside: to the compiler it is a barrier like the wait, without which loads from before and behind it would mix, and
    take more registers than there are.
    """
    if PDL and ORDER != ASIDE:
        tl.extra.cuda.gdc_wait()
    if PDL and ORDER != CHAIN:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end(ORDER: tl.constexpr, PDL: tl.constexpr):
    """At the end of every program: a launch aside ends after the one before.

    One of its programs waits: the others make room for what comes next.
    """
    if PDL and ORDER == ASIDE:  # noqa: SIM102 - one condition is the compiler's, the other one the program's
        if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
            tl.extra.cuda.gdc_wait()
