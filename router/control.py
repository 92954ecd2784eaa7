"""The control socket: workers join, drain and leave while the router serves.

A Unix socket, because it decides where prompts are sent: who may open the file may do it, the API's clients may not.

    GET  /workers                          -> [{"url", "role", "id", "state", "generation", "num_requests"}, ...]
    POST /workers         {"role", "url"}  -> 201 and its entry
    POST /workers/drain   {"url"}          -> 200 and its entry: it gets nothing new, what it has goes on
    POST /workers/remove  {"url"}          -> 200 {}: forgotten; what still ran there goes on elsewhere

    curl --unix-socket PATH http://router/workers
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.protocol import WorkerRole
from router.registry import Registry
from router.workers import Worker

MAX_PATH_BYTES = 107  # of a Unix socket's address

T = TypeVar("T")


class AddWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """url: as the router reaches its leader."""

    role: WorkerRole
    url: str


class NameWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Control:
    """on_add: hears of each worker that was taken in."""

    def __init__(self, registry: Registry, *, on_add: Callable[[Worker], None] = lambda worker: None) -> None:
        self._registry, self._on_add = registry, on_add

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/workers", _answer(self._list), methods=["GET"]),
                Route("/workers", _answer(self._add), methods=["POST"]),
                Route("/workers/drain", _answer(self._drain), methods=["POST"]),
                Route("/workers/remove", _answer(self._remove), methods=["POST"]),
            ]
        )

    async def _list(self, _: bytes) -> tuple[int, Any]:
        return 200, [_entry(worker) for worker in self._registry.workers]

    async def _add(self, body: bytes) -> tuple[int, Any]:
        wanted = _decode(body, AddWorker)
        url = wanted.url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise _Refused(400, f"url: {wanted.url!r} is no URL; write http://HOST:PORT")
        if self._registry.find(url) is not None:
            raise _Refused(409, f"url: {url} is a worker already; remove it first")
        worker = self._registry.add(url, wanted.role)
        self._on_add(worker)
        return 201, _entry(worker)

    async def _drain(self, body: bytes) -> tuple[int, Any]:
        worker = self._named(body)
        self._registry.drain(worker)
        return 200, _entry(worker)

    async def _remove(self, body: bytes) -> tuple[int, Any]:
        await self._registry.remove(self._named(body))
        return 200, {}

    def _named(self, body: bytes) -> Worker:
        url = _decode(body, NameWorker).url.rstrip("/")
        worker = self._registry.find(url)
        if worker is None:
            known = ", ".join(worker.url for worker in self._registry.workers) or "none"
            raise _Refused(404, f"url: no worker at {url!r}; known: {known}")
        return worker


def listen(path: str) -> socket.socket:
    """Return a listening Unix socket that only this user may open. Raises OSError, also for a path that is too long.

    What a killed router left at the path is replaced.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(f"{path}: a socket's path holds {MAX_PATH_BYTES} bytes; choose a shorter one")
    if Path(path).is_socket():
        Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # from its first moment: what is bound can be opened
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(16)
    listener.setblocking(False)
    return listener


def _entry(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "role": worker.role,
        "id": worker.info.id if worker.info else "",
        "state": worker.shown_state,
        "generation": worker.generation,
        "num_requests": worker.num_requests,
    }


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise _Refused(400, f"body: {error}") from None


def _answer(handle: Callable[[bytes], Awaitable[tuple[int, Any]]]) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            status, content = await handle(await request.body())
        except _Refused as refused:
            status, content = refused.status, {"error": str(refused)}
        return Response(msgspec.json.encode(content), status, media_type="application/json")

    return respond
