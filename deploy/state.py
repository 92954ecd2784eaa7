"""Where running clusters are written down, so that `isthmus status` and `isthmus down` find them by port.

$XDG_STATE_HOME/isthmus/<port>/cluster.json     while the cluster runs
$XDG_STATE_HOME/isthmus/<port>/logs/            of the last start; kept when the cluster ends
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """One `isthmus up`. created: start time of its process, since pids are used again. run_dir: its temporary files."""

    pid: int
    created: float
    url: str
    port: int
    source: str
    model: str
    run_dir: str
    log_dir: str

    @property
    def process(self) -> psutil.Process | None:
        """The process, or None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) > 1 or process.status() in (
                psutil.STATUS_ZOMBIE,
                psutil.STATUS_DEAD,
            ):
                return None
            return process
        except psutil.NoSuchProcess:
            return None


def state_directory(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "isthmus"


def save(state: ClusterState, environ: Mapping[str, str]) -> None:
    path = state_directory(environ) / str(state.port) / "cluster.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_bytes(msgspec.json.encode(state))
    draft.rename(path)


def forget(port: int, environ: Mapping[str, str]) -> None:
    (state_directory(environ) / str(port) / "cluster.json").unlink(missing_ok=True)


def running(environ: Mapping[str, str]) -> list[ClusterState]:
    """Return the clusters whose process lives; clear up after those that were killed without a chance to."""
    found = []
    for path in sorted(state_directory(environ).glob("*/cluster.json")):
        try:
            state = msgspec.json.decode(path.read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError):
            continue
        if state.process is not None:
            found.append(state)
        else:
            _end_users_of(state.run_dir)
            shutil.rmtree(state.run_dir, ignore_errors=True)
            path.unlink(missing_ok=True)
    return found


def _end_users_of(run_dir: str) -> None:
    """Kill processes with a file open below `run_dir`: Ray's agents outlive a killed raylet by a minute."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            links = (os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir())
            if any(link.startswith(run_dir + "/") for link in links):
                process.kill()
