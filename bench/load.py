"""Load: so many streams at a time (closed loop), or so many requests a second whatever the server does (open loop)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.stream import Outcome, Stream
from bench.workload import Request
from kernels.table import counted

Send = Callable[[Request, Stream], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class RunLog:
    """All streams of one run. One of concurrency and rate is None.

    num_unsent: requests that were planned and never sent.   gave_up: why.   interrupted: a person stopped it.
    """

    concurrency: int | None
    rate: float | None
    streams: list[Stream] = field(default_factory=list)
    num_unsent: int = 0
    gave_up: str = ""
    interrupted: bool = False


@dataclass(slots=True)
class _Patience:
    """Ends a run against a server that only fails: so many streams in a row, with none that went well between."""

    limit: int
    failed_in_row: int = 0
    last_error: str = ""

    def saw(self, stream: Stream) -> None:
        if stream.outcome is Outcome.FAILED:
            self.failed_in_row += 1
            self.last_error = stream.error
        else:
            self.failed_in_row = 0

    @property
    def reason(self) -> str:
        if self.failed_in_row < self.limit:
            return ""
        return f"{counted(self.failed_in_row, 'request')} in a row failed; the last: {self.last_error}"


async def closed_loop(
    send: Send, requests: Sequence[Request], *, concurrency: int, clock: Callable[[], float], duration_s: float | None
) -> RunLog:
    """Keep `concurrency` streams under way until all requests are sent, or for `duration_s`; then let them finish.

    Interrupted (its task cancelled), it cancels the streams and returns what it has.
    """
    log = RunLog(concurrency, None)
    patience = _Patience(max(8, concurrency))
    waiting: Iterator[Request] = iter(requests)
    begin = clock()

    async def one_slot() -> None:
        while not patience.reason and (duration_s is None or clock() - begin < duration_s):
            request = next(waiting, None)
            if request is None:
                return
            stream = Stream(request.index, request.input_tokens, request.output_tokens, due=clock())
            log.streams.append(stream)
            await send(request, stream)
            patience.saw(stream)

    await _all([asyncio.ensure_future(one_slot()) for _ in range(concurrency)], log)
    # a run that ends by its duration has left nothing out
    log.num_unsent = len(requests) - len(log.streams) if duration_s is None or patience.reason else 0
    log.gave_up = patience.reason
    return log


async def open_loop(
    send: Send, requests: Sequence[Request], *, rate: float, clock: Callable[[], float], duration_s: float | None
) -> RunLog:
    """Send each request when it is due, however many are under way, until all are sent or for `duration_s`."""
    log = RunLog(None, rate)
    patience = _Patience(max(16, round(rate)))
    begin = clock()
    tasks: list[asyncio.Future[None]] = []

    async def one(request: Request) -> None:
        stream = Stream(request.index, request.input_tokens, request.output_tokens, due=begin + request.due)
        log.streams.append(stream)
        await send(request, stream)
        patience.saw(stream)

    async def schedule() -> None:
        for request in requests:
            if duration_s is not None and request.due >= duration_s:
                return
            await asyncio.sleep(begin + request.due - clock())
            if patience.reason:
                return
            tasks.append(asyncio.ensure_future(one(request)))

    scheduler = asyncio.ensure_future(schedule())
    await _all([scheduler], log)
    await _all(tasks, log)
    log.num_unsent = len(requests) - len(log.streams) if duration_s is None or patience.reason else 0
    log.gave_up = patience.reason
    return log


async def _all(tasks: Sequence[asyncio.Future[None]], log: RunLog) -> None:
    """Wait for all of `tasks`; cancelled, or after an earlier cancellation, cancel them and wait for their ends."""
    try:
        if not log.interrupted:
            await asyncio.gather(*tasks)
            return
    except asyncio.CancelledError:
        log.interrupted = True
    finally:
        for task in tasks:
            task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
