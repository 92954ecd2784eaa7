"""Shared-memory rings between a leader and its ranks, and the doorbells that wake either side.

Per rank the leader makes two rings (one a direction) in one anonymous memory file, and one pipe as the rank's doorbell;
one more pipe is its own. Nothing has a name in a file system, so a killed process leaves nothing behind: the
other side opens `/proc/<leader pid>/fd/<n>`, which needs the same user, as the shared memory lanes of UCX do.

A ring is a byte stream with one writer and one reader: messages are length-prefixed and may be larger than the ring.
Head and tail are 8-byte aligned counters, each stored by one side only, after the bytes they cover. (CPython
stores them with one instruction; x86 and the interpreter's own barriers keep the order, and the doorbell's system
call is a full barrier before anybody sleeps.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import threading
import time
from collections.abc import Callable

RING_BYTES = 1 << 20
_HEADER = 192  # head at 0, tail at 64, the writer's pulse at 128: a cache line each


class PeerGone(Exception):
    """The process at the other end has ended."""


class Ring:
    """One direction. `view` is _HEADER + capacity bytes of shared memory, zeroed when new."""

    def __init__(self, view: memoryview) -> None:
        self._capacity = len(view) - _HEADER
        self._head = view[0:8].cast("Q")  # bytes written so far
        self._tail = view[64:72].cast("Q")  # bytes read so far
        self._pulse = view[128:136].cast("Q")
        self._bytes = view[_HEADER:]
        self._partial = bytearray()

    def write(self, message: bytes, *, ring_bell: Callable[[], None], is_alive: Callable[[], bool]) -> None:
        """Append a message, waiting for room if need be. Raises PeerGone if the reader ends meanwhile."""
        data = memoryview(len(message).to_bytes(4, "little") + message)
        while data:
            head = self._head[0]
            room = self._capacity - (head - self._tail[0])
            if room == 0:
                ring_bell()
                if not is_alive():
                    raise PeerGone("the reader of the ring has ended")
                time.sleep(0.0005)
                continue
            at = head % self._capacity
            count = min(len(data), room, self._capacity - at)
            self._bytes[at : at + count] = data[:count]
            self._head[0] = head + count
            data = data[count:]
        ring_bell()

    def beat(self) -> None:
        """Writer: show that the process runs. It costs nothing and wakes nobody."""
        self._pulse[0] += 1

    @property
    def pulse(self) -> int:
        """Reader: how often the writer has beaten; the same number for long means that it is stopped."""
        return self._pulse[0]

    def read(self) -> list[bytes]:
        """Return the messages that are complete, in order; none is lost when one is still arriving."""
        while (tail := self._tail[0]) != (head := self._head[0]):
            at = tail % self._capacity
            count = min(head - tail, self._capacity - at)
            self._partial += self._bytes[at : at + count]
            self._tail[0] = tail + count
        messages: list[bytes] = []
        at = 0
        while len(self._partial) - at >= 4:
            end = at + 4 + int.from_bytes(self._partial[at : at + 4], "little")
            if len(self._partial) < end:
                break
            messages.append(bytes(self._partial[at + 4 : end]))
            at = end
        del self._partial[:at]
        return messages


class Doorbell:
    """A pipe: `ring` wakes whoever waits on `fd`. Rings that nobody has heard yet merge into one."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.fd, self._write_fd = read_fd, write_fd

    @classmethod
    def create(cls) -> Doorbell:
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(read_fd, write_fd)

    @classmethod
    def open(cls, path: str) -> Doorbell:
        """Open another process's pipe by its /proc path, for reading and writing."""
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(fd, fd)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of rings already
            os.write(self._write_fd, b"!")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass


class Waiter:
    """Sleeps until the doorbell rings, a watched process ends, or time is up."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._poll = select.poll()
        self._poll.register(bell.fd, select.POLLIN)
        self._pids: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """From now on `wait` also returns when this process ends."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError as e:
            raise PeerGone(f"process {pid} has ended") from e
        self._pids[fd] = pid
        self._poll.register(fd, select.POLLIN)

    def nap(self, timeout_s: float) -> None:
        """Sleep until the doorbell rings, or so long: less than a millisecond, too, which `wait` would round up."""
        if select.select([self._bell.fd], [], [], timeout_s)[0]:
            self._bell.hush()

    def has_ended(self, pid: int) -> bool:
        """Return whether a process that was watched has ended; `wait` says it once all the same."""
        fds = [fd for fd, known in self._pids.items() if known == pid]
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return not fds or bool(poll.poll(0))

    def wait(self, timeout_s: float) -> list[int]:
        """Return the pids that have ended (once each)."""
        ended = []
        for fd, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if fd == self._bell.fd:
                self._bell.hush()
            else:
                self._poll.unregister(fd)
                os.close(fd)
                ended.append(self._pids.pop(fd))
        return ended


class Channel:
    """Both rings between the leader and one rank, seen from one end. Sending is safe from several threads."""

    def __init__(self, outgoing: Ring, incoming: Ring, peer_bell: Doorbell) -> None:
        self._outgoing, self._incoming, self._peer_bell = outgoing, incoming, peer_bell
        self._lock = threading.Lock()
        self.is_peer_alive: Callable[[], bool] = lambda: True

    def send(self, message: bytes) -> None:
        """Raises PeerGone if the peer has ended and the ring is full."""
        with self._lock:
            self._outgoing.write(message, ring_bell=self._peer_bell.ring, is_alive=self.is_peer_alive)

    def receive(self) -> list[bytes]:
        return self._incoming.read()

    def beat(self) -> None:
        self._outgoing.beat()

    @property
    def peer_pulse(self) -> int:
        return self._incoming.pulse


class LeaderEnd:
    """What the leader makes: memory, pipes and channels for `num_ranks` ranks. `address` tells ranks where."""

    def __init__(self, num_ranks: int) -> None:
        self.bell = Doorbell.create()
        self.channels: list[Channel] = []
        size = _HEADER + RING_BYTES
        ranks = []
        for rank in range(num_ranks):
            fd = os.memfd_create(f"isthmus-ring-{rank}", os.MFD_CLOEXEC)
            os.ftruncate(fd, 2 * size)
            view = memoryview(mmap.mmap(fd, 2 * size))
            bell = Doorbell.create()
            self.channels.append(Channel(Ring(view[:size]), Ring(view[size:]), bell))
            ranks.append({"ring": fd, "bell": bell.fd})
        self.address: dict[str, object] = {"pid": os.getpid(), "bell": self.bell.fd, "ranks": ranks}


def open_rank_end(address: dict[str, object], rank: int) -> tuple[Channel, Doorbell]:
    """Return the channel and own doorbell of `rank`. Raises PeerGone if the leader has ended."""
    pid, ranks = address["pid"], address["ranks"]
    assert isinstance(ranks, list)
    base = f"/proc/{pid}/fd"
    try:
        fd = os.open(f"{base}/{ranks[rank]['ring']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            view = memoryview(mmap.mmap(fd, 0))
        finally:
            os.close(fd)
        leader_bell = Doorbell.open(f"{base}/{address['bell']}")
        own_bell = Doorbell.open(f"{base}/{ranks[rank]['bell']}")
    except PermissionError as e:
        raise PermissionError(
            f"rank {rank} may not open the rings of leader process {pid} under {base}: both must run as the same "
            "user in the same pid namespace"
        ) from e
    except FileNotFoundError as e:
        raise PeerGone(f"leader process {pid} has ended") from e
    half = len(view) // 2
    return Channel(Ring(view[half:]), Ring(view[:half]), leader_bell), own_bell
