"""Which NUMA nodes memory lies on, and where new memory goes: set_mempolicy(2) and move_pages(2).

glibc wraps neither, and libnuma may be absent, so both are called by number. move_pages without targets moves nothing:
it tells where each page is. Nothing here knows what a binding ought to be; engine.numa_binding does.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import mmap
import os
import platform
from dataclasses import dataclass

_SET_MEMPOLICY, _MOVE_PAGES = {"x86_64": 238, "aarch64": 237}, {"x86_64": 279, "aarch64": 239}
_MPOL_BIND = 2
_MASK_BITS = 1024
_MOST_PAGES = 1 << 16
_TOUCHED_PAGES = 32  # where huge pages are on, each may bring 2 MiB with it


@dataclass(frozen=True, slots=True)
class PageCount:
    """Where the pages of one piece of memory lie.

    nodes: pages by node, of those that exist.   asked: pages that the kernel was asked for, of `total`; those in no
    node have not been touched yet.   error: why nothing is known; "" otherwise.
    """

    nodes: dict[int, int]
    asked: int
    total: int
    error: str = ""


def bind_new_memory(node: int) -> str:
    """Bind future pages of the calling thread, and of threads it starts, to `node`; return "" or why it was refused."""
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    words[node // 64] = 1 << (node % 64)
    error = _call(_SET_MEMPOLICY, _MPOL_BIND, words, ctypes.c_ulong(_MASK_BITS))
    return f"set_mempolicy(MPOL_BIND, node {node}): {error}" if error else ""


def count_pages(address: int, num_bytes: int, *, touch: bool = False) -> PageCount:
    """Ask where the pages of [address, address + num_bytes) of this process lie: all, or 65,536 spread over them.

    touch: first write a byte's own value back to 32 of those pages, so that they exist. Only for memory that nobody
    else writes meanwhile.
    """
    if num_bytes < 1:
        return PageCount({}, 0, 0)
    page = mmap.PAGESIZE
    first, end = address // page, -(-(address + num_bytes) // page)
    total = end - first
    asked = min(total, _MOST_PAGES)
    pages = [max(address, (first + index * total // asked) * page) for index in range(asked)]
    if touch:
        for place in pages[:: -(-asked // _TOUCHED_PAGES)]:
            byte = ctypes.c_ubyte.from_address(place)
            byte.value = byte.value
    addresses = (ctypes.c_void_p * asked)(*[place - place % page for place in pages])
    status = (ctypes.c_int * asked)()
    error = _call(_MOVE_PAGES, 0, ctypes.c_ulong(asked), addresses, None, status, 0)
    if error:
        return PageCount({}, asked, total, f"move_pages: {error}")
    counts = collections.Counter(status)
    return PageCount({node: counts[node] for node in sorted(counts) if node >= 0}, asked, total)


def count_fresh_pages(num_pages: int) -> PageCount:
    """Touch `num_pages` new pages on the calling thread, and ask where they lie."""
    page = mmap.PAGESIZE
    with mmap.mmap(-1, num_pages * page) as buffer:
        for index in range(num_pages):
            buffer[index * page] = 1
        anchor = ctypes.c_char.from_buffer(buffer)
        try:
            return count_pages(ctypes.addressof(anchor), num_pages * page)
        finally:
            del anchor  # or the mapping could not be closed


def _call(numbers: dict[str, int], *arguments: object) -> str:
    """Make a system call; return "" or the error's name and text."""
    number = numbers.get(platform.machine())
    if number is None:
        return f"unknown system call numbers on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments) >= 0:
        return ""
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"
