"""The kernel of one_shot.py, and the two instructions by which ranks hear of each other.

A flag is stored with release, loaded with acquire, both of system scope: what a rank has written before its flag, the
one that sees the flag finds. Nothing else orders memory between two GPUs behind PCIe, which carries no atomics: the
offline gate refuses a kernel for peers that has any. The interpreter has no assembly: it stores and asks plainly.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_env import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)

# Store $2 to address $1 if $3 isn't 0, by one warp: others hold the same lanes. $0 is 0.
_RAISE = tl.constexpr("""{
    .reg .pred mine, wanted;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.lt.u32 mine, thread, 32;
    setp.ne.and.s32 wanted, $3, 0, mine;
    @wanted st.release.sys.global.b32 [$1], $2;
    mov.b32 $0, 0;
}""")

# Load from address $1 until it is $2, if $3 isn't 0. $0 is $2 then.
_AWAIT = tl.constexpr("""{
    .reg .pred wanted, again;
    setp.ne.s32 wanted, $3, 0;
    mov.b32 $0, $2;
ASK:
    @wanted ld.acquire.sys.global.b32 $0, [$1];
    setp.ne.u32 again, $0, $2;
    @again bra ASK;
}""")


@triton.jit
def _raise_flags(addresses, epoch, is_wanted):
    """Store `epoch` to int64 addresses [32] where they are wanted; what the program has written is seen by then."""
    if _PLAIN:
        tl.store(addresses.to(tl.pointer_type(tl.int32)), epoch, mask=is_wanted)
    else:
        tl.inline_asm_elementwise(
            _RAISE, "=r,l,r,r", [addresses, epoch, is_wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _await_flags(addresses, epoch, is_wanted):
    """Return once `epoch` is at all int64 addresses [32] that are wanted."""
    if _PLAIN:
        pointers = addresses.to(tl.pointer_type(tl.int32))
        while tl.max((tl.load(pointers, mask=is_wanted, other=epoch) != epoch).to(tl.int32), 0) != 0:
            pass
    else:
        tl.inline_asm_elementwise(
            _AWAIT, "=&r,l,r,r", [addresses, epoch, is_wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["me"])
def one_shot_kernel(
    out_ptr, x_ptr, regions_ptr, epoch_ptr, size, flags_offset, me,
    COUNT: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p sums values p BLOCK and on of every rank, and has done so as often as epoch_ptr[p] says.

    regions_ptr [COUNT] int64: where each rank's region lies, as this one sees it.   flags_offset: bytes.
    """
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    is_value = at < size
    epoch = tl.load(epoch_ptr + program) + 1
    half = epoch & 1
    x = tl.load(x_ptr + at, mask=is_value, other=0.0)
    own_type = tl.pointer_type(x.dtype)
    for rank in tl.static_range(COUNT):
        there = tl.multiple_of(tl.load(regions_ptr + rank).to(own_type), 16)
        tl.store(there + (half * COUNT + me) * CAPACITY + at, x, mask=is_value)
    tl.debug_barrier()  # all of the program's values are stored before one warp raises the flags
    ranks = tl.arange(0, 32)
    is_peer = (ranks < COUNT) & (ranks != me)
    epochs = tl.zeros([32], tl.int32) + epoch
    flags = tl.load(regions_ptr + ranks, mask=ranks < COUNT, other=0) + flags_offset
    _raise_flags(flags + 4 * ((half * COUNT + me) * PROGRAMS + program), epochs, is_peer)
    region = tl.load(regions_ptr + me)
    _await_flags(region + flags_offset + 4 * ((half * COUNT + ranks) * PROGRAMS + program), epochs, is_peer)
    tl.debug_barrier()
    own = tl.multiple_of(region.to(own_type), 16) + half * COUNT * CAPACITY + at
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(COUNT):
        # Past the first-level cache, which knows nothing of what peers write.
        total += tl.load(own + rank * CAPACITY, mask=is_value, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out_ptr + at, total.to(x.dtype), mask=is_value)
    tl.store(epoch_ptr + program, epoch)
