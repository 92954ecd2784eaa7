"""One agent warms two others in one process. Prints JSON: lanes, the environment left behind, the log's size."""

from __future__ import annotations

import json
import os

import numpy as np

from kv_transfer.landing import PoolAddress
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.ucx_log import process_log
from kv_transfer.warm import warm


def main() -> None:
    arrays = [np.zeros(4096, dtype=np.uint8) for _ in range(3)]
    transports = [NixlTransport(name) for name in ("prefill-worker-with-a-very-long-name", "decode", "other")]
    endpoints = [
        transport.register(
            [PoolAddress(name="scratch", base=array.ctypes.data, unit_bytes=4096, num_units=1)], generation=1, rank=0
        )
        for transport, array in zip(transports, arrays, strict=True)
    ]
    prefill, *decodes = transports
    for endpoint in endpoints[1:]:
        prefill.connect(endpoint)
    lanes = [
        warm(prefill, endpoint.agent, sleep=lambda seconds, decode=decode: decode.poll()).lane  # type: ignore[misc]
        for endpoint, decode in zip(endpoints[1:], decodes, strict=True)
    ]
    file = process_log._fd
    outcome = {
        "lanes": lanes,
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("UCX_", "NIXL_"))},
        "log_bytes": os.fstat(file).st_blocks * 512 if file >= 0 else 0,
    }
    for transport in transports:
        transport.close()
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
