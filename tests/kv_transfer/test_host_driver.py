"""The CUDA driver's calls of the host lane, made of a library that copies host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer.host_driver import CopyError, Driver
from kv_transfer.host_pieces import Copies

NOT_READY, NOT_SUPPORTED, INVALID = 600, 801, 1
PIECES = ((20, 0, 10), (3, 50, 7), (70, 60, 1))  # target, source, bytes


class Call:
    """A function that takes ctypes' attributes."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function
        self.argtypes: Any = None

    def __call__(self, *args: Any) -> int:
        return self._function(*args)


class Library:
    """batch: the name of the call for batches that this driver has, if any; `code`: what it returns."""

    def __init__(self, batch: str = "", code: int = 0) -> None:
        self.calls: list[str] = []
        self.code = code
        self.library = SimpleNamespace(
            cuMemcpyAsync=Call(self._single),
            cuEventQuery=Call(lambda event: NOT_READY if event == 1 else 0 if event == 2 else INVALID),
            cuEventSynchronize=Call(lambda event: 0),
            cuEventRecord=Call(lambda event, stream: 0),
            cuEventCreate=Call(self._create),
        )
        if batch:
            setattr(self.library, batch, Call(self._batch))
        self.words = 8 if batch.endswith("v2") else 9

    def _single(self, target: int, source: int, size: int, stream: int) -> int:
        self.calls.append("single")
        ctypes.memmove(target, source, size)
        return 0

    def _batch(self, *words: Any) -> int:
        *given, count = words[:4]
        rest = words[4:]
        self.calls.append("batch")
        assert 4 + len(rest) == self.words and count.value == len(PIECES) and rest[-1].value == 5
        assert (rest[0]._obj.order, rest[1]._obj.value, rest[2].value) == (1, 0, 1)
        if not self.code:
            arrays = [ctypes.cast(array, ctypes.POINTER(ctypes.c_uint64 * count.value))[0] for array in given]
            for target, source, size in zip(*arrays, strict=True):
                ctypes.memmove(target, source, size)
        return self.code

    def _create(self, made: Any, flags: int) -> int:
        made._obj.value = 40 + flags
        return 0


def copied(driver: Driver) -> bool:
    source, target = np.arange(1, 101, dtype=np.uint8), np.zeros(100, np.uint8)
    expected = target.copy()
    for to, at, size in PIECES:
        expected[to : to + size] = source[at : at + size]
    places = np.array(PIECES, np.uint64).T.copy()
    places[:2] += np.array([[target.ctypes.data], [source.ctypes.data]], np.uint64)
    driver.copy(Copies(*places), 5)
    return bool((target == expected).all())


@pytest.mark.parametrize("batch", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", ""])
def test_pieces_land_by_whatever_call_the_driver_has(batch: str) -> None:
    made = Library(batch)
    assert copied(Driver(made.library, made.library))
    assert made.calls == (["batch"] if batch else ["single"] * 3)


def test_a_driver_that_does_not_support_batches_is_asked_once() -> None:
    made = Library("cuMemcpyBatchAsync_v2", code=NOT_SUPPORTED)
    driver = Driver(made.library, made.library)
    assert copied(driver) and copied(driver)
    assert made.calls == ["batch"] + ["single"] * 6


def test_failures_carry_the_drivers_code() -> None:
    made = Library("cuMemcpyBatchAsync", code=INVALID)
    driver = Driver(made.library, made.library)
    with pytest.raises(CopyError, match="3 copies: CUDA error 1"):
        copied(driver)
    assert (driver.event(), driver.has_happened(1), driver.has_happened(2)) == (42, False, True)
    with pytest.raises(CopyError, match="copies: CUDA error 1"):
        driver.has_happened(3)
