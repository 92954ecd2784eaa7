"""The transports that are measured, by name. Each module is imported when its transport is asked for."""

from __future__ import annotations

import importlib
from typing import Literal

from kv_transfer.transport import KvTransport, TransferError

TRANSPORTS = ("nixl", "host", "ucxx")
_MODULES = {
    "nixl": ("kv_transfer.nixl_transport", "NixlTransport"),
    "host": ("kv_transfer.host_transport", "HostTransport"),
    "ucxx": ("kv_transfer.ucxx_transport", "UcxxTransport"),
}


def make_transport(name: str, worker: str, *, memory: Literal["DRAM", "VRAM"] = "DRAM", device: int = 0) -> KvTransport:
    """Return a transport that has not registered anything yet. device: number of the GPU, for memory "VRAM".

    Raises TransferError if there is none of that name, or it can't move such memory; what it needs from other packages
    it may miss only in `register`.
    """
    module, kind = _MODULES[name]
    try:
        make = getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        raise TransferError(f"transport {name} can't be loaded: {error}") from error
    if name == "ucxx":
        if memory == "VRAM":
            raise TransferError("transport ucxx moves host memory only: measure it with --device cpu")
        made: KvTransport = make(worker)
    else:
        made = make(worker, memory=memory, device=device)
    return made
