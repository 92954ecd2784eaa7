"""The router with stopwatches in it: what `isthmus bench router` starts to know a request's own time from the inside.

    python -m router.probe ...      the flags of `python -m router`; GET /probe answers the times and forgets them

Own time is what the router adds by itself: from the whole body in its hands to the call of a worker handed to the
socket, and from prefill's answer in its hands to the first byte handed to the server. The router of production knows
nothing of this module, so nobody pays for it.
"""

from __future__ import annotations

import sys
import time
from contextvars import ContextVar
from typing import Any

import aiohttp
import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

import router.intake
from router import __main__, protocol
from router.app import Router
from router.body import read_body
from router.client import WorkerClient
from router.config import RouterConfig
from router.exchange import Exchange


class Stopwatch:
    """One request's moments, of time.monotonic; 0: not come yet."""

    __slots__ = ("answered", "body", "called", "shown")

    def __init__(self) -> None:
        self.body = time.monotonic()
        self.called = self.answered = self.shown = 0.0


_current: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)
_times: list[tuple[float, float]] = []


def install() -> None:
    """Put the stopwatches in. Tasks of a request inherit its context, and so find its own."""
    ask_prefill, make_session, send, build = (
        WorkerClient.prefill,
        aiohttp.ClientSession.__init__,
        Exchange._send,
        Router._build,
    )

    async def body(request: Request, config: RouterConfig) -> bytes:
        data = await read_body(request, config)
        _current.set(Stopwatch())
        return data

    async def on_sent(*_: Any) -> None:
        if (watch := _current.get()) is not None and not watch.called:
            watch.called = time.monotonic()

    def session(self: aiohttp.ClientSession, *args: Any, **options: Any) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(on_sent)
        make_session(self, *args, trace_configs=[trace], **options)

    async def prefill(
        self: WorkerClient, request: protocol.PrefillRequest, *, timeout_s: float
    ) -> protocol.PrefillResult:
        result = await ask_prefill(self, request, timeout_s=timeout_s)
        if (watch := _current.get()) is not None:
            watch.answered = time.monotonic()
        return result

    async def show(self: Exchange, data: bytes, *, is_last: bool = False) -> None:
        await send(self, data, is_last=is_last)
        watch = _current.get()
        if watch is not None and watch.answered and not watch.shown:
            watch.shown = time.monotonic()
            _times.append((watch.called - watch.body, watch.shown - watch.answered))

    def app(self: Router) -> FastAPI:
        made = build(self)
        made.add_route("/probe", _tell)
        return made

    router.intake.read_body = body  # type: ignore[attr-defined]
    aiohttp.ClientSession.__init__ = session  # type: ignore[method-assign]
    WorkerClient.prefill = prefill  # type: ignore[method-assign]
    Exchange._send = show  # type: ignore[method-assign]
    Router._build = app  # type: ignore[method-assign]


async def _tell(request: Request) -> Response:
    times, _times[:] = list(_times), []
    return Response(msgspec.json.encode(times), media_type="application/json")


if __name__ == "__main__":
    install()
    raise SystemExit(__main__.main(sys.argv[1:]))
