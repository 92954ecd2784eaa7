"""Front: the HTTP side of a leader. State, /info, the event stream, and the frame around command routes.

It runs on the asyncio thread; the engine loop reports to it from its own thread. The last frames are kept, so that
a router whose connection broke asks for what it missed (`/stream?from=N`) instead of taking the worker for dead.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engine import plan as messages
from engine.config import EngineConfig
from engine.errors import Draining, InvalidRequest, NotReady, RequestError, WorkerLost
from engine.loop import EngineLoop
from engine.memory_plan import MemoryPlan
from engine.seams import Fault
from router import protocol
from router.protocol import SequenceOutput, WorkerState, WorkerStats

log = logging.getLogger(__name__)

FRAMES_KEPT = 4096
HEARTBEAT_S = 1.0
MSGPACK = "application/msgpack"

M = TypeVar("M", bound=protocol.Message)


class Front:
    """Implements engine.loop.Listener. `static` is what /info says that never changes."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        generation: int,
        limits: protocol.Limits,
        model_fingerprint: str,
        layout_fingerprint: str,
        stats: Callable[[], Awaitable[WorkerStats]],
        plan: MemoryPlan | None = None,
    ) -> None:
        """plan: what /info says of memory, until ranks have measured theirs."""
        self.config, self.generation, self.limits = config, generation, limits
        self._plan = plan
        self._memory = plan.summary() if plan is not None else None
        self._model_fingerprint = model_fingerprint
        # Arithmetic and rotation of index keys change what the cache means, as other weights would.
        numerics = f"{config.dtype}{'-hadamard' if config.uses_hadamard else ''}"
        self.fingerprints = protocol.Fingerprints(model=f"{model_fingerprint}-{numerics}", layout=layout_fingerprint)
        self.url = ""
        self.state: WorkerState = "starting"
        self.reason = ""
        self._readers: collections.Counter[str] = collections.Counter()
        self._left_at: dict[str, float] = {}
        self.failed = asyncio.Event()
        self._ask_stats = stats
        self._ranks: list[messages.RankReady] = []
        self._frames: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=FRAMES_KEPT)
        self._number = 0
        self._is_closed = False
        self._news = asyncio.Event()
        self._stats = WorkerStats()
        self._asyncio = asyncio.get_running_loop()

    # ------------------------------------------------------------ from the engine loop's thread

    def on_progress(self, rank: int, state: WorkerState, detail: str) -> None:
        log.info("rank %d: %s %s", rank, state, detail)
        self._later(lambda: self.set_state(state, detail))

    def on_ready(self, ranks: list[messages.RankReady]) -> None:
        self._later(lambda: self._become_ready(ranks))

    def on_outputs(self, outputs: list[SequenceOutput], stats: WorkerStats) -> None:
        self._later(lambda: self._publish(outputs, stats))

    def on_failed(self, reason: str) -> None:
        self._later(lambda: self._become_failed(reason))

    def _later(self, function: Callable[[], None]) -> None:
        self._asyncio.call_soon_threadsafe(function)

    # ------------------------------------------------------------ state

    def set_state(self, state: WorkerState, reason: str = "") -> None:
        """Publish a new state at once. A failed worker stays failed."""
        if self.state != "failed":
            self.state, self.reason = state, reason
            self._publish([], self._stats)

    def _become_ready(self, ranks: list[messages.RankReady]) -> None:
        self._ranks = ranks
        wrong = [r for r in ranks if r.model_fingerprint != self._model_fingerprint]
        if wrong:
            self._become_failed(
                f"rank {wrong[0].rank} loaded model {wrong[0].model_fingerprint}, the leader read "
                f"{self._model_fingerprint}: the folder changed while starting; start again"
            )
        else:
            self._show_memory()
            self.set_state("ready")

    def _show_memory(self) -> None:
        """Put the figures of the rank that has least left in place of the plan's; ranks have made sure that it fits."""
        measured = [rank.memory for rank in self._ranks if rank.memory is not None]
        if self._plan is not None and measured:
            tightest = min(measured, key=lambda memory: memory.free_bytes)
            self._memory = self._plan.corrected(tightest).summary()

    def _become_failed(self, reason: str) -> None:
        log.error("failed: %s", reason)
        self.set_state("failed", reason)
        self.failed.set()

    def take_lost_routers(self, after_s: float) -> list[str]:
        """Return, once, each router that has had no stream open for `after_s`."""
        now = self._asyncio.time()
        lost = [router for router, since in self._left_at.items() if now - since >= after_s]
        for router in lost:
            del self._left_at[router]
        return lost

    def require_ready(self) -> None:
        """Raises NotReady, Draining or WorkerLost unless requests are taken."""
        if self.state == "failed":
            raise WorkerLost(f"worker {self.config.worker_id} failed: {self.reason}")
        if self.state in ("draining", "stopped"):
            raise Draining(f"worker {self.config.worker_id} is draining and takes nothing new")
        if self.state != "ready":
            raise NotReady(f"worker {self.config.worker_id} is {self.state}; wait until /info says ready")

    def info(self) -> protocol.WorkerInfo:
        return protocol.WorkerInfo(
            id=self.config.worker_id,
            role=self.config.role,
            url=self.url,
            state=self.state,
            generation=self.generation,
            leader_pid=os.getpid(),
            reason=self.reason,
            model=self.config.model,
            served_model_name=self.config.served_model_name or Path(self.config.model).resolve().name,
            ranks=[
                protocol.RankInfo(rank=r.rank, pid=r.pid, device=r.device, numa=r.numa, exchange=r.exchange)
                for r in self._ranks
            ],
            fingerprints=self.fingerprints,
            limits=self.limits,
            memory=self._memory,
            transport=self._ranks[0].transport if self._ranks else "",
            endpoints=[r.endpoint for r in self._ranks],
            stats=self._stats,
        )

    # ------------------------------------------------------------ frames

    def _publish(self, outputs: list[SequenceOutput], stats: WorkerStats) -> None:
        self._stats = stats
        self._number += 1
        frame = protocol.StreamFrame(
            number=self._number,
            generation=self.generation,
            state=self.state,
            outputs=outputs,
            stats=stats,
            reason=self.reason,
        )
        self._frames.append((self._number, protocol.encode_frame(frame)))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """End every stream once its reader has all frames."""
        self._is_closed = True
        self._news.set()

    async def heartbeat(self) -> None:
        """Publish a frame every second that had none; runs for ever."""
        while True:
            seen = self._number
            await asyncio.sleep(HEARTBEAT_S)
            if self._number == seen:
                try:
                    stats = await self._ask_stats() if self.state in ("ready", "draining") else self._stats
                except Exception:
                    log.exception("the worker can't be asked for its gauges: the last ones are told again")
                    stats = self._stats
                self._publish([], stats)

    async def _read_frames(self, number: int, router: str) -> AsyncIterator[bytes]:
        """Yield frames from `number` on. Ends when the reader has fallen behind what is kept."""
        self._readers[router] += 1
        self._left_at.pop(router, None)
        try:
            while True:
                if number <= self._number:
                    first = self._frames[0][0]
                    if number < first:
                        return
                    start = number - first
                    batch = [self._frames[i][1] for i in range(start, len(self._frames))]
                    number += len(batch)
                    yield b"".join(batch)
                elif self._is_closed:
                    return
                else:
                    await self._news.wait()
        finally:
            self._readers[router] -= 1
            if not self._readers[router]:
                del self._readers[router]
                self._left_at[router] = self._asyncio.time()

    # ------------------------------------------------------------ routes

    def app(self, routes: list[Route]) -> Starlette:
        """Return the application: the common routes and those of the role."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/info", self._info),
                Route("/stream", self._stream),
                *routes,
            ]
        )

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.state != "failed" else 503)

    async def _info(self, _: Request) -> Response:
        return Response(msgspec.json.encode(self.info()), media_type="application/json")

    async def _stream(self, request: Request) -> Response:
        try:
            wanted = int(request.query_params.get("from", "0"))
        except ValueError:
            return error_response(InvalidRequest(f"from={request.query_params['from']!r}: must be a frame number"))
        first = self._frames[0][0] if self._frames else self._number + 1
        if wanted and not first <= wanted <= self._number + 1:
            text = f"frame {wanted} is not kept any more, or not made yet: {first}..{self._number} are; read /info anew"
            return error_response(InvalidRequest(text), status=410)
        frames = self._read_frames(wanted or self._number + 1, request.query_params.get("router", ""))
        return StreamingResponse(frames, media_type="application/octet-stream")


def error_response(error: RequestError, *, status: int | None = None) -> Response:
    return Response(protocol.encode(error.body()), status_code=status or error.status, media_type=MSGPACK)


async def until_disconnected(request: Request) -> None:
    """Return when the caller has closed its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def command(path: str, kind: type[M], handler: Callable[[M, Request], Awaitable[protocol.Message]]) -> Route:
    """Return a POST route that decodes a `kind`, awaits `handler` and encodes its answer or error."""

    async def respond(request: Request) -> Response:
        try:
            message = protocol.decode(await request.body() or b"\x80", kind)
            return Response(protocol.encode(await handler(message, request)), media_type=MSGPACK)
        except msgspec.MsgspecError as e:
            return error_response(InvalidRequest(f"{path}: {e}"))
        except RequestError as e:
            return error_response(e)
        except ClientDisconnect:
            return Response(status_code=499)  # a caller that left while it sent; nobody reads this

    return Route(path, respond, methods=["POST"])


def seam_routes(loop: EngineLoop[Any]) -> list[Route]:
    """Return the routes of engine.seams: POST /seams (a Fault, JSON), GET /seams, POST /seams/release."""

    async def arm(request: Request) -> Response:
        try:
            fault = msgspec.json.decode(await request.body(), type=Fault)
        except msgspec.MsgspecError as e:
            return Response(f"/seams: {e}", status_code=400)
        await asyncio.wrap_future(loop.call(lambda worker: worker.seams.arm(fault)))
        return Response(status_code=204)

    async def reached(_: Request) -> Response:
        what = await asyncio.wrap_future(loop.call(lambda worker: worker.seams.reached()))
        return Response(msgspec.json.encode(what), media_type="application/json")

    async def release(_: Request) -> Response:
        count = await asyncio.wrap_future(loop.call(lambda worker: worker.seams.release()))
        return Response(msgspec.json.encode(count), media_type="application/json")

    return [
        Route("/seams", arm, methods=["POST"]),
        Route("/seams", reached),
        Route("/seams/release", release, methods=["POST"]),
    ]
