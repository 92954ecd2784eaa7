"""Inbox: what a decode worker's stream has brought for one attempt, until its coroutine takes it."""

from __future__ import annotations

import asyncio

import msgspec

from router.client import WorkerError
from router.protocol import SequenceOutput


class Inbox:
    """Filled by the registry, emptied by the attempt. `failure` resolves when a worker it depends on is lost."""

    __slots__ = ("_outputs", "_waiter", "failure")

    def __init__(self) -> None:
        self._outputs: list[SequenceOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self.failure: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()

    def push(self, output: SequenceOutput) -> None:
        """Take in an output, which belongs to the inbox from now on."""
        # A client may read slowly for long: what waits for it is a list of numbers, not one object a token.
        if self._outputs and _follows(output, self._outputs[-1]):
            last = self._outputs[-1]
            last.token_ids.extend(output.token_ids)
            last.logprobs.extend(output.logprobs)
            if output.finish_reason is not None:
                self._outputs[-1] = msgspec.structs.replace(last, finish_reason=output.finish_reason)
        else:
            self._outputs.append(output)
        self._wake()

    def fail(self, error: WorkerError) -> None:
        """Make the next `take` raise, once what has come before is taken."""
        if not self.failure.done():
            self.failure.set_result(error)
            self._wake()

    async def take(self, *, timeout_s: float) -> list[SequenceOutput]:
        """Return all outputs that are there, waiting for the first. Raises the failure, or TimeoutError."""
        if not self._outputs:
            if self.failure.done():
                raise self.failure.result()
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._expire)  # a third of what asyncio.timeout costs, in each token
            try:
                await self._waiter
            finally:
                timer.cancel()
            if not self._outputs:
                raise self.failure.result()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _expire(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _follows(output: SequenceOutput, last: SequenceOutput) -> bool:
    return (
        output.error is None
        and last.error is None
        and last.finish_reason is None
        and output.index == last.index + len(last.token_ids)
    )
