"""Connections: a head has a time and a size; what is no HTTP is refused, after what came whole before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from router import connection
from router.connection import Connection

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def served(release: asyncio.Event) -> AsyncIterator[int]:
    """Yield the port of a server whose answers wait for `release`."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_level="error"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def exchange(port: int, *pieces: bytes, release: asyncio.Event | None = None) -> bytes:
    """Send pieces with a breath between them, then let answers go; return all that comes until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    if release is not None:
        release.set()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


def answer_to(*pieces: bytes, is_open: bool = True) -> bytes:
    async def run() -> bytes:
        release = asyncio.Event()
        if is_open:
            release.set()
        async with served(release) as port:
            return await exchange(port, *pieces, release=release)

    return asyncio.run(run())


def error_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"])


def test_a_head_that_does_not_end_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    answer = answer_to(b"GET / HTTP/1.1\r\nhost:")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "head" in error_of(answer)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    assert answer_to() == b""


def test_an_answer_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.01)
    closing = REQUEST.replace(b"host", b"connection: close\r\nhost")
    assert answer_to(closing, b"", b"", is_open=False).endswith(b"\r\n\r\nok")


def test_a_head_that_is_too_large_is_told_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 1000)
    answer = answer_to(b"GET / HTTP/1.1\r\nx: ", b"a" * 900, b"a" * 200)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert "1000 bytes" in error_of(answer)


def test_the_limit_is_each_heads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 1000)
    large = REQUEST.replace(b"host", b"y: " + b"a" * 800 + b"\r\nhost")
    closing = large.replace(b"host", b"connection: close\r\nhost")
    assert answer_to(large[:-9], large[-9:], closing[:-9], closing[-9:]).count(b"HTTP/1.1 200 ") == 2


def test_a_whole_request_is_answered_before_garbage_behind_it_ends_the_connection() -> None:
    answer = answer_to(REQUEST + b"\xff\xfe\x00", is_open=False)
    assert answer.endswith(b"\r\n\r\nok")
    assert b"connection: close" in answer
