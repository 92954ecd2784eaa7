"""UcxxReceiver: the receiving half of UcxxTransport. It leads: nothing lands but what it has posted receives for."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.ucxx_link import (
    Ended,
    Grant,
    Hello,
    Leave,
    Link,
    LinkError,
    Message,
    Open,
    Stale,
    Ucxx,
    Welcome,
    Word,
    cause,
)

logger = logging.getLogger(__name__)

_FLUSH_S = 0.05


@dataclasses.dataclass(slots=True, eq=False)
class _Incoming:
    """A granted write. receives: those that have not completed, last piece first."""

    number: int
    receives: list[Any]
    notification: bytes


@dataclasses.dataclass(slots=True, eq=False)
class _Writer:
    """Somebody who writes to this transport. agent: "" until it has said Hello."""

    link: Link
    agent: str = ""
    incoming: list[_Incoming] = dataclasses.field(default_factory=list)


class UcxxReceiver:
    """A listener, the writers that came to it, and their granted writes. The owner of `worker` drives progress.

    pools: name to [bytes] uint8, a view of registered memory.  life: what a writer has to know to be heard.
    """

    def __init__(self, ucxx: Ucxx, worker: Any, *, pools: dict[str, NDArray[np.uint8]], life: bytes) -> None:
        self.writers: list[_Writer] = []
        self._ucxx, self._worker, self._pools, self._life = ucxx, worker, pools, life
        self._requests: list[int] = []
        self._arrived: list[tuple[str, bytes]] = []
        self._next_tag = 1
        self._listener: Any = ucxx.core.UCXListener.create(worker, 0, self._requests.append)

    @property
    def port(self) -> int:
        return int(self._listener.port)

    def take(self) -> list[tuple[str, bytes]]:
        """Return (agent, message) of the notifications since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def serve(self) -> bool:
        """Accept, answer and end what has come in. Returns whether there was anything."""
        has_moved = bool(self._requests)
        while self._requests:
            self._accept(self._requests.pop())
        for writer in list(self.writers):
            has_moved |= self._serve(writer)
        return has_moved

    def close(self) -> None:
        for writer in self.writers:
            self._flush(writer.link)
            writer.link.close()
        self.writers.clear()
        self._listener = None

    def _accept(self, request: int) -> None:
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
            self.writers.append(_Writer(Link(self._ucxx, endpoint)))
        except Exception as error:
            logger.info("a connection was not accepted: %s", cause(error))

    def _serve(self, writer: _Writer) -> bool:
        """Answer a writer, and end those of its writes whose last byte has come. Returns whether anything happened."""
        try:
            messages = writer.link.receive()
            for message in messages:
                self._answer(writer, message)
            ended = [incoming for incoming in writer.incoming if self._has_ended(writer, incoming)]
        except Exception as error:
            # Receives that were posted for it are dropped, and so cancelled: it can't send any more.
            logger.info("writer %s is gone: %s", writer.agent or "without a name", cause(error))
            writer.link.close()
            self.writers.remove(writer)
            return True
        for incoming in ended:
            writer.incoming.remove(incoming)
        return bool(messages or ended)

    def _answer(self, writer: _Writer, message: Message) -> None:
        match message:
            case Hello() if not writer.agent:
                if message.life != self._life:
                    writer.link.send(Stale())
                    self._flush(writer.link)
                    raise LinkError("it means a process that has ended")
                writer.agent = message.agent
                writer.link.send(Welcome())
            case Open() if writer.agent:
                self._grant(writer, message)
            case Word() if writer.agent:
                self._arrived.append((writer.agent, message.message))
            case Leave():
                raise LinkError("it has left")
            case _:
                raise LinkError(f"{type(message).__name__} was not expected from it")

    def _flush(self, link: Link) -> None:
        until = time.monotonic() + _FLUSH_S
        while not link.is_flushed and time.monotonic() < until:
            self._worker.progress_once()

    def _grant(self, writer: _Writer, wanted: Open) -> None:
        """Post a receive for every piece, or refuse the whole write."""
        for pool, offset, size in wanted.pieces:
            memory = self._pools.get(pool)
            if memory is None or size <= 0 or offset < 0 or offset + size > memory.size:
                held = "no such pool" if memory is None else f"the pool has {memory.size} bytes"
                writer.link.send(Ended(wanted.number, f"bytes {offset}..{offset + size} of pool {pool!r}: {held}"))
                return
        tag = self._next_tag
        self._next_tag += len(wanted.pieces)
        receives = [
            self._ucxx.tag_receive(self._worker, self._pools[pool][offset : offset + size], tag + index)
            for index, (pool, offset, size) in enumerate(wanted.pieces)
        ]
        writer.incoming.append(_Incoming(wanted.number, receives[::-1], wanted.notification))
        writer.link.send(Grant(wanted.number, tag))

    def _has_ended(self, writer: _Writer, incoming: _Incoming) -> bool:
        try:
            while incoming.receives and incoming.receives[-1].completed:
                incoming.receives[-1].check_error()
                incoming.receives.pop()
        except Exception as error:
            raise LinkError(f"a piece did not arrive: {cause(error)}") from error
        if incoming.receives:
            return False
        if incoming.notification:
            self._arrived.append((writer.agent, incoming.notification))
        writer.link.send(Ended(incoming.number))
        return True
