"""WorkerClient: the router's side of the worker protocol, one per worker, over HTTP connections that are kept.

Two ways to fail: WorkerError is a worker's answer, WorkerUnreachable means there was none. A refused connection is
told apart, since it says that no process listens there any more.
"""

from __future__ import annotations

import errno
import io
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from router import protocol
from router.protocol import ErrorBody, ErrorCode

CONNECT_TIMEOUT_S = 2.0
CONTROL_TIMEOUT_S = 5.0
LARGE_BODY_BYTES = 1 << 20

T = TypeVar("T", bound=protocol.Message)


class WorkerError(Exception):
    """A worker's refusal or failure, or what the router knows to be one (worker_lost, deadline)."""

    def __init__(self, code: ErrorCode, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.retry_after_s = retry_after_s


class WorkerUnreachable(WorkerError):
    """No answer came. is_refused: nobody listens at the address.   is_timeout: it took too long."""

    def __init__(self, message: str, *, is_refused: bool = False, is_timeout: bool = False) -> None:
        super().__init__("worker_lost", message)
        self.is_refused = is_refused
        self.is_timeout = is_timeout


class WorkerClient:
    """Calls one worker. Owns its connections; `close` ends them. on_prefill: hears of every prefill (a test seam)."""

    def __init__(self, url: str, *, router: str = "") -> None:
        """router: the name of this router's life, under which it reads streams."""
        self.url, self.router = url, router
        self.on_prefill: Callable[[protocol.PrefillRequest, protocol.PrefillResult], None] | None = None
        self._session: aiohttp.ClientSession | None = None  # can be made only where an event loop runs
        self._urls: dict[str, URL] = {}

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Every open answer may hold a connection of its own while it is prefilled.
            # They expire before the 5 s after which uvicorn closes an idle one: a request must not meet that.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                auto_decompress=False,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def info(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> protocol.WorkerInfo:
        """Return what the worker says of itself."""
        response = await self._send("GET", "/info", timeout_s=timeout_s)
        try:
            return msgspec.json.decode(response, type=protocol.WorkerInfo)
        except msgspec.DecodeError as error:
            raise WorkerError("internal", f"{self.url}/info: not an answer of an Isthmus worker: {error}") from None

    async def reserve(self, request: protocol.ReserveRequest, *, timeout_s: float) -> bytes:
        """Return the landing. Raises WorkerError no_capacity if decode has no room now."""
        return (await self._call("/reserve", request, protocol.ReserveReply, timeout_s=timeout_s)).landing

    async def prefill(self, request: protocol.PrefillRequest, *, timeout_s: float) -> protocol.PrefillResult:
        """Return output token 0, computed by the worker."""
        result = await self._call("/prefill", request, protocol.PrefillResult, timeout_s=timeout_s)
        if self.on_prefill is not None:
            self.on_prefill(request, result)
        return result

    async def abort(self, request: protocol.AbortRequest) -> protocol.AbortReply:
        return await self._call("/abort", request, protocol.AbortReply)

    async def drain(self) -> None:
        """Let the worker accept nothing new, finish what runs, and end."""
        await self._call("/drain", protocol.Ack(), protocol.Ack)

    async def link(self, request: protocol.LinkRequest, *, timeout_s: float) -> protocol.LinkReply:
        """Let a prefill worker connect to a decode worker; returns the lane in use."""
        return await self._call("/link", request, protocol.LinkReply, timeout_s=timeout_s)

    async def unlink(self, lost: protocol.WriterLost) -> None:
        await self._call("/unlink", lost, protocol.Ack)

    async def writer_lost(self, lost: protocol.WriterLost) -> None:
        await self._call("/writer_lost", lost, protocol.Ack)

    async def stream(
        self, *, start: int, silence_s: float, on_open: Callable[[], None]
    ) -> AsyncIterator[protocol.StreamFrame]:
        """Yield frames from number `start` on (0: from now on), until the connection ends.

        on_open: called once the worker has agreed; no frame made after that is missing.
        Raises WorkerUnreachable when nothing came for `silence_s` (a worker sends at least one frame a second).
        """
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        url = URL(self.url + "/stream").with_query({"from": start, "router": self.router})
        frames = protocol.FrameDecoder()
        try:
            async with self._http.get(url, timeout=timeout) as response:
                if response.status != 200:
                    raise _failure(self.url, "/stream", response.status, await response.read())
                on_open()
                async for data in response.content.iter_any():
                    for frame in frames.feed(data):
                        yield frame
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.url, "/stream", error) from error
        except (ValueError, msgspec.DecodeError) as error:
            raise WorkerUnreachable(f"{self.url}/stream: {error}") from error

    async def _call(
        self, path: str, message: protocol.Message, kind: type[T], *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> T:
        response = await self._send("POST", path, timeout_s=timeout_s, content=protocol.encode(message))
        try:
            return protocol.decode(response, kind)
        except msgspec.DecodeError as error:
            raise WorkerError("internal", f"{self.url}{path}: answer is no {kind.__name__}: {error}") from None

    async def _send(self, method: str, path: str, *, timeout_s: float, content: bytes | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
        headers = {"content-type": "application/msgpack"} if content is not None else {}
        url = self._urls.get(path) or self._urls.setdefault(path, URL(self.url + path))
        # A large body is handed over piece by piece.
        data = io.BytesIO(content) if content is not None and len(content) >= LARGE_BODY_BYTES else content
        try:
            async with self._http.request(method, url, data=data, timeout=timeout, headers=headers) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.url, path, error) from error
        if status != 200:
            raise _failure(self.url, path, status, body)
        return body


def _unreachable(url: str, path: str, error: Exception) -> WorkerUnreachable:
    return WorkerUnreachable(
        f"{url}{path}: no answer: {type(error).__name__} {error}".rstrip(),
        # Several addresses that all refuse are one error; other connect errors prove nothing.
        is_refused=isinstance(error, OSError) and error.errno == errno.ECONNREFUSED,
        is_timeout=isinstance(error, TimeoutError),
    )


def _failure(url: str, path: str, status: int, body: bytes) -> WorkerError:
    try:
        error = protocol.decode(body, ErrorBody)
    except msgspec.DecodeError:
        return WorkerError("internal", f"{url}{path}: status {status} without an error body")
    return WorkerError(error.code, error.message, retry_after_s=error.retry_after_s)
