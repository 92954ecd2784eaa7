"""Inbox: what a decode worker's stream has brought for one attempt, until its coroutine takes it."""

from __future__ import annotations

import asyncio

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
            self._waiter = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(timeout_s):
                await self._waiter
            if not self._outputs:
                raise self.failure.result()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
