"""Memory of one GPU that the GPUs of other processes write: allocated, shared by handle, mapped.

The driver's own calls: torch shares memory, too, but opens it on the GPU where it lies, which makes a context of some
hundred megabytes there for every process that looks. A mapping belongs to the GPU that is current in this thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class NoPeerMemory(Exception):
    """GPUs of this group can't write each other's memory; the text says which, and what to do."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class PeerMemory:
    """A region of `num_bytes` zeros on the current GPU, and those of the others once they are mapped.

    Freed when this object is; peers must have ended, or have been told.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises NoPeerMemory if there is no memory, or no driver."""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoPeerMemory(f"no CUDA driver: {error}") from None
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        self.address, self._mapped = pointer.value, list[int]()
        self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")

    def handle(self) -> bytes:
        """Return what another process maps the region by."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """Return the address of another process's region. Raises NoPeerMemory."""
        pointer, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._mapped.append(pointer.value)
        return pointer.value

    def close(self) -> None:
        """Unmap the others' regions and free the own one."""
        for address in self._mapped:
            self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        self._mapped.clear()
        if self.address:
            self._driver.cuMemFree_v2(ctypes.c_uint64(self.address))
            self.address = 0

    def _call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            raise NoPeerMemory(f"{name} failed: {(text.value or b'error').decode()} ({error})")


def require_peer_access(index: int, count: int, can_access: Callable[[int, int], bool]) -> None:
    """Raise NoPeerMemory unless GPU `index` reaches the others of `count`. can_access: as torch.cuda has it."""
    lost = [peer for peer in range(count) if peer != index and not can_access(index, peer)]
    if lost:
        raise NoPeerMemory(
            f"GPU {index} has no peer access to {', '.join(f'GPU {peer}' for peer in lost)}: see `nvidia-smi topo "
            "-p2p w`; it usually takes IOMMU off or in passthrough mode, and ACS off"
        )
