"""Locality: whether two endpoints are on one host, where a TCP lane would be a fault and shared memory can stand in."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kv_transfer.landing import Endpoint

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def host_id() -> str:
    """Return what is equal for all processes under one kernel and differs from every other host's; "" if unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def is_same_host(one: Endpoint, other: Endpoint) -> bool:
    """Unknown counts as another host."""
    return bool(one.host) and one.host == other.host
