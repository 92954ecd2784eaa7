"""Copier: how bytes get from pools into staging memory and out of it. A copy is started, and later it is done.

DramCopier copies while it starts; VramCopier lets the device copy, on a stream of its own. A copier is made and used on
one thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Literal, Protocol

from kv_transfer.host_driver import CopyError, Driver
from kv_transfer.host_pieces import Copies
from kv_transfer.host_staging import Staging


@dataclasses.dataclass(slots=True)
class VramTicket:
    """Copies that were started. event: recorded behind them; once they are done it is used again."""

    event: int
    is_done: bool = False


class Copier(Protocol):
    def admit(self, staging: Staging) -> None:
        """Make staging memory fit for copies. Raises CopyError."""

    def dismiss(self, staging: Staging) -> None:
        """Undo `admit`; no copy may be under way."""

    def start(self, copies: Copies) -> Any:
        """Start copies and return a ticket for all of them. They are done in the order of the tickets.

        Raises CopyError; then none is under way.
        """

    def is_done(self, ticket: Any) -> bool:
        """Raises CopyError if the copies have failed."""

    def wait(self, ticket: Any) -> None:
        """Return when the copies are done. Raises CopyError."""


class DramCopier:
    """Copies on the calling thread.

    Python's lock is kept meanwhile: a buffer of 2 MiB takes 0.1 to 0.3 ms, but to get the lock back from a thread that
    computes takes up to 5 ms, each time.
    """

    def __init__(self) -> None:
        self._copy = ctypes.PyDLL(None).memmove
        self._copy.argtypes, self._copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None

    def admit(self, staging: Staging) -> None:
        pass

    def dismiss(self, staging: Staging) -> None:
        pass

    def start(self, copies: Copies) -> None:
        for target, source, size in copies.rows():
            self._copy(target, source, size)

    def is_done(self, ticket: None) -> bool:
        return True

    def wait(self, ticket: None) -> None:
        pass


class VramCopier:
    """Has one CUDA device copy, between its memory and staging memory that is pinned for it.

    The driver's own calls are used, by address: starting a piece with slices of torch tensors takes 5.9 us of this
    thread instead of 0.7, and lets go of Python's lock each time. Pieces of one ticket go to the driver at once where
    it takes batches (CUDA 12.8): alone, each leaves the link idle for some 2 us. Waiting spins, since to be woken takes
    longer than a buffer does. Raises CopyError if the device can't be used.
    """

    def __init__(self, device: int) -> None:
        import torch

        self._cuda: Any = torch.cuda
        if not self._cuda.is_available():
            raise CopyError(f"pools in VRAM need CUDA device {device}, and torch {torch.__version__} finds no device")
        try:
            self._cuda.set_device(device)
            self._stream = self._cuda.Stream(device)
            self._stream.synchronize()  # makes the device's context this thread's: the driver's calls need it
            self._driver = Driver(ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1"))
        except (RuntimeError, OSError) as error:
            raise CopyError(f"CUDA device {device}: {error}") from error
        self._events: list[int] = []

    def admit(self, staging: Staging) -> None:
        code = int(self._cuda.cudart().cudaHostRegister(staging.address(0), staging.num_bytes, 0))
        if code:
            raise CopyError(f"{staging.num_bytes} bytes of staging memory can't be pinned: CUDA error {code}")

    def dismiss(self, staging: Staging) -> None:
        self._cuda.cudart().cudaHostUnregister(staging.address(0))

    def start(self, copies: Copies) -> VramTicket:
        stream = self._stream.cuda_stream
        try:
            event = self._events.pop() if self._events else self._driver.event()
            self._driver.copy(copies, stream)
            self._driver.record(event, stream)
        except CopyError:
            self._settle()
            raise
        return VramTicket(event)

    def is_done(self, ticket: VramTicket) -> bool:
        if not ticket.is_done:
            ticket.is_done = self._driver.has_happened(ticket.event)
            self._keep(ticket)
        return ticket.is_done

    def wait(self, ticket: VramTicket) -> None:
        if not ticket.is_done:
            self._driver.wait(ticket.event)
            ticket.is_done = True
            self._keep(ticket)

    def _keep(self, ticket: VramTicket) -> None:
        if ticket.is_done:
            self._events.append(ticket.event)

    def _settle(self) -> None:
        """Wait for what was started; a device that can't even do that does not copy either."""
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise CopyError(str(error)) from error


def make_copier(memory: Literal["DRAM", "VRAM"], device: int) -> Copier:
    return DramCopier() if memory == "DRAM" else VramCopier(device)
