"""Link: one connection of the host lane, and the messages that are said over it.

A Unix socket of packets (SOCK_SEQPACKET): a message is taken whole or not at all, their order is kept, and the end of
either process shows at once. Cache bytes never travel here; they lie in the staging memory.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator

import msgspec
import numpy as np

from kv_transfer.host_pieces import Table

MAX_MESSAGE_BYTES = 128 << 10
MAX_NOTIFICATION_BYTES = 64 << 10
MAX_PIECES = 1024
_SEND_BUFFER_BYTES = 512 << 10
_PIECE_BYTES = 24
_HUNG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First word of a writer. agent: its own name.  life: that of the receiver it means to reach."""

    agent: str
    life: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The receiver is who the writer meant; the descriptor of the staging memory comes with it.

    knows_coming: whether it may be told Coming; who was built before that word was drops a writer that says it.
    """

    buffer_bytes: int
    num_buffers: int
    knows_coming: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No welcome, for reason `error`."""

    error: str


class Coming(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A write has begun: its first buffer will be full in a moment, sooner than a thread is woken."""


class Fill(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A buffer holds pieces of write `number`, end to end. pieces: see pack_pieces.

    is_last: no more comes of this write; `notification` is for when all of it is in place.
    """

    number: int
    buffer: int
    pieces: bytes
    is_last: bool
    notification: bytes


class Emptied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A buffer is free again. is_end: write `number` is in place, or, with an `error`, nothing more of it lands."""

    buffer: int
    number: int
    is_end: bool
    error: str = ""


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A notification without data."""

    message: bytes


Message = Hello | Welcome | Refused | Coming | Fill | Emptied | Word
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class LinkError(Exception):
    """The connection is of no use any more. The text is the cause."""


class HangUp(LinkError):
    """The other side has closed the connection, or its process has ended: it does nothing more."""


def pack_pieces(table: Table) -> bytes:
    """Encode [N, 3] int64, see host_pieces.Table."""
    return table.astype("<i8").tobytes()


def unpack_pieces(data: bytes) -> Table:
    """Raises LinkError if that is no list of pieces."""
    if not data or len(data) % _PIECE_BYTES:
        raise LinkError(f"{len(data)} bytes are no list of pieces")
    return np.frombuffer(data, "<i8").reshape(-1, 3).astype(np.int64, copy=False)


class Link:
    """One end. takes_descriptor: whether one may come in; others are closed unseen. Nothing here waits."""

    def __init__(self, connected: socket.socket, *, takes_descriptor: bool = False) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket = connected
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._control_bytes = socket.CMSG_LEN(struct.calcsize("i")) if takes_descriptor else 0
        self._descriptor = -1
        self._end = select.poll()
        self._end.register(connected, select.POLLRDHUP)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_hung_up(self) -> bool:
        """Whether the other side will say nothing more, though something said before may be unread."""
        return any(flags & _HUNG_UP for _, flags in self._end.poll(0))

    def send(self, message: Message, *, descriptor: int = -1) -> bool:
        """Say something. False: the other side leaves too much unread, nothing was said. Raises LinkError."""
        data = _encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise LinkError(f"{type(message).__name__} of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} can be said")
        try:
            if descriptor < 0:
                self._socket.send(data)
            else:
                socket.send_fds(self._socket, [data], [descriptor])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            raise HangUp("it has hung up") from None
        except OSError as error:
            raise LinkError(str(error)) from error
        return True

    def receive(self) -> Message | None:
        """Return the next message, None if there is none yet. Raises HangUp after the last, LinkError for nonsense."""
        try:
            size, control, flags, _ = self._socket.recvmsg_into(
                [self._buffer], self._control_bytes, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return self.receive()  # it closed without having read all; what it said before is still here
        except OSError as error:
            raise LinkError(str(error)) from error
        self._keep_descriptor(control)
        if size == 0:
            raise HangUp("it has hung up")
        if flags & socket.MSG_TRUNC:
            raise LinkError(f"no message of this transport: longer than {MAX_MESSAGE_BYTES} bytes")
        try:
            return _decoder.decode(memoryview(self._buffer)[:size])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LinkError(f"no message of this transport: {error}") from None

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yield the descriptor that came in, and close it. Raises LinkError if none has."""
        fd, self._descriptor = self._descriptor, -1
        if fd < 0:
            raise LinkError("the descriptor of the staging memory did not come with the welcome")
        try:
            yield fd
        finally:
            os.close(fd)

    def half_close(self) -> None:
        """Say nothing more, but hear the other side out."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._socket.close()

    def _keep_descriptor(self, control: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in control:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            for fd in array.array("i", data[: len(data) - len(data) % struct.calcsize("i")]):
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                self._descriptor = fd
