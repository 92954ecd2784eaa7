"""HostPeer: somebody a HostTransport writes to: the connection, its buffers, and the writes under way."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import select
from typing import Any

from kv_transfer.host_copy import Copier
from kv_transfer.host_driver import CopyError
from kv_transfer.host_link import (
    MAX_PIECES,
    Coming,
    Emptied,
    Fill,
    HangUp,
    Hello,
    Link,
    LinkError,
    Message,
    Refused,
    Welcome,
    pack_pieces,
)
from kv_transfer.host_pieces import Rest, copies_in
from kv_transfer.host_staging import Staging
from kv_transfer.landing import Endpoint
from kv_transfer.transport import TransferStatus

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class HostTransfer:
    """A write under way. num_fills: buffers that it has taken so far."""

    peer: HostPeer
    number: int
    rest: Rest
    notification: bytes
    num_bytes: int
    num_pieces: int
    status: TransferStatus = TransferStatus.PENDING
    error: str = ""
    num_fills: int = 0


class HostPeer:
    """The writing end of a connection. Nothing here waits but `wait_for_copy`.

    is_open: takes writes.  is_over: nothing is under way, all is let go of.  error: why it is of no use any more; until
    it is over, it is only half closed, since the peer may still be emptying a buffer.
    """

    def __init__(self, endpoint: Endpoint, link: Link, *, copier: Copier) -> None:
        self.endpoint = endpoint
        self.link = link
        self.transfers: list[HostTransfer] = []
        self.has_written = False
        self.is_open = True
        self.is_over = False
        self.error = ""
        self._copier = copier
        self._is_cut = self._knows_coming = False
        self._staging: Staging | None = None
        self._free: list[int] = []
        self._filling: collections.deque[tuple[Any, Fill]] = collections.deque()

    @property
    def is_welcome(self) -> bool:
        return self._staging is not None

    @property
    def awaits(self) -> int:
        """What poll(2) should watch the link for: 0 if there is nothing to wait for."""
        if self.is_over or self._is_cut or (self.is_welcome and not self.transfers):
            return 0
        return select.POLLIN | (select.POLLOUT if self._filling and not self.error else 0)

    def greet(self, agent: str, life: bytes) -> None:
        """Say who writes, and whom it means. Raises LinkError."""
        self.link.send(Hello(agent, life))

    def announce(self) -> None:
        """Have the peer's thread awake by the time that a write's first buffer is full."""
        with contextlib.suppress(LinkError):  # the write itself will meet it
            if self._knows_coming and not self.error:
                self.link.send(Coming())

    def add(self, transfer: HostTransfer) -> None:
        """Start a write and copy as much as there is room for."""
        self.transfers.append(transfer)
        while self.drive():
            pass

    def drive(self) -> bool:
        """Move what can be moved. Returns whether anything did; never raises."""
        if self.is_over:
            return False
        try:
            return self._hear() | self._announce() | self._fill()
        except HangUp as error:
            return self._end(self.error or str(error))
        except (LinkError, CopyError) as error:
            self.give_up(str(error))
        return True

    def wait_for_copy(self) -> bool:
        """Sleep until the oldest copy of this side is done. Returns whether there was one to wait for."""
        if not self._filling or self.error:
            return False
        with contextlib.suppress(CopyError):  # `drive` will meet it too
            if not self._copier.is_done(self._filling[0][0]):
                self._copier.wait(self._filling[0][0])
                return True
        return False

    def disconnect(self) -> None:
        """Take no more writes; let go once those under way have ended."""
        self.is_open = False
        if not self.transfers:
            self._let_go()

    def give_up(self, error: str) -> None:
        """Start nothing more, though the peer may live; its writes end when it has hung up too."""
        self.error = self.error or error
        for transfer in self.transfers:
            transfer.rest.clear()
        self.link.half_close()
        self.disconnect()

    # ------------------------------------------------------------ below: what the peer says

    def _hear(self) -> bool:
        has_heard = False
        while not self.is_over and (message := self.link.receive()) is not None:
            has_heard = True
            if not self.error:
                self._heed(message)
        return has_heard

    def _heed(self, message: Message) -> None:
        match message:
            case Welcome() if self._staging is None:
                self._admit(message)
            case Refused():
                raise HangUp(message.error)
            case Emptied() if self._staging is not None and message.buffer in range(self._staging.num_buffers):
                if message.buffer in self._free or any(message.buffer == fill.buffer for _, fill in self._filling):
                    raise LinkError(f"it has emptied buffer {message.buffer}, which it had not been given")
                self._free.append(message.buffer)
                if message.is_end:
                    self._end_write(message)
            case _:
                raise LinkError(f"{type(message).__name__} was not expected from it")

    def _admit(self, welcome: Welcome) -> None:
        with self.link.descriptor() as fd:
            try:
                staging = Staging(fd, buffer_bytes=welcome.buffer_bytes, num_buffers=welcome.num_buffers)
            except (OSError, ValueError) as error:
                raise LinkError(str(error)) from error
        try:
            self._copier.admit(staging)
        except CopyError:
            staging.close()
            raise
        self._staging, self._free = staging, list(range(staging.num_buffers))
        self._knows_coming = welcome.knows_coming

    def _end_write(self, message: Emptied) -> None:
        transfer = next((transfer for transfer in self.transfers if transfer.number == message.number), None)
        if transfer is None or (transfer.rest and not message.error):
            raise LinkError(f"it has ended write {message.number}, which was not complete")
        self.transfers.remove(transfer)
        self._close_transfer(transfer, message.error)
        self.has_written |= not message.error
        if not self.is_open and not self.transfers:
            self._let_go()

    # ------------------------------------------------------------ below: what is said to it

    def _fill(self) -> bool:
        """Start copying into free buffers, oldest write first."""
        has_started = False
        while self._staging is not None and self._free and not self.error:
            transfer = next((transfer for transfer in self.transfers if transfer.rest), None)
            if transfer is None:
                break
            self._fill_one(self._staging, transfer)
            self._announce()
            has_started = True
        return has_started

    def _fill_one(self, staging: Staging, transfer: HostTransfer) -> None:
        buffer = self._free.pop()
        # Nothing overlaps the first buffer's way in and the last one's way out, so those are small: an eighth and twice
        # that from one to the next, and at the end half of what is left. Less than a quarter there would save nothing:
        # a buffer costs the receiver's thread as long as 4 MB take on their way.
        least, most = staging.buffer_bytes >> 2, staging.buffer_bytes >> max(3 - transfer.num_fills, 0)
        room = max(min(most, max(transfer.rest.num_bytes // 2, least)), 1)
        table, sources = transfer.rest.take(room, most=MAX_PIECES)
        transfer.num_fills += 1
        copies = copies_in(staging.address(buffer), table, sources)
        is_last = not transfer.rest
        notification = transfer.notification if is_last else b""
        ticket = self._copier.start(copies)
        self._filling.append((ticket, Fill(transfer.number, buffer, pack_pieces(table), is_last, notification)))

    def _announce(self) -> bool:
        """Tell the peer of the buffers that are full by now."""
        has_told = False
        while self._filling and not self.error and self._copier.is_done(self._filling[0][0]):
            if not self.link.send(self._filling[0][1]):
                break
            self._filling.popleft()
            has_told = True
        return has_told

    # ------------------------------------------------------------ below: the end

    def _end(self, error: str) -> bool:
        """Fail the writes of a peer that does nothing more. Returns False if it still does, to be asked again.

        A connection may end without its peer, which may then still be emptying a buffer.
        """
        self.error, self.is_open = error, False
        for transfer in self.transfers:
            transfer.rest.clear()
        self._is_cut = self._staging is not None and self._staging.is_held
        if self._is_cut:
            return False
        for transfer in self.transfers:
            self._close_transfer(transfer, error)
        self.transfers.clear()
        self.disconnect()
        return True

    def _close_transfer(self, transfer: HostTransfer, error: str) -> None:
        transfer.rest.clear()
        transfer.status = TransferStatus.FAILED if error else TransferStatus.DONE
        transfer.error = error and f"write to {self.endpoint.agent} failed: {error}"

    def staging_pages(self) -> dict[int, int]:
        """Return pages by NUMA node of the staging memory: the receiver's, though asked of this side's mapping."""
        return self._staging.count_pages().nodes if self._staging is not None and not self.is_over else {}

    def _let_go(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._staging is not None:
            with contextlib.suppress(CopyError):
                for ticket, _ in self._filling:
                    self._copier.wait(ticket)
            self._copier.dismiss(self._staging)
            self._staging.close()
        self.link.close()
