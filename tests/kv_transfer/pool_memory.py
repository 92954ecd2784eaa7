"""The memory of a test's pool, on the host (numpy) or on a GPU (torch), behind the same few calls.

Units are rows of 64-bit words. What a call writes is in place when it returns: transports copy on streams of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kv_transfer.landing import PoolAddress

Memory = Literal["DRAM", "VRAM"]
Words = NDArray[np.uint64]

_PAGE_BYTES = 4096
_WORD_BYTES = 8


class HostPool:
    """[num_units, num_words] uint64 of zeros."""

    def __init__(self, num_units: int, unit_bytes: int) -> None:
        self.num_units, self.num_words = num_units, unit_bytes // _WORD_BYTES
        self._words = np.zeros((num_units, self.num_words), dtype=np.uint64)

    @property
    def base(self) -> int:
        return int(self._words.ctypes.data)

    def address(self, name: str) -> PoolAddress:
        return PoolAddress(name=name, base=self.base, unit_bytes=self.num_words * _WORD_BYTES, num_units=self.num_units)

    def write(self, units: Sequence[int], words: Words) -> None:
        """words: [len(units), num_words]."""
        self._words[list(units)] = words

    def fill(self, units: Sequence[int], word: int) -> None:
        self._words[list(units)] = np.uint64(word)

    def read(self, units: Sequence[int]) -> Words:
        """Return a copy, [len(units), num_words]."""
        return self._words[list(units)]

    def crc(self) -> int:
        return zlib.crc32(self._words)


class GpuPool(HostPool):
    """The same in GPU memory, beginning with a page as the engine's pools do.

    device: "cpu" is for trying this class without a GPU.
    """

    def __init__(self, num_units: int, unit_bytes: int, device: str = "cuda:0") -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)
        self.num_units, self.num_words = num_units, unit_bytes // _WORD_BYTES
        size = num_units * unit_bytes
        backing = torch.zeros(size + _PAGE_BYTES, dtype=torch.uint8, device=self._device)
        start = -backing.data_ptr() % _PAGE_BYTES
        self._tensor = backing[start : start + size].view(torch.int64).view(num_units, self.num_words)
        self._finish()

    @property
    def base(self) -> int:
        return int(self._tensor.data_ptr())

    def write(self, units: Sequence[int], words: Words) -> None:
        rows = self._torch.from_numpy(np.ascontiguousarray(words).view(np.int64)).to(self._device)
        self._tensor.index_copy_(0, self._index(units), rows)
        self._finish()

    def fill(self, units: Sequence[int], word: int) -> None:
        self._tensor.index_fill_(0, self._index(units), int(np.uint64(word).astype(np.int64)))
        self._finish()

    def read(self, units: Sequence[int]) -> Words:
        return self._tensor.index_select(0, self._index(units)).cpu().numpy().view(np.uint64)

    def crc(self) -> int:
        return zlib.crc32(self._tensor.cpu().numpy())

    def _index(self, units: Sequence[int]):  # type: ignore[no-untyped-def]
        return self._torch.tensor(list(units), dtype=self._torch.int64, device=self._device)

    def _finish(self) -> None:
        """Wait for this class' own work only: a copy of a transport that is late must stay late."""
        if self._device.type == "cuda":
            self._torch.cuda.current_stream(self._device).synchronize()


def make_pool(memory: Memory, num_units: int, unit_bytes: int) -> HostPool:
    return HostPool(num_units, unit_bytes) if memory == "DRAM" else GpuPool(num_units, unit_bytes)
