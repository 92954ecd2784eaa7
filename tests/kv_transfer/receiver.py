"""A decode rank's transport in a process of its own.

Run as `python receiver.py TRANSPORT MEMORY NAME GENERATION POOL_BYTES`; MEMORY is DRAM or VRAM. Prints its endpoint in
hex, then answers each line of its input: "state" with the CRC of its pool and what has arrived, "leave" by ending. In
between it polls.
"""

from __future__ import annotations

import json
import select
import sys

from pool_memory import Memory, make_pool

from kv_transfer.landing import encode
from kv_transfer.transports import make_transport


def main(kind: str, memory: Memory, name: str, generation: int, pool_bytes: int) -> None:
    pools = {"kv": make_pool(memory, pool_bytes // 4096, 4096), "scratch": make_pool(memory, 1, 4096)}
    transport = make_transport(kind, name, memory=memory)
    endpoint = transport.register([pool.address(of) for of, pool in pools.items()], generation=generation, rank=0)
    print(encode(endpoint).hex(), flush=True)
    arrived: list[str] = []
    while True:
        arrived += [message.decode() for _, message in transport.poll()]
        if select.select([sys.stdin], [], [], 0.0005)[0]:
            if sys.stdin.readline().strip() != "state":
                break
            print(json.dumps({"crc": pools["kv"].crc(), "arrived": arrived}), flush=True)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))  # type: ignore[arg-type]
