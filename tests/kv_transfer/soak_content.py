"""What the processes of the soak agree on: geometry, times, and what units hold that belong to nobody."""

from __future__ import annotations

import os
from pathlib import Path

from kv_transfer.layout import KVLayout, make_group

BLOCK_TOKENS = 16
NUM_BLOCKS, NUM_SLOTS = 512, 16
DEADLINE_S = 0.5
"""Of a write."""

MAX_BLOCKS = 96
"""Of one prompt: 4 MB, so that a write lasts long enough to be hit."""

LAYOUT = KVLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        make_group("csa_kv", "block", [("rows", 8, 8, "fp32", 128)]),
        make_group("csa_index", "block", [("keys", 8, 8, "fp32", 32)]),
        make_group("hca_kv", "block", [("rows", 4, 1, "fp32", 128)]),
        make_group("state", "slot", [("window", 16, 8, "fp32", 128)]),
    ),
)
FREE, GONE = 0xEEEE_EEEE_EEEE_EEEE, 0xDDDD_DDDD_DDDD_DDDD
"""What units hold that belong to nobody: at the receiver, and at the writer."""


def resources() -> dict[str, int]:
    """Return what this process holds: bytes of memory that no file backs, and file descriptors."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))}
    return {"bytes": sum(held.values()) * 1024, "fds": len(os.listdir("/proc/self/fd"))}
