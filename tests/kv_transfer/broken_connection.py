"""Breaks the connection between two living agents of one process, then connects anew. Prints what happened as JSON.

A receiver's region is unmapped behind UCX's back: over cma the write fails and takes the connection with it. Over TCP
it would end the process, so nothing is done on another lane than cma.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time

import numpy as np

from kv_transfer.landing import PoolAddress
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import TransferError, TransferStatus

SIZE = 1 << 20


def main() -> None:
    source, target = np.full(SIZE, 7, dtype=np.uint8), np.zeros(SIZE, dtype=np.uint8)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    doomed = libc.mmap(None, ctypes.c_size_t(SIZE), protection, flags, -1, ctypes.c_long(0))
    sender, receiver = NixlTransport("sender"), NixlTransport("receiver")
    sender.register([pool("kv", source.ctypes.data), pool("doomed", source.ctypes.data)], generation=1, rank=0)
    peer = receiver.register([pool("kv", target.ctypes.data), pool("doomed", doomed)], generation=1, rank=0)
    sender.connect(peer)

    def write(name: str) -> str:
        try:
            transfer = sender.write(peer.agent, TransferPlan((Piece(name, 0, 0, SIZE),)))
        except TransferError:
            return "refused"
        until = time.monotonic() + 10
        while sender.check(transfer) is TransferStatus.PENDING and time.monotonic() < until:
            receiver.poll()
        return transfer.status.value

    outcomes = [write("kv")]
    lane = sender.lane(peer.agent)
    if lane == "cma":
        libc.munmap(ctypes.c_void_p(doomed), ctypes.c_size_t(SIZE))
        outcomes += [write("doomed"), write("kv")]
        sender.connect(peer)
        target[:] = 0
        outcomes += [write("kv")]
    print(json.dumps({"lane": lane, "outcomes": outcomes, "landed": bool((target == 7).all())}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the registration of memory that is gone can't be taken back


def pool(name: str, base: int) -> PoolAddress:
    return PoolAddress(name=name, base=base, unit_bytes=4096, num_units=SIZE // 4096)


if __name__ == "__main__":
    main()
