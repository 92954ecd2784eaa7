"""UcxLog: which protocol UCX chose for remote writes, read back from what it prints.

NIXL can't name the lane. With UCX_PROTO_INFO=y UCX 1.23 prints a table at the first use of each configuration of an
endpoint:

    | <first 31 characters of the agent's name> intra-node cfg#1 |
    | remote memory write by ucp_put*(multi) from host memory to host |
    | 0..inf | zero-copy | cma/memory |

A configuration that two endpoints share is printed once. UCX has one log per process, chosen when its library is
loaded; so there is one UcxLog per process. It goes to an anonymous memory file: nothing reaches the terminal, nothing
is left on disk even if the process is killed, and what was read is given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

WORKER_NAME_LENGTH = 31
_ENVIRONMENT = ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO")
_TITLE = re.compile(r"\|\s+(\S.*?) (self|intra-node|inter-node) cfg#\d+\s+\|$")
_LAST_RANGE = re.compile(r"\|\s*\d+\S*\.\.inf\s*\|[^|]*\|\s*(\S.*?)\s*\|$")
_LANE = re.compile(r"(?:^|\bon )([a-z0-9_]+)/")


@dataclasses.dataclass(frozen=True, slots=True)
class WriteTable:
    """One table for remote writes. scope: self, intra-node or inter-node.  lane: e.g. "cma", "rc_mlx5+cuda_ipc".

    is_device: out of a GPU's memory. Besides, UCX prints what it does with host memory: words and flushes, say.
    """

    worker: str
    scope: str
    lane: str
    is_device: bool = False


def parse_tables(lines: list[str]) -> Iterator[WriteTable]:
    """Yield the tables for remote writes in UCX's log lines; the last range, of unbounded size, gives the lane."""
    worker = scope = ""
    is_write = is_device = False
    for line in lines:
        if title := _TITLE.search(line):
            worker, scope, is_write = title[1], title[2], False
        elif "remote memory write by" in line:
            is_write, is_device = True, "from host memory" not in line
        elif is_write and (last := _LAST_RANGE.search(line)):
            lanes = list(dict.fromkeys(_LANE.findall(last[1])))
            yield WriteTable(worker, scope, "+".join(lanes) or "unknown", is_device)
            is_write = False


class UcxLog:
    """Collects tables while the process lives. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._is_decided = False
        self._position = 0
        self._rest = ""
        self._tables: list[WriteTable] = []

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Point UCX's log here while UCX is loaded or creates a context, then restore the environment.

        Does nothing if the user has set any of UCX's log variables, or if UCX was loaded before: its log has been
        decided then, and the tables would go to the terminal. The lane is "unknown" in both cases.
        """
        with self._lock:
            if not self._is_decided:
                self._is_decided = True
                if not any(name in os.environ for name in _ENVIRONMENT) and not _is_ucx_loaded():
                    self._fd = os.memfd_create("ucx-log")
            if self._fd < 0:
                yield
                return
            # By process id, not "self": a child started meanwhile must not open a file of its own under this number.
            os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{self._fd}"
            os.environ["UCX_PROTO_INFO"] = "y"
            try:
                yield
            finally:
                del os.environ["UCX_LOG_FILE"], os.environ["UCX_PROTO_INFO"]

    def tables(self, agent: str, *, is_device: bool = False) -> list[WriteTable]:
        """Return the tables printed so far for an agent of this process and such memory, without those to itself."""
        with self._lock:
            self._read()
            worker = agent[:WORKER_NAME_LENGTH].strip()
            found = [t for t in self._tables if t.worker == worker and t.scope != "self"]
            return [t for t in found if t.is_device is is_device]

    def _read(self) -> None:
        if self._fd < 0:
            return
        ctypes.CDLL(None).fflush(None)  # UCX writes through a C stream with a 4 KiB buffer
        size = os.fstat(self._fd).st_size
        if size <= self._position:
            return
        text = self._rest + os.pread(self._fd, size - self._position, self._position).decode(errors="replace")
        self._position = size
        os.ftruncate(self._fd, 0)  # UCX goes on at its own offset; what lies before becomes a hole
        *lines, self._rest = text.split("\n")
        for line in lines:
            if "UCX  " in line:
                logger.info("ucx: %s", line.split("UCX  ", 1)[1].strip())
        self._tables += parse_tables(lines)


def _is_ucx_loaded() -> bool:
    with open("/proc/self/maps") as maps:
        return any("libucs" in line and "nixl" in line for line in maps)


process_log = UcxLog()
"""The only instance outside tests."""
