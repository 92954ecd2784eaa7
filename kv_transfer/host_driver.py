"""Driver: the few calls of the CUDA driver that the host lane makes, by address.

Those that return at once keep Python's lock (`quick`), the one that waits lets go of it (`slow`): both are the driver's
library, loaded as ctypes.PyDLL and as ctypes.CDLL. A device's context must be the calling thread's.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kv_transfer.host_pieces import Copies

_NOT_READY, _NOT_SUPPORTED = 600, 801
_NO_TIMING = 2
_IN_STREAM_ORDER = 1


class CopyError(Exception):
    """The device did not copy. The text is the cause."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: when sources are read, and hints of where managed memory lies, which is not used here."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """Raises CopyError with the driver's code from every call that fails."""

    def __init__(self, quick: Any, slow: Any) -> None:
        self._quick, self._wait = quick, slow.cuEventSynchronize
        self._single = quick.cuMemcpyAsync
        self._single.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        for call in (self._wait, quick.cuEventQuery):
            call.argtypes = (ctypes.c_void_p,)
        quick.cuEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        # CUDA 12.8 brought batches, 13 another form of the call, without the index of the piece that failed.
        self._batch = getattr(quick, "cuMemcpyBatchAsync_v2", None)
        self._more: tuple[Any, ...] = ()
        if self._batch is None:
            self._batch = getattr(quick, "cuMemcpyBatchAsync", None)
            self._more = (ctypes.byref(ctypes.c_size_t()),)
        self._attributes, self._first = _Attributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)

    def copy(self, copies: Copies, stream: int) -> None:
        """Start copies. After a failure some may be under way."""
        count = len(copies.sizes)
        if count > 1 and self._batch is not None:
            arrays = [ctypes.c_void_p(array.ctypes.data) for array in copies]
            described = (ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1), *self._more)
            code = self._batch(*arrays, ctypes.c_size_t(count), *described, ctypes.c_void_p(stream))
            if code != _NOT_SUPPORTED:
                return _check(code, f"{count} copies")
            self._batch = None
        for target, source, size in copies.rows():
            _check(self._single(target, source, size, stream), f"copy of {size} bytes")

    def event(self) -> int:
        """Return a new event, which is never destroyed: they are few, and used again."""
        made = ctypes.c_void_p()
        _check(self._quick.cuEventCreate(ctypes.byref(made), _NO_TIMING), "event")
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        _check(self._quick.cuEventRecord(event, stream), "event")

    def has_happened(self, event: int) -> bool:
        code = self._quick.cuEventQuery(event)
        _check(0 if code == _NOT_READY else code, "copies")
        return bool(code != _NOT_READY)

    def wait(self, event: int) -> None:
        _check(self._wait(event), "copies")


def _check(code: int, what: str) -> None:
    if code:
        raise CopyError(f"{what}: CUDA error {code}")
