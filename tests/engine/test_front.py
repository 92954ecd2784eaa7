"""The frame around a leader's command routes."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from engine.front import command
from router import protocol


def test_caller_that_leaves_while_sending_runs_no_command_and_raises_nothing() -> None:
    ran: list[protocol.Ack] = []

    async def handler(message: protocol.Ack, _: Request) -> protocol.Message:
        ran.append(message)
        return message

    body = iter(
        [{"type": "http.request", "body": b"\x80", "more_body": True}, {"type": "http.disconnect"}],
    )
    statuses: list[int] = []

    async def receive() -> Any:
        return next(body)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def call(route: Route) -> None:
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "query_string": b""}
        await route.handle(scope, receive, send)

    asyncio.run(call(command("/x", protocol.Ack, handler)))
    assert statuses == [499]
    assert ran == []
