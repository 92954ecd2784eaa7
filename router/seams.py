"""Seams of the router: tests hold its queue, and see what was sent to prefill. No route leads here unless `test_seams`.

POST /seams/hold, /seams/release    requests stay at the head of the queue meanwhile
GET  /seams/prefill_legs            the last requests sent to prefill workers, each with its answer
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.protocol import PrefillRequest, PrefillResult

LEGS_KEPT = 64


class RouterSeams:
    def __init__(self) -> None:
        self.queue_is_open = asyncio.Event()
        self.queue_is_open.set()
        self._legs: collections.deque[dict[str, Any]] = collections.deque(maxlen=LEGS_KEPT)

    def record_leg(self, request: PrefillRequest, result: PrefillResult) -> None:
        """Keep what went to a prefill worker; called for every request when seams are open."""
        self._legs.append({"request": msgspec.to_builtins(request), "result": msgspec.to_builtins(result)})

    def routes(self) -> list[Route]:
        async def hold(_: Request) -> Response:
            self.queue_is_open.clear()
            return Response(status_code=204)

        async def release(_: Request) -> Response:
            self.queue_is_open.set()
            return Response(status_code=204)

        async def prefill_legs(_: Request) -> Response:
            return Response(msgspec.json.encode(list(self._legs)), media_type="application/json")

        return [
            Route("/seams/hold", hold, methods=["POST"]),
            Route("/seams/release", release, methods=["POST"]),
            Route("/seams/prefill_legs", prefill_legs),
        ]
