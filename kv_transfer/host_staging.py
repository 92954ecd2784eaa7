"""Staging: the memory of one connection of the host lane, seen by both processes, cut into buffers.

It has no name in any file system: the receiver makes it and hands its descriptor over; when neither maps it, it is
gone. The receiver's thread allocates the pages, so they lie on the NUMA node it is bound to: the writer's stores cross
the socket, and stores are posted where loads would wait.

A buffer can be held: a lock on the descriptor, which the other end sees without a connection, and which ends with the
process that holds it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct

from kv_transfer import memory_nodes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_BYTES = 1 << 34
_LOCK = struct.Struct("hhqqi0q")  # struct flock


class Staging:
    """A mapping of `num_buffers` buffers of `buffer_bytes` bytes."""

    def __init__(self, fd: int, *, buffer_bytes: int, num_buffers: int) -> None:
        """Map what `fd` stands for; the caller closes that descriptor.

        Raises ValueError if it is not the sealed memory that was announced: were it cut short later, whoever touches
        it would be killed. Raises OSError if it can't be mapped.
        """
        size = buffer_bytes * num_buffers
        if min(buffer_bytes, num_buffers) < 1 or size > _MAX_BYTES:
            raise ValueError(f"{num_buffers} buffers of {buffer_bytes} bytes are no staging memory")
        if os.fstat(fd).st_size < size or not _seals(fd) & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"the descriptor received is no sealed memory of {size} bytes")
        self.buffer_bytes, self.num_buffers = buffer_bytes, num_buffers
        self._memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # Opened anew: locks belong to what was opened, and `fd` itself is the same at both ends.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def num_bytes(self) -> int:
        return self.buffer_bytes * self.num_buffers

    def address(self, buffer: int) -> int:
        """Return where a buffer lies in this process."""
        return self._base + buffer * self.buffer_bytes

    def count_pages(self) -> memory_nodes.PageCount:
        """Ask the kernel on which NUMA nodes the memory lies."""
        return memory_nodes.count_pages(self._base, self.num_bytes)

    def hold(self, buffer: int) -> None:
        """Show the other end that a buffer is being emptied. Raises OSError if the system has no more locks."""
        self._lock(fcntl.F_WRLCK, buffer)

    def let_go(self, buffer: int) -> None:
        self._lock(fcntl.F_UNLCK, buffer)

    @property
    def is_held(self) -> bool:
        """Whether the other end holds any buffer."""
        wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, self.num_buffers, 0)
        return bool(_LOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, wanted))[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Unmap. No copy may be under way."""
        self._memory.close()
        os.close(self._fd)

    def _lock(self, kind: int, buffer: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, buffer, 1, 0))


def create(*, buffer_bytes: int, num_buffers: int) -> tuple[Staging, int]:
    """Allocate staging memory on the calling thread's NUMA node; return it, and a descriptor for the caller to close.

    Raises OSError if there is not enough memory.
    """
    fd = os.memfd_create("isthmus-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, buffer_bytes * num_buffers)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return Staging(fd, buffer_bytes=buffer_bytes, num_buffers=num_buffers), fd
    except BaseException:
        os.close(fd)
        raise


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0
