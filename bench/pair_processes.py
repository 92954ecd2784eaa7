"""Cluster: the processes of a benchmark's cluster, their answers over HTTP, and their end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_END_WITHIN_S = 40.0
_ROUTER = re.compile(r"isthmus_(\w+_seconds_(?:sum|count)) (\S+)")
_WORKER = re.compile(r"isthmus_worker_(\w+)\{([^}]*)\} (\S+)")


class NotReady(Exception):
    """It did not come up in time, or a process has ended; the text has the end of its log."""


class Cluster:
    """Starts at once what bench.pair's arguments say. Logs lie beside the report."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.url = f"http://127.0.0.1:{args.port}"
        self._logs: Path = args.json.parent / f"{args.json.stem}_logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        common, model = shlex.split(args.common), args.model
        if args.up:
            words = ["-m", "deploy.cli", "up", args.up, "--port", str(args.port), *common]
            self._commands = {"up": (words, "")}
        else:
            ports = {"prefill": args.port + 1, "decode": args.port + 2}
            self._commands = {
                role: (
                    [
                        *("-m", f"{role}_worker", "--model", model, "--port", str(ports[role])),
                        *common,
                        *shlex.split(getattr(args, role)),
                    ],
                    getattr(args, f"{role}_gpus"),
                )
                for role in ports
            }
            urls = [word for role, port in ports.items() for word in (f"--{role}", f"http://127.0.0.1:{port}")]
            self._commands["router"] = (["-m", "router", "--model", model, "--port", str(args.port), *urls], "")
        for name in self._commands:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a role, again if it has ended."""
        words, gpus = self._commands[name]
        environ = os.environ | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        with (self._logs / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *words], env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    def await_ready(self, within_s: float) -> dict[str, Any]:
        """Return the topology once a pair is ready. Raises NotReady."""
        until = time.monotonic() + within_s
        while True:
            with contextlib.suppress(OSError):
                self.get("/ready")
                found: dict[str, Any] = json.loads(self.get("/topology"))
                return found
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise NotReady(f"{name} ended with code {process.returncode}: {self._tail(name)}")
            if time.monotonic() > until:
                tails = "; ".join(f"{name}: {self._tail(name)}" for name in self._processes)
                raise NotReady(f"not ready within {within_s:.0f} s: {tails}")
            time.sleep(0.3)

    def await_end(self, name: str, within_s: float) -> bool:
        """Whether a role's process ends in time."""
        try:
            self._processes[name].wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def get(self, path: str, *, base: str = "") -> str:
        """Raises OSError, urllib's errors among it."""
        with urllib.request.urlopen(f"{base or self.url}{path}", timeout=5) as reply:
            return str(reply.read().decode())

    def post(self, path: str, body: Any, *, base: str = "", timeout_s: float = 60.0) -> Any:
        """Return the answer's JSON, an error's too; None if it has none. Raises OSError."""
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{base or self.url}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s) as reply:
                said = reply.read()
        except urllib.error.HTTPError as error:
            said = error.read()
        return json.loads(said) if said.strip() else None

    def model_name(self) -> str:
        return str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    def worker(self, role: str) -> dict[str, Any]:
        """Return what /topology says of the only worker of a role. Raises OSError, StopIteration if there is none."""
        workers = json.loads(self.get("/topology"))["workers"]
        return dict(next(worker for worker in workers if worker["role"] == role))

    def metrics(self) -> dict[str, float]:
        """Return sums and counts of the router's times, and the workers' counters as "prefill.handovers", added up."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if match := _ROUTER.match(line):
                found[match[1]] = float(match[2])
            elif match := _WORKER.match(line):
                role = re.search(r'role="(\w+)"', match[2])
                name = f"{role[1] if role else ''}.{match[1]}"
                found[name] = found.get(name, 0.0) + float(match[3])
        return found

    def command(self, words: list[str], *, limit_s: float) -> str:
        """Run a command of `isthmus`; return what went wrong, "" if nothing."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "deploy.cli", *words], capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return f"not done within {limit_s:.0f} s"
        return "" if done.returncode == 0 else f"exit code {done.returncode}: {(done.stdout + done.stderr)[-600:]}"

    def end(self) -> None:
        """End everything: gently, then not."""
        for process in reversed(self._processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _END_WITHIN_S
        for process in self._processes.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it
                process.wait()

    def _tail(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text(errors="replace")[-600:]
