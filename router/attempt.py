"""Attempt: one try of a request at one pair, from the reservation to the last token, and the letting go.

    new -> reserving -> reserved -> prefilling -> decoding -> over

Whoever makes an attempt calls `release` in the end, wherever it stands. Release tells each worker what it must know:
prefill first, because only its word makes decode's landing free, then decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from router import protocol
from router.client import WorkerError, WorkerUnreachable
from router.inbox import Inbox
from router.protocol import AbortReply, AbortRequest, FinishReason, SamplingParams, TokenLogprobs
from router.registry import Registry
from router.shared_prefill import SharedPrefill
from router.workers import Pair, Worker

log = logging.getLogger("isthmus.router")

ABORT_DELAYS_S = (0.0, 0.1, 0.3, 1.0, 2.0)

T = TypeVar("T")


class Tokens(NamedTuple):
    """What an attempt brought next. finish_reason: with the last.   logprobs: one a token, if asked for."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] = ()


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that each phase of an attempt may take."""

    reserve_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float


class PhaseTimeout(WorkerError):
    """A phase took longer than allowed."""

    def __init__(self, phase: str, timeout_s: float) -> None:
        super().__init__("deadline", f"{phase} took longer than {timeout_s:g} s")
        self.phase = phase


class Attempt:
    """One try. request_id is its own: workers remember the ids of aborted requests.

    prompt_token_ids: prompt and the tokens already emitted, the last `num_prior_outputs` of them.
    spawn: runs a coroutine that outlives the request, and keeps it until it is done.
    checksum: what lands is compared with what was sent.
    """

    def __init__(
        self,
        pair: Pair,
        registry: Registry,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        num_prior_outputs: int,
        timeouts: Timeouts,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_abort_lost: Callable[[], None],
        checksum: bool = False,
    ) -> None:
        self.pair = pair
        self.request_id = request_id
        self.queue_s = self.compute_s = 0.0
        self._registry = registry
        self._prompt = prompt_token_ids
        self._sampling = sampling
        self._num_prior = num_prior_outputs
        self._next_index = 0
        self._timeouts = timeouts
        self._spawn = spawn
        self._on_abort_lost = on_abort_lost
        self._checksum = checksum
        self._generations = pair.generations
        self._stage = "new"
        self._needs_decode = sampling.max_tokens - num_prior_outputs > 1
        self._landing: bytes | None = None
        self._handed_over = self._has_landed = False
        self.is_released = False
        self.prefill = SharedPrefill([self])
        self._inbox = Inbox()
        pair.decode.inboxes[request_id] = self._inbox
        pair.prefill.inboxes[request_id] = self._inbox
        pair.prefill.prefills[request_id] = len(prompt_token_ids)

    async def reserve(self) -> None:
        """Take a landing at decode, unless the first token is also the last. Raises WorkerError."""
        if not self._needs_decode:
            self._stage = "reserved"
            return
        self._stage = "reserving"
        request = protocol.ReserveRequest(
            request_id=self.request_id,
            prompt_token_ids=self._prompt,
            sampling=self._sampling,
            num_prior_outputs=self._num_prior,
            timeout_s=self._timeouts.prefill_s + self._timeouts.transfer_s,
            writer_generation=self._generations[0],
            writer_url=self.pair.prefill.url,
            router=self.pair.decode.client.router,
        )
        try:
            self._landing = await self._unless_lost(
                self.pair.decode.client.reserve(request, timeout_s=self._timeouts.reserve_s)
            )
        except WorkerUnreachable as error:
            if error.is_timeout:
                raise PhaseTimeout("reserve", self._timeouts.reserve_s) from error
            raise
        except WorkerError:
            if not self._inbox.failure.done():
                self._stage = "over"  # refused: nothing was taken
            raise
        self._stage = "reserved"

    async def first(self) -> Tokens:
        """Return output token 0 from prefill. Raises WorkerError."""
        try:
            async with asyncio.timeout(self._timeouts.prefill_s):
                result = await self._unless_lost(self.prefill.result(self))
        except TimeoutError:
            raise PhaseTimeout("prefill", self._timeouts.prefill_s) from None
        self._handed_over = result.handed_over and self._landing is not None
        self.queue_s, self.compute_s = result.queue_s, result.compute_s
        self.leave_prefill()
        if result.finish_reason in ("abort", "error"):
            raise WorkerError("aborted", f"{self.pair.prefill.url} gave up the request: {result.finish_reason}")
        self._next_index += 1
        is_last = result.finish_reason is not None or not self._needs_decode
        self._stage = "decoding" if self._needs_decode else "over"
        logprobs = () if result.logprobs is None else (result.logprobs,)
        return Tokens([result.token_id], result.finish_reason or ("length" if is_last else None), logprobs)

    async def more(self) -> Tokens:
        """Return the next tokens from decode. Raises WorkerError."""
        phase, timeout_s = (
            ("decode", self._timeouts.decode_s) if self._has_landed else ("transfer", self._timeouts.transfer_s)
        )
        try:
            outputs = await self._inbox.take(timeout_s=timeout_s)
        except TimeoutError:
            raise PhaseTimeout(phase, timeout_s) from None
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        finish_reason: FinishReason | None = None
        for output in outputs:
            if output.error is not None or output.finish_reason in ("abort", "error"):
                if token_ids:
                    self._inbox.push(output)  # the tokens before it are good: show them first
                    return Tokens(token_ids, None, logprobs)
                self._stage = "over" if self._has_landed else self._stage
                if output.error is not None:
                    raise WorkerError(output.error.code, output.error.message)
                raise WorkerError("aborted", f"{self.pair.decode.url} ended the request: {output.finish_reason}")
            if output.index != self._next_index:
                raise WorkerError(
                    "internal",
                    f"{self.pair.decode.url} sent output {output.index} of {self.request_id}, "
                    f"expected {self._next_index}",
                )
            self._next_index += len(output.token_ids)
            token_ids += output.token_ids
            logprobs += output.logprobs
            finish_reason = output.finish_reason
        if not self._has_landed:
            # From here on the prefill worker's fate is no longer ours.
            self._has_landed = True
            self.pair.prefill.inboxes.pop(self.request_id, None)
        if finish_reason is not None:
            self._stage = "over"
        return Tokens(token_ids, finish_reason, logprobs)

    def fail(self, error: WorkerError) -> None:
        """Make the phase that is under way raise `error`."""
        self._inbox.fail(error)

    def release(self) -> None:
        """Let go of everything, wherever the attempt stands. Returns at once; the workers are told behind it."""
        if self.is_released:
            return
        self.is_released = True
        self.pair.decode.inboxes.pop(self.request_id, None)
        self.pair.prefill.inboxes.pop(self.request_id, None)
        self.leave_prefill()
        self.prefill.leave()
        if self._stage not in ("new", "over"):
            self._spawn(self._abort())

    # ------------------------------------------------------------ for SharedPrefill

    def ask(self, siblings: Sequence[Attempt]) -> protocol.PrefillRequest:
        """Return what is sent to the prefill worker for this attempt and its siblings."""
        for attempt in (self, *siblings):
            attempt._stage = "prefilling"
        return protocol.PrefillRequest(
            request_id=self.request_id,
            prompt_token_ids=self._prompt,
            sampling=self._sampling,
            landing=self._landing,
            checksum=self._checksum,
            num_prior_outputs=self._num_prior,
            timeout_s=self._timeouts.prefill_s,
            branches=[
                protocol.PrefillBranch(request_id=a.request_id, seed=a._sampling.seed, landing=a._landing)
                for a in siblings
            ],
        )

    def was_refused(self) -> None:
        """Say that the prefill worker had no room: nothing has begun there."""
        if not self.is_released:
            self._stage = "reserved"

    async def wait_change(self, timeout_s: float) -> None:
        """Return when something has changed in the cluster, or after `timeout_s`."""
        await self._registry.wait_change(timeout_s)

    def leave_prefill(self) -> None:
        """Say that the prompt does not count as this attempt's load on the prefill worker any more."""
        if self.pair.prefill.prefills.pop(self.request_id, None) is not None:
            self._registry.notify()

    # ------------------------------------------------------------ parts

    async def _unless_lost(self, asked: Coroutine[Any, Any, T]) -> T:
        """Return what a worker answers; raise as soon as one that the attempt depends on is lost."""
        failure = self._inbox.failure
        # In this task, not in one of its own: each costs two rounds of a busy event loop.
        scope = asyncio.timeout(None)

        def end(_: asyncio.Future[WorkerError]) -> None:
            with contextlib.suppress(RuntimeError):  # the answer was there first
                scope.reschedule(0)

        try:
            async with scope:
                failure.add_done_callback(end)
                try:
                    return await asked
                finally:
                    failure.remove_done_callback(end)
        except TimeoutError:
            if scope.expired():
                raise failure.result() from None
            raise

    async def _abort(self) -> None:
        """Tell prefill, then decode, that the request is over.

        Without prefill's word decode keeps the landing until it hears that prefill is dead, and a little longer: what
        a dead process had given to its kernel may still arrive.
        """
        drained = not self._handed_over
        if self._stage == "prefilling" or (self._handed_over and not self._has_landed):
            request = AbortRequest(request_id=self.request_id, landing=self._landing)
            reply = await self._abort_at(self.pair.prefill, self._generations[0], request)
            drained = reply is not None and reply.drained
        if self._needs_decode:
            request = AbortRequest(request_id=self.request_id, drained=drained)
            await self._abort_at(self.pair.decode, self._generations[1], request)

    async def _abort_at(self, worker: Worker, generation: int, request: AbortRequest) -> AbortReply | None:
        """Return the worker's answer; None if it is out of reach (it hears of it when it is back) or another by now."""
        failure = ""
        for delay in ABORT_DELAYS_S:
            await asyncio.sleep(delay)
            if worker.generation != generation:
                return None
            if worker.is_lost:
                worker.owed[self.request_id] = request
                return None
            try:
                return await worker.client.abort(request)
            except WorkerError as error:
                failure = error.message
        log.warning("request %s: abort at %s was not confirmed: %s", self.request_id, worker.url, failure)
        worker.owed[self.request_id] = request
        self._on_abort_lost()
        return None
