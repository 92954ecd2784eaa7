"""One streamed request of an OpenAI-compatible API over aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from bench.dialect import Dialect
from bench.sse import EventParser
from bench.stream import Outcome, Stream
from bench.workload import Request

_DONE = b"[DONE]"
_ERROR_CHARS = 300


class _Details(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Client:
    """Sends requests of one model to one server. All its requests share `session`.

    api: completions or chat.   clock: seconds; that of the event loop, so that timers and moments agree.
    fields: further fields of every body.   on_tokens: hears how many tokens each chunk is thought to bring.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        model: str,
        api: str,
        dialect: Dialect,
        clock: Callable[[], float],
        stall_timeout_s: float,
        fields: Mapping[str, Any],
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._session = session
        self._route = f"{base_url(url)}/{'chat/completions' if api == 'chat' else 'completions'}"
        self._api = api
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=stall_timeout_s)
        self._fields = {"model": model, "stream": True} | dialect.fields() | dict(fields)
        self._on_tokens = on_tokens

    async def send(self, request: Request, stream: Stream) -> None:
        """Send one request and keep what comes back in `stream`, also if that is an error.

        Cancelled, it leaves what it saw, and `stream` says so.
        """
        reader = _Reader(stream, self._on_tokens)
        body = msgspec.json.encode(self._body(request))
        stream.sent = self._clock()
        try:
            async with self._session.post(self._route, data=body, headers=_HEADERS, timeout=self._timeout) as response:
                await self._read(response, reader)
        except asyncio.CancelledError:
            stream.outcome, stream.error = Outcome.CANCELLED, "cancelled by the client"
            raise
        except TimeoutError:
            reader.fail(f"nothing came for {self._stall_timeout_s:g} s{reader.progress}")
        except (aiohttp.ClientError, OSError) as error:
            reader.fail(f"{in_words(error)}{reader.progress}")
        finally:
            stream.ended = self._clock()
            reader.close()

    def _body(self, request: Request) -> dict[str, Any]:
        prompt = msgspec.Raw(request.prompt)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._api == "chat" else {"prompt": prompt}
        return self._fields | {"max_tokens": request.output_tokens} | asked

    async def _read(self, response: aiohttp.ClientResponse, reader: _Reader) -> None:
        if response.status != 200:
            text = (await response.text(errors="replace"))[:_ERROR_CHARS]
            return reader.fail(f"status {response.status}: {' '.join(text.split())}")
        if response.content_type != "text/event-stream":
            return reader.fail(f"the answer is {response.content_type}, no stream of events")
        parser = EventParser()
        async for data in response.content.iter_any():
            now = self._clock()
            for event in parser.feed(data):
                reader.event(event, now)
        for event in parser.close():
            reader.event(event, self._clock())
        reader.end()


_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class _Reader:
    """Fills a Stream from events."""

    def __init__(self, stream: Stream, on_tokens: Callable[[int], None]) -> None:
        self._stream = stream
        self._on_tokens = on_tokens
        self._has_ids = False
        self._running_usage: list[int | None] = []
        self._reasoning: list[bool] = []

    @property
    def progress(self) -> str:
        return f", after {sum(self._stream.counts)} tokens" if self._stream.counts else ", before the first token"

    def fail(self, error: str) -> None:
        self._stream.outcome, self._stream.error = Outcome.FAILED, error

    def event(self, data: bytes, now: float) -> None:
        stream = self._stream
        stream.num_events += 1
        if data == _DONE:
            stream.has_done = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            if not stream.error:
                self.fail(f"an event is no chunk of this API ({error}): {data[:80].decode(errors='replace')}")
            return
        if chunk.error is not None or chunk.object == "error":
            error_body = chunk.error if chunk.error is not None else chunk.message
            text = error_body.get("message", error_body) if isinstance(error_body, dict) else error_body
            self.fail(f"error event{self.progress}: {str(text)[:_ERROR_CHARS]}")
            return
        usage = chunk.usage
        if usage is not None:
            stream.prompt_usage = usage.prompt_tokens
            stream.completion_usage = usage.completion_tokens
            if usage.completion_tokens_details is not None:
                stream.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens or 0
        for choice in chunk.choices:
            if choice.finish_reason:
                stream.finish_reason = choice.finish_reason
            self._choice(choice, usage, now)

    def _choice(self, choice: _Choice, usage: _Usage | None, now: float) -> None:
        delta = choice.delta
        is_reasoning = delta is not None and bool(delta.reasoning_content or delta.reasoning)
        if choice.token_ids is not None:
            self._has_ids = True
            count = len(choice.token_ids)
        else:
            has_text = choice.text or (delta is not None and (delta.content or delta.tool_calls)) or is_reasoning
            count = 1 if has_text else 0
        if count:
            self._stream.times.append(now)
            self._stream.counts.append(count)
            self._running_usage.append(usage.completion_tokens if usage is not None else None)
            self._reasoning.append(is_reasoning)
            self._on_tokens(count)

    def end(self) -> None:
        """Judge a stream that the server has closed in good order."""
        stream = self._stream
        if stream.error:
            return
        if not stream.times:
            self.fail("the stream ended without a token")
        elif not stream.finish_reason and not stream.has_done:
            self.fail(f"the stream ended without finish_reason or [DONE]{self.progress}")
        else:
            stream.outcome = Outcome.OK

    def close(self) -> None:
        self._stream.settle(has_ids=self._has_ids, running_usage=self._running_usage, reasoning=self._reasoning)


def base_url(url: str) -> str:
    """Return the URL up to and with /v1, however much of it was given."""
    url = url if "://" in url else f"http://{url}"
    for tail in ("/chat/completions", "/completions"):
        url = url.removesuffix(tail)
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def in_words(error: Exception) -> str:
    """Return what happened to a connection, as a report says it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't connect ({error.os_error.strerror or error.os_error})"
    if isinstance(error, (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError)):
        return f"the server closed the connection ({type(error).__name__})"
    return f"{type(error).__name__}: {error}"
