"""What runs inside a Ray actor: one leader or one rank, each a process of its own.

Ray places, watches and ends these processes; no request and no cache byte passes through it. `run` is one call that
never ends while the process is well, so its failure is the news of a death, within milliseconds. Imported by the
driver too: nothing heavy at the top.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig

LEADER_CONCURRENCY = 3  # run, stop and address, at the same time


class ProcessEnded(RuntimeError):
    """A leader or rank returned although nobody asked it to."""


class LeaderProcess:
    """Runs a group's leader. is_remote: the router may be on another host, so it listens on its host's address."""

    def __init__(self, config_json: bytes, run_dir: str, log_path: str, is_remote: bool) -> None:
        self._config = msgspec.json.decode(config_json, type=EngineConfig)
        if is_remote:
            import ray

            self._config = msgspec.structs.replace(self._config, host=ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._run_dir = Path(run_dir)
        self._log_path = log_path
        self._stop = threading.Event()
        self._ended = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> int:
        """Serve until `stop`; raises ProcessEnded if the leader gives up by itself."""
        _log_to(self._log_path)
        try:
            if self._config.role == "prefill":
                from prefill_worker.leader import run
            else:
                from decode_worker.leader import run
            code = run(self._config, self._run_dir, spawn_ranks=False, stop=self._stop)
        except SystemExit as error:  # Ray would take it for a wish to end the actor quietly
            raise ProcessEnded(str(error)) from None
        finally:
            self._ended.set()
            shutil.rmtree(self._run_dir, ignore_errors=True)
        if not self._stop.is_set():
            raise ProcessEnded(f"the leader returned {code}; its log says why")
        return code

    def stop(self) -> None:
        """Ask `run` to drain and return."""
        self._stop.set()

    def address(self) -> dict[str, Any]:
        """Return leader.json as soon as the leader has written it; raises ProcessEnded if it never will."""
        path = self._run_dir / "leader.json"
        while not path.is_file():
            if self._ended.wait(0.05):
                raise ProcessEnded("the leader ended before it listened")
        address: dict[str, Any] = json.loads(path.read_bytes())
        return address


class RankProcess:
    """Runs one rank of a group."""

    def __init__(self, config_json: bytes, run_dir: str, log_path: str, rank: int, environment: dict[str, str]) -> None:
        self._config = msgspec.json.decode(config_json, type=EngineConfig)
        self._run_dir, self._log_path, self._rank = Path(run_dir), log_path, rank
        # before torch is loaded, which reads them once
        os.environ.update(environment)

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> None:
        """Run plans until the leader says Shutdown or is gone."""
        _log_to(self._log_path)
        try:
            from engine.rank import REFUSALS, run_rank

            try:
                run_rank(self._config, self._run_dir, self._rank)
            except REFUSALS as error:
                logging.getLogger(__name__).error("rank %d: %s", self._rank, error)
                raise ProcessEnded(str(error)) from None
        except SystemExit as error:
            raise ProcessEnded(str(error)) from None
        except ProcessEnded:
            raise
        except Exception:
            logging.getLogger(__name__).exception("rank %d failed", self._rank)
            raise


def _log_to(path: str) -> None:
    """Send this process's output, native libraries' included, and its log records to `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    handler = logging.StreamHandler(open(2, "w", closefd=False))  # noqa: SIM115 - lives as long as the process
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger(__name__).info("process %d starts %s", os.getpid(), time.strftime("%Y-%m-%d"))
