"""HostReceiver: the receiving half of HostTransport, a thread that empties buffers into the pools.

It sleeps while nothing comes in, and believes nothing that does: every piece is checked against its own pools before
the first one of its buffer is copied. What a writer has left in its buffers when it closes or dies is not copied any
more: by then the blocks may be promised to somebody else. At most the copy that is just under way still ends.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hmac
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kv_transfer import host_staging
from kv_transfer.host_copy import Copier
from kv_transfer.host_driver import CopyError
from kv_transfer.host_link import (
    Coming,
    Emptied,
    Fill,
    Hello,
    Link,
    LinkError,
    Message,
    Refused,
    Welcome,
    Word,
    unpack_pieces,
)
from kv_transfer.host_pieces import Copies, Table, copies_out
from kv_transfer.host_staging import Staging
from kv_transfer.landing import PoolAddress
from kv_transfer.ranges import pool_bytes

logger = logging.getLogger(__name__)

_MESSAGES_A_ROUND = 16
_MAX_STRANGERS = 16
_ACCEPT_NAP_S = 0.01
_AWAKE_S = 500e-6  # at most, for a buffer that was said to come


@dataclasses.dataclass(slots=True, eq=False)
class _Writer:
    """Somebody who writes to this transport. agent, staging: once it has said Hello.

    busy: buffers that are being emptied.  refused: number of the write that was refused last.
    """

    link: Link
    agent: str = ""
    staging: Staging | None = None
    busy: set[int] = dataclasses.field(default_factory=set)
    refused: int = -1
    is_gone: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Emptying:
    writer: _Writer
    fill: Fill
    ticket: Any


class HostReceiver:
    """A listener at `address` and its thread. `take` and `close` are for the owner.

    pools: registered memory, in the order of the endpoint.  life: what a writer has to know to be heard.
    make_copier: runs on the thread. Raises OSError or CopyError if listening or copying can't start.
    """

    def __init__(
        self,
        address: str,
        *,
        life: bytes,
        pools: list[PoolAddress],
        buffer_bytes: int,
        num_buffers: int,
        make_copier: Callable[[], Copier],
    ) -> None:
        self.writers: list[_Writer] = []
        self.failure = ""
        self._life = life
        self._pools = pools
        self._bases = np.array([pool.base for pool in pools], np.uint64)
        self._held = np.array([pool_bytes(pool) for pool in pools], np.int64)
        self._buffer_bytes, self._num_buffers = buffer_bytes, num_buffers
        self._arrived: collections.deque[tuple[str, bytes]] = collections.deque()
        self._emptying: collections.deque[_Emptying] = collections.deque()
        self._copier: Copier
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(address)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._wake = os.eventfd(0)
        self._is_closed = False
        self._awake_until = 0.0
        self._poll = select.poll()
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=(make_copier, started), name="host lane", daemon=True)
        self.thread.start()
        if (error := started.get()) is not None:
            self.close()
            raise error

    def take(self) -> list[tuple[str, bytes]]:
        """Return (agent, message) of the notifications since the last call."""
        arrived = []
        while self._arrived:
            arrived.append(self._arrived.popleft())
        return arrived

    def close(self) -> None:
        """End the thread and all connections; when this returns, nothing is copied any more."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self.thread:
            self.thread.join()
            os.close(self._wake)

    # ------------------------------------------------------------ below: on the thread

    def _run(self, make_copier: Callable[[], Copier], started: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            self._copier = make_copier()
        except BaseException as error:
            self._listener.close()
            started.put(error)
            return
        started.put(None)
        try:
            self._serve()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.exception("the receiving thread ended; all writes to this process fail")
        finally:
            self._listener.close()
            with contextlib.suppress(CopyError):
                while self._emptying:
                    self._copier.wait(self._emptying[0].ticket)
                    self._finish()
            for writer in self.writers:
                self._release(writer)
            self.writers.clear()

    def _serve(self) -> None:
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        while True:
            is_awake = self._emptying or time.monotonic() < self._awake_until
            ready = {fd for fd, _ in self._poll.poll(0 if is_awake else None)}
            if self._wake in ready:
                return
            if self._listener.fileno() in ready:
                self._accept()
            for writer in [writer for writer in self.writers if writer.link.fileno() in ready]:
                self._hear(writer)
            if not ready and len(self._emptying) > 1:  # behind the last one comes nothing unless it is heard in time
                self._copier.wait(self._emptying[0].ticket)
            self._finish()
            for writer in [writer for writer in self.writers if writer.is_gone and not writer.busy]:
                self._release(writer)
                self.writers.remove(writer)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # most likely out of descriptors; the listener stays ready, so don't come back at once
            logger.warning("a connection was not accepted: %s", error)
            time.sleep(_ACCEPT_NAP_S)
            return
        strangers = [writer for writer in self.writers if writer.staging is None and not writer.is_gone]
        if len(strangers) >= _MAX_STRANGERS:
            self._part(strangers[0], f"{len(strangers)} connections have not said who they are")
        writer = _Writer(Link(connected))
        self.writers.append(writer)
        self._poll.register(writer.link, select.POLLIN)

    def _hear(self, writer: _Writer) -> None:
        try:
            for _ in range(_MESSAGES_A_ROUND):
                if writer.is_gone or (message := writer.link.receive()) is None:
                    return
                self._answer(writer, message)
                self._finish()  # or buffers stay taken for as long as others come in
        except LinkError as error:
            self._part(writer, str(error))

    def _answer(self, writer: _Writer, message: Message) -> None:
        match message:
            case Hello() if writer.staging is None:
                self._greet(writer, message)
            case Coming() if writer.staging is not None:
                self._awake_until = time.monotonic() + _AWAKE_S
            case Fill() if writer.staging is not None:
                self._awake_until = 0.0
                self._empty(writer, writer.staging, message)
            case Word() if writer.staging is not None:
                self._arrived.append((writer.agent, message.message))
            case _:
                raise LinkError(f"{type(message).__name__} was not expected from it")

    def _greet(self, writer: _Writer, hello: Hello) -> None:
        try:
            if not hmac.compare_digest(hello.life, self._life):
                raise LinkError("the metadata is stale: it belongs to a process that has ended")
            staging, fd = self._allocate()
        except LinkError as error:
            writer.link.send(Refused(str(error)))
            raise
        writer.agent, writer.staging = hello.agent, staging
        try:
            self._say(writer, Welcome(staging.buffer_bytes, staging.num_buffers, knows_coming=True), descriptor=fd)
        finally:
            os.close(fd)

    def _allocate(self) -> tuple[Staging, int]:
        """Return staging memory fit for copies, and its descriptor. Raises LinkError if there is none to have."""
        size = self._buffer_bytes * self._num_buffers
        try:
            staging, fd = host_staging.create(buffer_bytes=self._buffer_bytes, num_buffers=self._num_buffers)
        except OSError as error:
            raise LinkError(f"it has no {size} bytes of staging memory: {error}") from error
        try:
            self._copier.admit(staging)
        except CopyError as error:
            staging.close()
            os.close(fd)
            raise LinkError(str(error)) from error
        return staging, fd

    def _empty(self, writer: _Writer, staging: Staging, fill: Fill) -> None:
        """Start copying a buffer into the pools, or refuse the whole write if a piece is not inside them."""
        if not 0 <= fill.buffer < staging.num_buffers or fill.buffer in writer.busy:
            raise LinkError(f"buffer {fill.buffer} is not its to fill")
        if fill.number == writer.refused:
            self._say(writer, Emptied(fill.buffer, fill.number, is_end=False))
            return
        copies = self._copies(fill, staging)
        if isinstance(copies, str):
            writer.refused = fill.number
            self._say(writer, Emptied(fill.buffer, fill.number, is_end=True, error=copies))
            return
        # Held first, and looked at then: once its connection has ended a writer believes what it finds held, or not.
        staging.hold(fill.buffer)
        if writer.link.has_hung_up:
            staging.let_go(fill.buffer)
            return
        writer.busy.add(fill.buffer)
        self._emptying.append(_Emptying(writer, fill, self._copier.start(copies)))

    def _copies(self, fill: Fill, staging: Staging) -> Copies | str:
        """Return the copies that empty a buffer, or why there must be none."""
        table = unpack_pieces(fill.pieces)
        index, offset, size = table.T
        if table.min() < 0 or index.max() >= len(self._pools):
            return self._misplaced(table)
        # No sum of offset and size: it could overflow.
        if size.min() < 1 or (offset > self._held[index] - size).any():
            return self._misplaced(table)
        if int(size.sum()) > staging.buffer_bytes:
            return f"pieces of more than the {staging.buffer_bytes} bytes of their buffer"
        return copies_out(staging.address(fill.buffer), table, self._bases)

    def _misplaced(self, table: Table) -> str:
        """Return what is wrong with the first piece of a table that lies in no pool."""
        for number, begin, length in table.tolist():
            if number not in range(len(self._pools)):
                return f"there is no pool {number}, only {len(self._pools)}"
            pool = self._pools[number]
            if begin < 0 or length < 1 or begin + length > pool_bytes(pool):
                return f"bytes {begin}..{begin + length} of pool {pool.name!r}: the pool has {pool_bytes(pool)} bytes"
        raise AssertionError("every piece lies in its pool")

    def _finish(self) -> None:
        """Free the buffers that are empty by now; deliver what belongs to writes that are in place."""
        while self._emptying and self._copier.is_done(self._emptying[0].ticket):
            done = self._emptying.popleft()
            writer, fill = done.writer, done.fill
            writer.busy.discard(fill.buffer)
            assert writer.staging is not None
            writer.staging.let_go(fill.buffer)
            if fill.is_last and fill.notification:
                self._arrived.append((writer.agent, fill.notification))
            try:
                self._say(writer, Emptied(fill.buffer, fill.number, is_end=fill.is_last))
            except LinkError as error:
                self._part(writer, str(error))

    def _say(self, writer: _Writer, message: Message, *, descriptor: int = -1) -> None:
        if not writer.link.send(message, descriptor=descriptor):
            raise LinkError("it does not read its answers")

    def _part(self, writer: _Writer, reason: str) -> None:
        """Hear nothing more from a writer. Its connection stays until its copies are done: closing it says so."""
        if writer.is_gone:
            return
        writer.is_gone = True
        self._poll.unregister(writer.link)
        logger.info("writer %s is gone: %s", writer.agent or "without a name", reason)

    def _release(self, writer: _Writer) -> None:
        if writer.staging is not None:
            self._copier.dismiss(writer.staging)
            writer.staging.close()
        writer.link.close()
