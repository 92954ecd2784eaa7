"""Link: one connection of ucxx, and the messages that two transports say to each other over it.

ucxx is UCX for Python, the successor of the archived ucx-py. Its core objects are used, not its asyncio layer: whoever
owns the transport drives progress. Messages travel as a stream of frames (4 bytes length, then msgpack), so they keep
their order and need no tag; cache bytes travel as tagged messages beside them.

Traps, measured with ucxx 0.52:
- a request that is dropped is cancelled, and its buffer is not kept alive by it: both are held here until it completed;
- importing ucxx sets UCX_* variables in this process, among them one that makes UCX stage through CUDA memory: undone;
- sending to a dead endpoint raises nothing: only `alive` tells;
- what has come in and was not yet read is lost when the sender closes: hence Leave;
- a listener that has accepted anybody keeps its port until the process ends, whatever is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from typing import Any

import msgspec

MAX_FRAME_BYTES = 16 << 20
_LENGTH_BYTES = 4
_MAX_WAITING = 1024


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First word of a writer. agent: its own name.  life: that of the process it means to reach."""

    agent: str
    life: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The receiver is who the writer meant."""


class Stale(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It is not: the process that the writer meant has ended, and another has its port."""


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A write is asked for. number: the writer's.  pieces: (pool, offset in bytes, size in bytes) at the receiver."""

    number: int
    pieces: tuple[tuple[str, int, int], ...]
    notification: bytes


class Grant(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The receiver waits for the pieces, in order, at `tag` and following."""

    number: int
    tag: int


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All bytes of a write are in place; or they never will be, for reason `error`."""

    number: int
    error: str = ""


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A notification without data."""

    message: bytes


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Last word of a writer; the receiver, having read all before it, closes the connection."""


Message = Hello | Welcome | Stale | Open | Grant | Ended | Word | Leave
_decoder = msgspec.msgpack.Decoder(Message)


class LinkError(Exception):
    """The connection is of no use any more. The text is the cause."""


class Ucxx:
    """The parts of ucxx that are used. Raises ModuleNotFoundError if it is not installed.

    The core objects have no other public place than `ucxx._lib`; ucxx's own users import them from there.
    """

    def __init__(self) -> None:
        before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        try:
            self.core: Any = importlib.import_module("ucxx._lib.libucxx")
            self._array: Any = importlib.import_module("ucxx._lib.arr").Array
            self.address: Any = importlib.import_module("ucxx").get_address
            self._ucp: Any = importlib.import_module("libucx").load_library()[-1]
        finally:
            for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
                del os.environ[name]

    def tag_send(self, endpoint: Any, memory: Any, tag: int) -> Any:
        return endpoint.tag_send(self._array(memory), self.core.UCXXTag(tag))

    def tag_receive(self, worker: Any, memory: Any, tag: int) -> Any:
        return worker.tag_recv(self._array(memory), self.core.UCXXTag(tag))

    def stream_send(self, endpoint: Any, memory: Any) -> Any:
        return endpoint.stream_send(self._array(memory))

    def stream_receive(self, endpoint: Any, memory: Any) -> Any:
        return endpoint.stream_recv(self._array(memory))

    def lane(self, endpoint: Any) -> str:
        """Return the transports that UCX has in an endpoint, joined by "+"; "unknown" if it doesn't say."""
        entries = (_Transport * 32)()
        query = _Attributes(
            fields=_FIELD_TRANSPORTS, entries=entries, count=len(entries), size=ctypes.sizeof(_Transport)
        )
        if self._ucp.ucp_ep_query(ctypes.c_void_p(endpoint.handle), ctypes.byref(query)) != 0:
            return "unknown"
        names = sorted({entry.transport.decode() for entry in entries[: query.count] if entry.transport})
        return "+".join(names) or "unknown"


class _Transport(ctypes.Structure):
    """ucp_transport_entry_t of UCX 1.21."""

    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """ucp_ep_attr_t of UCX 1.21: only fields that `fields` names are touched."""

    _fields_ = (
        ("fields", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),
        ("remote", ctypes.c_char * 128),
        ("entries", ctypes.POINTER(_Transport)),
        ("count", ctypes.c_uint),
        ("size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_FIELD_TRANSPORTS = 1 << 3


class Link:
    """Both directions of one connection. Nothing here drives progress."""

    def __init__(self, ucxx: Ucxx, endpoint: Any) -> None:
        self.endpoint = endpoint
        self._ucxx = ucxx
        self._sends: list[tuple[Any, bytearray]] = []
        self._is_body = False
        self._expect(_LENGTH_BYTES)

    @property
    def is_flushed(self) -> bool:
        """Nothing said waits in this process any more."""
        self._sends = [send for send in self._sends if not send[0].completed]
        return not self._sends

    def send(self, message: Message) -> None:
        """Say something. Raises LinkError, or what ucxx raises, if that can't start."""
        body = msgspec.msgpack.encode(message)
        frame = bytearray(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        if not self.is_flushed and len(self._sends) >= _MAX_WAITING:
            raise LinkError(f"{len(self._sends)} messages wait to be taken")
        self._sends.append((self._ucxx.stream_send(self.endpoint, frame), frame))

    def receive(self) -> list[Message]:
        """Return what has come in, in order. Raises LinkError once the connection has broken, or for no message."""
        messages: list[Message] = []
        while self._request.completed:
            try:
                self._request.check_error()
            except Exception as error:
                if messages:
                    return messages  # the next call raises
                raise LinkError(self._death() or cause(error)) from error
            data = bytes(self._buffer)
            if self._is_body:
                try:
                    messages.append(_decoder.decode(data))
                except msgspec.DecodeError as error:
                    raise LinkError(f"no message of this transport: {error}") from None
            elif not 0 < int.from_bytes(data, "little") <= MAX_FRAME_BYTES:
                raise LinkError(f"no frame of this transport: {int.from_bytes(data, 'little')} bytes announced")
            self._is_body = not self._is_body
            self._expect(int.from_bytes(data, "little") if self._is_body else _LENGTH_BYTES)
        if not messages and (death := self._death()):
            raise LinkError(death)
        return messages

    def close(self) -> None:
        """End the connection, and with it all that is under way over it."""
        with contextlib.suppress(Exception):
            self.endpoint.close_blocking()

    def _expect(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._request = self._ucxx.stream_receive(self.endpoint, self._buffer)

    def _death(self) -> str:
        """Return why the connection has broken, "" if it has not. Its open receive then ends as a short message."""
        if self.endpoint.alive:
            return ""
        try:
            self.endpoint.raise_on_error()
        except Exception as error:
            return cause(error)
        return "the peer has closed the connection"


def cause(error: Exception) -> str:
    """Return an error's text, with its type unless it is ours."""
    return str(error) if isinstance(error, LinkError) else f"{type(error).__name__} {error}".strip()
