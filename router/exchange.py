"""Exchange: one generation request over HTTP, from the accepted request to the last byte of its answer.

It watches the client while it works: when the client leaves, at any moment, the request is aborted. Errors before the
first byte are JSON with a status; later they are one event, and the stream ends without a finish_reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answer import AnswerWriter, FinishedChoice, Piece, Usage, error_event
from router.choices import Choices
from router.dispatch import Dispatcher, RequestRecord
from router.errors import ApiError
from router.metrics import Metrics, Outcome
from router.pipeline import TextPipeline

log = logging.getLogger("isthmus.router")

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(slots=True)
class Job:
    """Everything that an exchange needs of a request that has been read and found right.

    records, pipelines, usages: one a choice, by its index. `num_choices` choices that follow one another answer the
    same prompt, and their records share its list of tokens.
    """

    records: list[RequestRecord]
    pipelines: list[TextPipeline]
    usages: list[Usage]
    num_choices: int
    writer: AnswerWriter
    stream: bool
    shown_id: str

    @property
    def usage(self) -> Usage:
        """Return the request's counts so far."""
        return Usage.total(self.usages)

    @property
    def record(self) -> RequestRecord:
        return self.records[0]


class Exchange(Response):
    """The response of a generation route; runs the request when the server asks for its bytes."""

    def __init__(self, job: Job, dispatcher: Dispatcher, metrics: Metrics, *, send_timeout_s: float) -> None:
        super().__init__()
        self._job = job
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._send_timeout_s = send_timeout_s
        self._sending_since = 0.0  # when the send that is under way began; 0: none is
        self._deadline: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_started = False
        self._send_raw: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_raw = send
        work = asyncio.create_task(self._answer())
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        outcome: Outcome = "aborted"
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                outcome = "error"  # unless it tells otherwise: a fault of ours is raised here
                outcome = work.result()
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
            self._account(outcome)

    async def _answer(self) -> Outcome:
        """Run the request and send its answer; returns how it ended."""
        job = self._job
        try:
            async with self._patience():
                try:
                    await (self._stream() if job.stream else self._whole())
                except ApiError as error:
                    await self._fail(error)
                    return "rejected" if error.status < 500 else "error"
        except (TimeoutError, ConnectionError, OSError) as error:
            log.info("request %s: client does not take its answer: %r", job.shown_id, error)
            return "aborted"
        return "length" if all(pipeline.finish_reason == "length" for pipeline in job.pipelines) else "stop"

    @asynccontextmanager
    async def _patience(self) -> AsyncGenerator[None, None]:
        """Raise TimeoutError when a send takes longer than `send_timeout_s`: a client that reads nothing must not hold
        its blocks for ever. One timer looks after all sends: one for each would cost as much as the rest of a token.
        """
        self._timer = asyncio.get_running_loop().call_later(self._send_timeout_s, self._look)
        try:
            async with asyncio.timeout(None) as self._deadline:
                yield
        finally:
            self._timer.cancel()
            self._deadline = None  # it knows this task, and the task knows us

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        since, now = self._sending_since, time.monotonic()
        if since and now - since >= self._send_timeout_s and self._deadline is not None:
            self._deadline.reschedule(loop.time())
        else:
            self._timer = loop.call_later((since or now) + self._send_timeout_s - now, self._look)

    async def _stream(self) -> None:
        job = self._job
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                events = job.writer.chunk(piece, index)
                pipeline = job.pipelines[index]
                if pipeline.finish_reason is not None:
                    events += job.writer.end_choice(index, pipeline.finish_reason, stop_reason=pipeline.stop_reason)
                await self._send(events)
        await self._send(job.writer.end(), is_last=True)

    async def _whole(self) -> None:
        job = self._job
        choices = [FinishedChoice() for _ in job.records]
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        for choice, pipeline in zip(choices, job.pipelines, strict=True):
            assert pipeline.finish_reason is not None
            choice.finish_reason, choice.stop_reason = pipeline.finish_reason, pipeline.stop_reason
        await self._send_whole(200, job.writer.whole(choices), {"content-type": "application/json"})

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield (index of the choice, what to show of it) until each choice has ended."""
        job, metrics = self._job, self._metrics
        choices = Choices(self._dispatcher, job.records, num_choices=job.num_choices)
        times = [0.0] * len(job.records)
        num_left = len(job.records)
        async with aclosing(choices.outputs()) as outputs:
            async for index, tokens in outputs:
                pipeline = job.pipelines[index]
                piece = pipeline.feed(tokens.token_ids, tokens.finish_reason, tokens.logprobs)
                now = time.monotonic()
                if not times[index]:
                    metrics.ttft.observe(now - job.record.arrived)
                elif piece.token_ids:
                    metrics.itl.observe((now - times[index]) / len(piece.token_ids))
                times[index] = now
                if pipeline.finish_reason is not None:
                    choices.end(index)
                    num_left -= 1
                yield index, piece
                if not num_left:
                    break

    async def _fail(self, error: ApiError) -> None:
        log.info("request %s: %s %s: %s", self._job.shown_id, error.status, error.code, error.message)
        if self._has_started:
            await self._send(error_event(error.body()), is_last=True)
        else:
            self._metrics.rejections.labels(str(error.status)).inc()
            await self._send_whole(error.status, error.body(), {"content-type": "application/json"} | error.headers())

    async def _send(self, data: bytes, *, is_last: bool = False) -> None:
        assert self._send_raw is not None
        if not self._has_started:
            self._has_started = True
            await self._send_raw(self._start(200, SSE_HEADERS))
        if data or is_last:
            self._sending_since = time.monotonic()
            await self._send_raw({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._sending_since = 0.0

    async def _send_whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        assert self._send_raw is not None
        self._has_started = True
        self._sending_since = time.monotonic()
        await self._send_raw(self._start(status, headers | {"content-length": str(len(body))}))
        await self._send_raw({"type": "http.response.body", "body": body})
        self._sending_since = 0.0

    def _start(self, status: int, headers: dict[str, str]) -> dict[str, object]:
        headers = headers | {"x-request-id": self._job.shown_id}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": status, "headers": raw}

    def _account(self, outcome: Outcome) -> None:
        job, metrics = self._job, self._metrics
        metrics.finish(outcome)
        metrics.queue_time.observe(job.record.queue_s)
        # Of every accepted request, whatever became of it: the two totals must follow one rule.
        usage = job.usage
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        elapsed = time.monotonic() - job.record.arrived
        if outcome in ("stop", "length"):
            metrics.e2e.observe(elapsed)
        if outcome == "aborted":
            metrics.disconnects.inc()
        log.info(
            "request %s: %s after %.3f s, %d prompt and %d output tokens, %d resumes",
            job.shown_id,
            outcome,
            elapsed,
            usage.prompt_tokens,
            usage.completion_tokens,
            job.record.num_resumes,
        )


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
