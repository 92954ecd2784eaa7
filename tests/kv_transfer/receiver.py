"""A decode rank's transport in a process of its own. Run as `python receiver.py TRANSPORT NAME GENERATION POOL_BYTES`.

Prints its endpoint in hex, then answers each line of its input: "state" with the CRC of its pool and what has arrived,
"leave" by ending. In between it polls.
"""

from __future__ import annotations

import json
import select
import sys
import zlib

import numpy as np

from kv_transfer.host_transport import HostTransport
from kv_transfer.landing import PoolAddress, encode
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transport import KvTransport
from kv_transfer.ucxx_transport import UcxxTransport


def main(kind: str, name: str, generation: int, pool_bytes: int) -> None:
    arrays = {"kv": np.zeros(pool_bytes, dtype=np.uint8), "scratch": np.zeros(4096, dtype=np.uint8)}
    pools = [
        PoolAddress(name=pool, base=array.ctypes.data, unit_bytes=4096, num_units=array.size // 4096)
        for pool, array in arrays.items()
    ]
    transport: KvTransport = {"host": HostTransport, "nixl": NixlTransport, "ucxx": UcxxTransport}[kind](name)
    endpoint = transport.register(pools, generation=generation, rank=0)
    print(encode(endpoint).hex(), flush=True)
    arrived: list[str] = []
    while True:
        arrived += [message.decode() for _, message in transport.poll()]
        if select.select([sys.stdin], [], [], 0.0005)[0]:
            if sys.stdin.readline().strip() != "state":
                break
            print(json.dumps({"crc": zlib.crc32(arrays["kv"]), "arrived": arrived}), flush=True)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
