"""Ends of the host lane that behave as a test wants: copiers that take their time or fail, a writer led by hand."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kv_transfer.host_copy import DramCopier
from kv_transfer.host_driver import CopyError
from kv_transfer.host_link import (
    Fill,
    HangUp,
    Hello,
    Link,
    Message,
    Refused,
    Welcome,
    pack_pieces,
)
from kv_transfer.host_pieces import Copies
from kv_transfer.host_staging import Staging
from kv_transfer.landing import Endpoint, encode
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import Transfer, TransferStatus

from .conftest import PATIENCE_S, Side

SCRATCH_WRITE = TransferPlan((Piece("scratch", 0, 0, 4096),))
SHORT_WRITE = TransferPlan((Piece("scratch", 0, 0, 64),))
ODD_BYTES = 1000
"""A buffer that no unit fits evenly."""


class LateCopier(DramCopier):
    """Copies some time after `start`, as a device does: by the third time it is asked, or when it is waited for."""

    def start(self, copies: Copies) -> Any:
        return {"copies": copies, "patience": 3}

    def is_done(self, ticket: Any) -> bool:
        ticket["patience"] -= 1
        if ticket["patience"] <= 0:
            self.wait(ticket)
        return ticket["copies"] is None

    def wait(self, ticket: Any) -> None:
        if ticket["copies"] is not None:
            super().start(ticket["copies"])
            ticket["copies"] = None


class HeldCopier(LateCopier):
    """Stands before each copy until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_copy = threading.Event(), threading.Event()

    def start(self, copies: Copies) -> Any:
        self.has_begun.set()
        assert self.may_copy.wait(PATIENCE_S)
        return super().start(copies)


class BrokenCopier(DramCopier):
    def start(self, copies: Copies) -> None:
        raise CopyError("the device has fallen off the bus")


class StrangeWriter:
    """Speaks the protocol by hand."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.agent, name, self.life = msgspec.msgpack.decode(endpoint.metadata)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(name)
        self.link = Link(self.socket, takes_descriptor=True)
        self.staging: Staging

    def __enter__(self) -> StrangeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def enter(self) -> None:
        self.link.send(Hello("strange", self.life))
        welcome = self.hear()
        assert isinstance(welcome, Welcome)
        with self.link.descriptor() as fd:
            self.staging = Staging(fd, buffer_bytes=welcome.buffer_bytes, num_buffers=welcome.num_buffers)

    def fill(
        self,
        buffer: int,
        pieces: list[tuple[int, int, int]],
        *,
        number: int = 1,
        is_last: bool = False,
        notification: bytes = b"",
    ) -> None:
        ctypes.memset(self.staging.address(buffer), 7, self.staging.buffer_bytes)
        assert self.link.send(Fill(number, buffer, pack_pieces(np.array(pieces)), is_last, notification))

    def hear(self) -> Message:
        until = time.monotonic() + PATIENCE_S
        while (message := self.link.receive()) is None:
            assert time.monotonic() < until, "it says nothing"
        return message

    def send(self, packet: bytes) -> None:
        self.socket.send(packet)

    def has_been_dropped(self) -> bool:
        try:
            answer = self.link.receive()
            assert answer is None or isinstance(answer, Refused)
            return answer is not None
        except HangUp:
            return True


@contextlib.contextmanager
def writer_process(target: Side, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(__file__).with_name("sender.py")
    command = [sys.executable, str(script), encode(target.endpoint).hex(), mode]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def hold(side: Side) -> HeldCopier:
    """Make a receiver stand before its copies."""
    receiving: Any = side.transport
    receiving._receiver._copier = held = HeldCopier()
    return held


def await_copy(held: HeldCopier, writer: Side, transfer: Transfer) -> None:
    """Drive a write until the receiver stands before its first copy."""

    def has_begun() -> bool:
        assert writer.transport.check(transfer) is TransferStatus.PENDING
        return held.has_begun.is_set()

    await_until(has_begun)


def writers_of(side: Side) -> list[Any]:
    receiving: Any = side.transport
    return list(receiving._receiver.writers)


def cut(writer: Side, reader: Side) -> None:
    """End a connection under both its ends, as nothing but a fault in the system does."""
    sending: Any = writer.transport
    sending._peers[reader.endpoint.agent].link._socket.shutdown(socket.SHUT_RDWR)


def is_open(writer: Side, reader: Side) -> bool:
    sending: Any = writer.transport
    return bool(sending._peers[reader.endpoint.agent].is_open)


def held_by_this_process() -> set[str]:
    """Return its descriptors, its mappings of staging memory, and its receiving threads."""
    held = {f"{thread.name} {thread.native_id}" for thread in threading.enumerate() if thread.name == "host lane"}
    held |= {line for line in Path("/proc/self/maps").read_text().splitlines() if "isthmus-staging" in line}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            held.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return held


def switches(status: Path) -> list[str]:
    return [line for line in status.read_text().splitlines() if "ctxt_switches" in line]


def await_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
