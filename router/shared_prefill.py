"""SharedPrefill: the one call to a prefill worker for attempts that answer the same prompt: mostly a single one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.client import WorkerError
from router.protocol import PrefillResult

if TYPE_CHECKING:
    from router.attempt import Attempt

BUSY_PREFILL_WAIT_S = 0.1


class SharedPrefill:
    """Asks for several attempts at one pair, which differ by their seeds only.

    The first to want its token makes the call for all that have not let go. When all have, it is given up.
    """

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self._attempts = attempts
        self._call: asyncio.Task[dict[str, PrefillResult]] | None = None

    @classmethod
    def join(cls, attempts: Sequence[Attempt]) -> None:
        """Let attempts that have not asked yet share a call."""
        shared = cls(attempts)
        for attempt in attempts:
            attempt.prefill = shared
        for attempt in attempts[1:]:
            attempt.leave_prefill()  # its tokens are computed once

    async def result(self, attempt: Attempt) -> PrefillResult:
        """Return the part of the result that is this attempt's. Raises WorkerError."""
        if len(self._attempts) == 1:
            results = await self._ask()
        else:
            if self._call is None:
                self._call = asyncio.create_task(self._ask())
                self._call.add_done_callback(lambda call: call.cancelled() or call.exception())  # maybe nobody waits
            results = await asyncio.shield(self._call)
        if attempt.request_id not in results:
            raise WorkerError("internal", f"{attempt.pair.prefill.url} gave no token for {attempt.request_id}")
        return results[attempt.request_id]

    def leave(self) -> None:
        """Hear that an attempt has let go."""
        if all(attempt.is_released for attempt in self._attempts):
            if self._call is not None:
                self._call.cancel()
            self._attempts = ()  # they know us: nobody shall have to look for what is left of a request

    async def _ask(self) -> dict[str, PrefillResult]:
        """Ask the prefill worker, again as long as it has no room."""
        while True:
            # Who has let go before it was asked for may have its landing given to somebody else by now.
            first, *siblings = [attempt for attempt in self._attempts if not attempt.is_released]
            request = first.ask(siblings)
            try:
                # The deadline is the attempts'; this one only bounds a connection that nobody waits for.
                result = await first.pair.prefill.client.prefill(request, timeout_s=2 * request.timeout_s)
                return {one.request_id: one for one in (result, *result.branches)}
            except WorkerError as error:
                if error.code != "no_capacity":
                    raise
                for attempt in (first, *siblings):
                    attempt.was_refused()
            await first.wait_change(BUSY_PREFILL_WAIT_S)
