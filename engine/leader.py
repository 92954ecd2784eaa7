"""The leader process of a worker group: makes the rings, starts ranks if asked to, serves HTTP, drains, ends.

run_dir/leader.json    where the leader is: url, pid, generation, and where its rings are
run_dir/config.json    the group's EngineConfig, for ranks that the leader spawns
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import operator
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.routing import Route

from engine import numa_binding
from engine.config import EngineConfig
from engine.front import Front, command, seam_routes
from engine.loop import EngineLoop
from engine.memory_plan import MemoryPlan, plan_memory
from engine.model.config import DeepSeekV4Config
from engine.model.folder_check import require_loadable
from engine.profiles import profile_route
from engine.ring import LeaderEnd
from engine.served_model import served_fingerprint, served_model
from router import protocol

log = logging.getLogger(__name__)

_ROUTER_LOST_S = 5.0  # a router that lives has given up its requests here by then (worker_silence_s + worker_lost_s)
_PR_SET_PDEATHSIG = 1
REFUSED = 2  # exit code: a checkpoint or settings that can't be served
_FAILED_LINGER_S = 1.0  # a failed leader stays long enough for the router to read why


class LeaderAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What leader.json holds. rings: see engine.ring.LeaderEnd.address."""

    url: str
    pid: int
    generation: int
    rings: dict[str, Any]


class LeaderContext:
    """What a role may use: its configuration, the plan, the loop and the front."""

    def __init__(
        self, config: EngineConfig, *, plan: MemoryPlan, model: DeepSeekV4Config, loop: EngineLoop[Any], front: Front
    ) -> None:
        self.config, self.plan, self.model, self.loop, self.front = config, plan, model, loop, front


def run_leader(
    config: EngineConfig,
    run_dir: Path,
    *,
    build: Callable[[LeaderContext], list[Route]],
    spawn_ranks: bool,
    stop: threading.Event | None = None,
) -> int:
    """Serve until `stop` is set, or SIGTERM/SIGINT if this is the main thread; return the exit code.

    build: makes the role's worker, sets `context.loop.worker`, returns the role's routes.
    """
    return asyncio.run(_Leader(config, run_dir, build, spawn_ranks).main(stop))


class _Leader:
    def __init__(
        self,
        config: EngineConfig,
        run_dir: Path,
        build: Callable[[LeaderContext], list[Route]],
        spawn_ranks: bool,
    ) -> None:
        self._config, self._run_dir, self._build, self._spawn = config, run_dir, build, spawn_ranks
        self._children: list[subprocess.Popen[bytes]] = []
        self._stopping = asyncio.Event()

    async def main(self, stop: threading.Event | None) -> int:
        config = self._config
        numa_binding.bind(node=config.numa_node, cpus=config.cpus)
        model = served_model(config).config
        plan = plan_memory(config, model)
        if config.load_format != "synthetic":
            require_loadable(config.model, model)  # ranks would find it too, once they have torch and a device
        end = LeaderEnd(config.ranks)
        generation = time.time_ns()
        front = Front(
            config,
            generation=generation,
            limits=protocol.Limits(
                max_model_len=plan.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                block_tokens=config.block_size,
                num_blocks=plan.num_blocks,
                vocab_size=model.vocab_size,
            ),
            model_fingerprint=served_fingerprint(config),
            layout_fingerprint=plan.layout.fingerprint(),
            stats=lambda: asyncio.wrap_future(loop.call(lambda worker: worker.stats())),
            plan=plan,
        )
        loop: EngineLoop[Any] = EngineLoop(end, front)
        listener = _listen(config.host, config.port)
        front.url = f"http://{_advertised(config.host)}:{listener.getsockname()[1]}"
        routes = self._build(LeaderContext(config, plan=plan, model=model, loop=loop, front=front))
        routes += [command("/drain", protocol.Ack, self._drain), profile_route(loop)]
        if config.test_seams:
            log.warning("test seams are open: anybody who reaches this port can hold requests and kill this group")
            routes += seam_routes(loop)
        thread = threading.Thread(target=loop.run, name="engine-loop", daemon=True)
        thread.start()
        server = _Server(front, routes, listener)
        tasks = [asyncio.create_task(server.serve()), asyncio.create_task(front.heartbeat())]
        self._publish_address(front.url, generation, end)
        log.info("%s worker %s at %s\n%s", config.role, config.worker_id, front.url, plan.table())
        if self._spawn:
            self._start_ranks(loop)
        self._catch_signals()
        try:
            return await self._until_stopped(front, loop, stop)
        finally:
            (self._run_dir / "leader.json").unlink(missing_ok=True)
            front.close()
            server.should_exit = True
            loop.stop()
            await asyncio.to_thread(self._end_ranks)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(tasks[0], 5)
            for task in tasks:
                task.cancel()
            thread.join(5)

    async def _until_stopped(self, front: Front, loop: EngineLoop[Any], stop: threading.Event | None) -> int:
        failed = asyncio.create_task(front.failed.wait())
        while not (self._stopping.is_set() or failed.done() or (stop is not None and stop.is_set())):
            await asyncio.wait({failed}, timeout=0.25)
            for router in front.take_lost_routers(_ROUTER_LOST_S):
                await asyncio.wrap_future(loop.call(operator.methodcaller("router_lost", router)))
        if failed.done():
            await asyncio.sleep(_FAILED_LINGER_S)
            return REFUSED if loop.is_refused else 1
        failed.cancel()
        front.set_state("draining")
        deadline = time.monotonic() + self._config.drain_timeout_s
        while time.monotonic() < deadline and not front.failed.is_set():
            if await asyncio.wrap_future(loop.call(lambda worker: worker.is_idle)):
                break
            await asyncio.sleep(0.05)
        await asyncio.wrap_future(loop.call(lambda worker: worker.abort_all("the worker is shutting down")))
        front.set_state("stopped")
        return 0

    async def _drain(self, _: protocol.Ack, __: Request) -> protocol.Message:
        self._stopping.set()
        return protocol.Ack()

    def _publish_address(self, url: str, generation: int, end: LeaderEnd) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        address = LeaderAddress(url=url, pid=os.getpid(), generation=generation, rings=end.address)
        part = self._run_dir / "leader.json.part"
        part.write_bytes(msgspec.json.encode(address))
        part.rename(self._run_dir / "leader.json")

    def _start_ranks(self, loop: EngineLoop[Any]) -> None:
        (self._run_dir / "config.json").write_bytes(msgspec.json.encode(self._config))
        for rank in range(self._config.ranks):
            child = subprocess.Popen(
                [sys.executable, "-m", "engine.rank", str(self._run_dir), str(rank)],
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            self._children.append(child)
            loop.watch(child.pid, rank)

    def _end_ranks(self) -> None:
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                log.warning("rank process %d did not end in 10 s: killed", child.pid)
                child.kill()
                child.wait()

    def _catch_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the leader decides when to end."""

    def __init__(self, front: Front, routes: list[Route], listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                front.app(routes), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2
            )
        )
        self._listener = listener

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets or [self._listener])


def _advertised(host: str) -> str:
    """Return the host that peers are told: a wildcard is no address."""
    if host in ("", "0.0.0.0", "::"):
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError:
            host = "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _die_with_parent() -> None:
    """In the child: be killed when the leader ends, even if stopped, so that nothing is written after its death."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle off: small answers would wait 40 ms otherwise.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        raise SystemExit(
            f"cannot listen on {host}:{port}: {e.strerror}; choose another --port (0 takes a free one)"
        ) from e
    listener.listen(1024)
    listener.setblocking(False)
    return listener
