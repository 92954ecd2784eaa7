"""The router's HTTP application: routes, error objects, and the life of everything behind them.

POST /v1/chat/completions  /v1/completions      GET /v1/models  /v1/models/{id}
POST /tokenize  /detokenize       also under /v1
GET  /live  /liveness             200 as long as the process lives
GET  /ready  /readiness  /health  200 when a pair is ready, else 503 with the state and Retry-After
GET  /health_generate             200 when a pair has just made tokens, end to end
GET  /topology  /metrics  /version  /server_info  /openapi.json
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router import answer, openapi
from router.absent_routes import absent_routes
from router.body import request_id
from router.config import RouterConfig
from router.control import Control
from router.dispatch import Dispatcher, RequestRecord
from router.errors import ApiError, error_body
from router.exchange import Exchange, Job
from router.intake import Intake
from router.metrics import Metrics
from router.protocol import PROTOCOL_VERSION, SamplingParams
from router.registry import Registry
from router.tokenization import Tokenization
from router.tokenizer import Tokenizer
from router.workers import Worker

log = logging.getLogger("isthmus.router")


class Router:
    """Everything behind the routes. `app` is the ASGI application; it starts and closes the rest with its lifespan.

    tokenizer: given by whoever has loaded it already, else read from the model folder.
    """

    def __init__(self, config: RouterConfig, *, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer or Tokenizer.from_folder(Path(config.model))
        self.metrics = Metrics()
        self.registry = Registry(
            prefill=config.prefill,
            decode=config.decode,
            silence_s=config.worker_silence_s,
            lost_s=config.worker_lost_s,
        )
        self.dispatcher = Dispatcher(config, self.registry, self.metrics)
        self.intake = Intake(config, self.registry, self.tokenizer)
        self.tokenization = Tokenization(config, self.intake)
        self.metrics.watch(
            self.registry,
            running=lambda: len(self.dispatcher.records) - self.dispatcher.num_queued,
            waiting=lambda: self.dispatcher.num_queued,
        )
        if config.test_seams:
            log.warning("test seams are open: anybody who reaches this port can hold its queue and force tokens")
            for worker in self.registry.workers:
                self._observe(worker)
        self._created = int(time.time())
        self.app = self._build()
        self.control_app = Control(self.registry, on_add=self._observe).app()

    @property
    def state(self) -> str:
        return "draining" if self.dispatcher.is_draining else self.registry.state

    async def drain(self) -> None:
        """Accept nothing new and let running answers finish, for at most drain_timeout_s."""
        await self.dispatcher.drain(timeout_s=self.config.drain_timeout_s)

    def _observe(self, worker: Worker) -> None:
        if self.config.test_seams:
            worker.client.on_prefill = self.dispatcher.seams.record_leg

    # ------------------------------------------------------------ generation

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, self.intake.chat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self.intake.completion)

    async def _generate(self, request: Request, take: Callable[[Request], Awaitable[Job]]) -> Response:
        self.metrics.received.inc()
        try:
            job = await take(request)
            self.dispatcher.check_admission()
        except ApiError as error:
            # 499: the client is gone, nobody reads the answer.
            self.metrics.finish("aborted" if error.status == 499 else "rejected")
            self.metrics.rejections.labels(str(error.status)).inc()
            log.info("request %s: %s %s: %s", request.state.request_id, error.status, error.code, error.message[:500])
            raise
        return Exchange(job, self.dispatcher, self.metrics, send_timeout_s=self.config.send_timeout_s)

    async def tokenize(self, request: Request) -> Response:
        return _json(await self.tokenization.tokenize(request))

    async def detokenize(self, request: Request) -> Response:
        return _json(await self.tokenization.detokenize(request))

    # ------------------------------------------------------------ what there is

    async def models(self, request: Request) -> Response:
        """List the model once a pair is ready; before that there is none to use."""
        return _json({"object": "list", "data": [self._model()] if self.registry.is_ready else []})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.config.model_name:
            raise ApiError(
                404,
                f"model {name[:200]!r} does not exist; this server has {self.config.model_name!r}",
                code="model_not_found",
                param="model",
            )
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        max_model_len = self.intake.limits().max_model_len
        return answer.models(self.config.model_name, created=self._created, max_model_len=max_model_len)

    # ------------------------------------------------------------ how it is

    async def live(self, request: Request) -> Response:
        return _json({"status": "alive", "state": self.state})

    async def ready(self, request: Request) -> Response:
        if self.state == "ready":
            return _json({"status": "ready", "state": "ready"})
        reasons = sorted({p["reason"] for p in (pair.describe() for pair in self.registry.pairs) if p["reason"]})
        reasons += [
            f"{w.url}: {w.shown_state}: {w.reason}".rstrip(": ")
            for w in self.registry.workers
            if w.shown_state != "ready"
        ]
        raise ApiError(
            503, f"not ready: {self.state}" + "".join(f"; {r}" for r in reasons), code=self.state, retry_after_s=2
        )

    async def health_generate(self, request: Request) -> Response:
        """Make two tokens, the second of them at decode; answers as any request would if that can't be done."""
        started = time.monotonic()
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        record = RequestRecord(f"health-{uuid.uuid4().hex}", [0], sampling)
        async with aclosing(self.dispatcher.generate(record)) as outputs:
            async for _ in outputs:
                pass
        return _json({"status": "ready", "num_tokens": len(record.emitted), "seconds": time.monotonic() - started})

    async def server_info(self, request: Request) -> Response:
        limits = self.intake.limits()
        return _json(
            {
                "version": _version(),
                "protocol": PROTOCOL_VERSION,
                "model": self.config.model_name,
                "state": self.state,
                "max_model_len": limits.max_model_len or None,
                "vocab_size": limits.vocab_size or None,
                "has_tokenizer": self.tokenizer is not None,
                "config": self.config,
            }
        )

    async def topology(self, request: Request) -> Response:
        return _json(
            {
                "router": {
                    "state": self.state,
                    "model": self.config.model_name,
                    "protocol": PROTOCOL_VERSION,
                    "has_tokenizer": self.tokenizer is not None,
                    "num_requests": len(self.dispatcher.records),
                    "num_queued": self.dispatcher.num_queued,
                    "max_queue": self.config.max_queue,
                },
                "pairs": [pair.describe() for pair in self.registry.pairs],
                "workers": [worker.describe() for worker in self.registry.workers],
            }
        )

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return _json({"version": _version(), "protocol": PROTOCOL_VERSION})

    async def description(self, request: Request) -> Response:
        return _json(openapi.describe(self.config.model_name, version=_version()))

    # ------------------------------------------------------------ assembly

    def _build(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.registry.start(self.dispatcher.warm_up)
            yield
            await self.dispatcher.close()
            await self.registry.close()
            self.intake.close()

        # Requests are parsed by us, not by the framework, so it has no schema to show: openapi.py has.
        app = FastAPI(title="Isthmus", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
        app.add_middleware(_RequestIds)
        for status_or_kind in (ApiError, HTTPException, Exception):
            app.add_exception_handler(status_or_kind, _show_error)
        for path, method, handler in (
            ("/v1/chat/completions", "POST", self.chat),
            ("/v1/completions", "POST", self.completions),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/tokenize", "POST", self.tokenize),
            ("/v1/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
            ("/v1/detokenize", "POST", self.detokenize),
            ("/health", "GET", self.ready),
            ("/health_generate", "GET", self.health_generate),
            ("/server_info", "GET", self.server_info),
            ("/openapi.json", "GET", self.description),
            ("/live", "GET", self.live),
            ("/liveness", "GET", self.live),
            ("/ready", "GET", self.ready),
            ("/readiness", "GET", self.ready),
            ("/topology", "GET", self.topology),
            ("/metrics", "GET", self.metrics_text),
            ("/version", "GET", self.version),
        ):
            app.add_route(path, handler, methods=[method])
        app.router.routes.extend(absent_routes())
        if self.config.test_seams:
            app.router.routes.extend(self.dispatcher.seams.routes())
        return app


class _RequestIds:
    """Gives each request its id, and echoes it and the time until the answer's head. Plain ASGI: streams pass."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        shown_id = request_id(Request(scope))
        scope.setdefault("state", {})["request_id"] = shown_id
        header = (b"x-request-id", shown_id.encode())

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [h for h in message["headers"] if h[0] != header[0]]
                elapsed = b"%d" % round((time.monotonic() - started) * 1000)
                message["headers"] = [*headers, header, (b"openai-processing-ms", elapsed)]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _show_error(request: Request, error: Exception) -> Response:
    """Return the error object of anything that was raised; only faults of ours are logged with their trace."""
    if isinstance(error, ApiError):
        return Response(error.body(), error.status, headers=error.headers(), media_type="application/json")
    if isinstance(error, HTTPException):
        path, allowed = request.url.path, (error.headers or {}).get("Allow", "")
        known = {getattr(route, "path", "") for route in request.app.routes}
        messages = {
            404: f"{path}: no such route" + (f"; did you mean /v1{path}?" if f"/v1{path}" in known else ""),
            405: f"{request.method} is not allowed here" + (f"; use {allowed}" if allowed else ""),
        }
        codes = {404: "route_not_found", 405: "method_not_allowed"}
        body = error_body(
            error.status_code, messages.get(error.status_code, str(error.detail)), code=codes.get(error.status_code)
        )
        return Response(body, error.status_code, headers=error.headers, media_type="application/json")
    return Response(error_body(500, "internal error of the router; see its log"), 500, media_type="application/json")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _version() -> str:
    try:
        return metadata.version("isthmus")
    except metadata.PackageNotFoundError:
        return "0+checkout"
