"""Hand: the roles of one cluster, started when a test says so. Link: a TCP link that it can cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER_FLAGS = (
    "--dtype=float32",
    "--kv-cache-dtype=fp32",
    "--block-size=128",
    "--max-num-batched-tokens=128",
    "--max-num-seqs=8",
    "--kv-cache-memory-gib=0.06",
    "--pool-poison=true",
    "--test-seams=true",
)


class Link:
    """Carries a port of this machine to another one, as long as it is whole. When the other one refuses, so does it.

    requests: the method and path of every HTTP request that went through.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port, self._target = port, target
        self.requests: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._passes = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._is_whole = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self.mend()

    def cut(self) -> None:
        """Reset every connection; new ones are taken."""
        self._run(self._cut())

    def refuse(self) -> None:
        """Reset every connection and take none any more."""
        self._is_whole = False
        self._run(self._refuse())

    def mute(self) -> None:
        """Let nothing through, and tell nobody: connections stay, and new ones are taken."""
        self._loop.call_soon_threadsafe(self._passes.clear)

    def mend(self) -> None:
        """Carry everything again; what came while it was mute is late, not lost."""
        self._is_whole = True
        self._run(self._mend())

    def close(self) -> None:
        self._is_whole = False
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _mend(self) -> None:
        self._passes.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()

    async def _follow(self) -> None:
        """Refuse until the target listens again."""
        if self._server is None:
            return
        await self._refuse()
        while self._is_whole:
            await asyncio.sleep(0.05)
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._target)
                writer.transport.abort()
                return await self._mend()

    async def _end(self) -> None:
        await self._refuse()
        self._passes.set()
        while len(asyncio.all_tasks()) > 1:  # each ends with its connection
            await asyncio.sleep(0.01)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            await self._follow()
            return
        ends = {writer, to_writer}
        self._writers |= ends
        pumps = [
            asyncio.create_task(self._pump(reader, to_writer, is_request=True)),
            asyncio.create_task(self._pump(to_reader, writer, is_request=False)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._writers -= ends
        for end in ends:
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._passes.wait()
                if is_request:
                    self.requests += [head.decode() for head in re.findall(rb"^(?:GET|POST) /[^? ]*", data)]
                writer.write(data)
                await writer.drain()


class Hand:
    """Knows each role by name: "router", "prefill-0", "decode-0", ... Nothing lives before `begin`.

    links: names of the workers that the router reaches over a Link only.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        find_free_ports: Callable[[int], list[int]],
        *,
        prefill: int = 1,
        decode: int = 1,
        links: tuple[str, ...] = (),
    ) -> None:
        self._folder, self._model = folder, model
        counts = {"prefill": prefill, "decode": decode}
        self.workers_of = {role: [f"{role}-{n}" for n in range(count)] for role, count in counts.items()}
        names = ["router", *(name for of_role in self.workers_of.values() for name in of_role)]
        ports = find_free_ports(len(names) + len(links))
        self.ports = dict(zip(names, ports, strict=False))
        self.links = {name: Link(port, self.ports[name]) for name, port in zip(links, ports[len(names) :], strict=True)}
        self.url = f"http://127.0.0.1:{self.ports['router']}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, name: str, *flags: str) -> None:
        """Start a role, again if it has ended; returns at once."""
        assert name not in self.processes or self.processes[name].poll() is not None, f"{name} lives"
        model, port = f"--model={self._model}", f"--port={self.ports[name]}"
        if name == "router":
            words = ["router", model, port, "--test-seams", *self._worker_flags()]
        else:
            words = [f"{name.split('-')[0]}_worker", model, port, f"--worker-id={name}", *WORKER_FLAGS]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ISTHMUS_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *words, *flags], cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    def begin_all(self) -> None:
        """Start every role and wait until each pair is ready."""
        for name in self.ports:
            self.begin(name)
        self.await_true(self.all_pairs_ready, timeout_s=90)

    def kill(self, name: str) -> None:
        """SIGKILL a role's leader; the kernel ends its ranks with it."""
        self.processes[name].kill()
        self.processes[name].wait(10)

    def rank_of(self, name: str) -> psutil.Process:
        """Return the rank of a worker as soon as there is one."""
        deadline = time.monotonic() + 20
        while True:
            if children := psutil.Process(self.processes[name].pid).children():
                return children[0]
            assert time.monotonic() < deadline, f"{name} starts no rank"
            time.sleep(0.02)

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for link in self.links.values():
            link.close()

    # ------------------------------------------------------------ what faults.Site asks of a cluster

    def topology(self) -> dict[str, Any]:
        """Return the router's; a worker's url is its own, whatever link the router takes."""
        seen = dict(httpx.get(f"{self.url}/topology").raise_for_status().json())
        for worker in seen["workers"]:
            if worker["id"] in self.ports:
                worker["url"] = self.address(worker["id"])
        return seen

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["id"]: worker for worker in self.topology()["workers"]}

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def all_pairs_ready(self) -> bool:
        try:
            return all(pair["state"] == "ready" for pair in self.topology()["pairs"])
        except httpx.HTTPError:
            return False

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def answers(self, name: str) -> bool:
        """Whether a worker's leader can be asked, loaded or not."""
        try:
            return httpx.get(f"{self.address(name)}/info", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def await_true(self, is_true: Callable[[], bool], *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline:
                logs = "\n".join(log.read_text(errors="replace")[-2000:] for log in self._folder.glob("*.log"))
                pytest.fail(f"not so within {timeout_s} s; the roles printed\n{logs}")
            time.sleep(0.05)

    def _worker_flags(self) -> list[str]:
        flags = []
        for role, names in self.workers_of.items():
            for name in names:
                port = self.links[name].port if name in self.links else self.ports[name]
                flags.append(f"--{role}=http://127.0.0.1:{port}")
        return flags
