"""A prefill rank's transport in a process of its own. Run as `python sender.py ENDPOINT_IN_HEX MODE`.

Its kind is that of the endpoint.

leave: says three words and ends.   write: fills the peer's pool csa_kv again and again, unit by unit, until killed.
abandon: ends with a write under way, without a word.
"""

from __future__ import annotations

import sys

import numpy as np

from kv_transfer.host_transport import HostTransport
from kv_transfer.landing import PoolAddress, decode_endpoint
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import KvTransport, TransferStatus
from kv_transfer.ucxx_transport import UcxxTransport
from kv_transfer.warm import warm


def main(endpoint: bytes, mode: str) -> None:
    peer = decode_endpoint(endpoint)
    arrays = {pool.name: np.full(pool.unit_bytes * pool.num_units, 7, dtype=np.uint8) for pool in peer.pools}
    transport: KvTransport = {"host": HostTransport, "ucxx": UcxxTransport}[peer.transport]("sender")
    transport.register(
        [
            PoolAddress(
                name=pool.name,
                base=arrays[pool.name].ctypes.data,
                unit_bytes=pool.unit_bytes,
                num_units=pool.num_units,
            )
            for pool in peer.pools
        ],
        generation=1,
        rank=0,
    )
    transport.connect(peer)
    warm(transport, peer.agent)
    if mode == "leave":
        for word in (b"first", b"second", b"third"):
            transport.notify(peer.agent, word)
        transport.close()
        return
    pool = peer.pool("csa_kv")
    pieces = [
        Piece(pool.name, i * pool.unit_bytes, i * pool.unit_bytes, pool.unit_bytes) for i in range(pool.num_units)
    ]
    if mode == "abandon":
        transport.write(peer.agent, TransferPlan(tuple(pieces)), b"whole")
        return
    while True:
        transfer = transport.write(peer.agent, TransferPlan(tuple(pieces)), b"whole")
        while transport.check(transfer) is TransferStatus.PENDING:
            pass


if __name__ == "__main__":
    main(bytes.fromhex(sys.argv[1]), sys.argv[2])
