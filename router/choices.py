"""Choices: all answers of one request, as they come: several to one prompt, to several prompts, or just one.

Answers to the same prompt share one prefill as far as decode has room for them at once; those that it has no room for
wait their turn together, and share another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.attempt import Attempt, Tokens
from router.dispatch import Dispatcher, RequestRecord


class Choices:
    """Runs `records`; `num_choices` of them that follow one another answer the same prompt.

    Iterate `outputs` and close it (aclosing) whatever happens: that aborts what still runs.
    """

    def __init__(self, dispatcher: Dispatcher, records: Sequence[RequestRecord], *, num_choices: int) -> None:
        self._dispatcher = dispatcher
        self._records = records
        self._num_choices = num_choices
        self._left = set(range(len(records)))
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the choice's index; those below 0 open a prompt
        self._attempts: list[Attempt] = []
        # A client that reads slowly slows its own answers down, and they hold no more than this.
        self._queue: asyncio.Queue[tuple[int, Tokens | Exception]] = asyncio.Queue(2 * len(records))

    async def outputs(self) -> AsyncGenerator[tuple[int, Tokens], None]:
        """Yield (index of the choice, its next tokens). Raises ApiError if one of them can't be completed."""
        if len(self._records) == 1:
            async with aclosing(self._dispatcher.generate(self._records[0])) as outputs:
                async for tokens in outputs:
                    yield 0, tokens
            return
        self._dispatcher.check_admission(len(self._records) // self._num_choices)
        try:
            for first in range(0, len(self._records), self._num_choices):
                self._tasks[-1 - first] = asyncio.create_task(self._open(first))
            while self._left:
                index, outcome = await self._queue.get()
                if isinstance(outcome, Exception):
                    raise outcome
                if index in self._left:
                    if outcome.finish_reason is not None:
                        self._left.remove(index)
                    yield index, outcome
        finally:
            await self._close()

    def end(self, index: int) -> None:
        """Abort a choice that is complete for its reader: nothing more comes of it."""
        self._left.discard(index)
        if index in self._tasks:
            self._tasks[index].cancel()

    async def _open(self, first: int) -> None:
        """Take one prompt to a pair and run its answers: as many as decode has room for, then of the others, ..."""
        end = first + self._num_choices
        while first < end:
            try:
                attempts = await self._dispatcher.open(self._records[first:end])
            except Exception as error:
                await self._queue.put((first, error))
                return
            self._attempts += attempts
            for attempt in attempts:
                self._tasks[first] = asyncio.create_task(self._run(first, self._records[first], attempt))
                first += 1

    async def _run(self, index: int, record: RequestRecord, attempt: Attempt) -> None:
        try:
            async with aclosing(self._dispatcher.generate(record, attempt)) as outputs:
                async for tokens in outputs:
                    await self._queue.put((index, tokens))
        except Exception as error:
            await self._queue.put((index, error))

    async def _close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        # A task that was cancelled before it began has let go of nothing.
        for attempt in self._attempts:
            attempt.release()
        self._dispatcher.forget(self._records)
