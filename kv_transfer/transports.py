"""The transports between processes, by name. Each module is imported when its transport is asked for."""

from __future__ import annotations

import importlib
from typing import Literal

from kv_transfer.transport import KvTransport, TransferError

_MODULES = {
    "auto": ("kv_transfer.auto_transport", "AutoTransport"),
    "nixl": ("kv_transfer.nixl_transport", "NixlTransport"),
    "host": ("kv_transfer.host_transport", "HostTransport"),
    "ucxx": ("kv_transfer.ucxx_transport", "UcxxTransport"),
}


def make_transport(
    name: str,
    worker: str,
    *,
    memory: Literal["DRAM", "VRAM"] = "DRAM",
    device: int = 0,
    host: str = "127.0.0.1",
) -> KvTransport:
    """Return a transport that has not registered anything yet.

    device: number of the GPU, for memory "VRAM".   host: address that peers reach this process at, where the transport
    listens on one. Raises TransferError if there is none of that name, or it can't move such memory; what it needs from
    other packages it may miss only in `register`.
    """
    if name not in _MODULES:
        raise TransferError(f"transport {name!r}: none between processes; known are {', '.join(_MODULES)}")
    module, kind = _MODULES[name]
    try:
        make = getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        raise TransferError(f"transport {name} can't be loaded: {error}") from error
    if name == "ucxx":
        if memory == "VRAM":
            raise TransferError("transport ucxx moves host memory only: use nixl or host for GPUs")
        made: KvTransport = make(worker, host=host)
    else:
        made = make(worker, memory=memory, device=device)
    return made
