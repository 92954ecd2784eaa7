"""Dispatcher: the life of one request: wait in the queue, be taken by a pair, yield tokens, try again, let go.

Requests wait here and nowhere else, in order. A request has one owner at a time, and this coroutine decides each
change: router (queued) -> decode holds a landing -> prefill computes -> decode runs. A request that a worker fails is
tried again, with what it has already said appended to its prompt, so a client never sees a token twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from router import policy
from router.attempt import Attempt, PhaseTimeout, Timeouts, Tokens
from router.client import WorkerError
from router.config import RouterConfig
from router.errors import ApiError, InvalidRequest
from router.metrics import Metrics
from router.protocol import SamplingParams
from router.registry import Registry
from router.seams import RouterSeams
from router.shared_prefill import SharedPrefill
from router.turns import Turn, Turns
from router.workers import Pair

log = logging.getLogger("isthmus.router")

UNREADY_GRACE_S = 1.0
CAPACITY_POLL_S = 0.5
MAX_EVICTIONS = 8
CLOSE_TIMEOUT_S = 5.0

# Failures that another try may mend. "no_capacity" while running means that decode had to evict the request.
RETRYABLE = frozenset({"worker_lost", "transfer_failed", "no_capacity", "not_ready", "draining", "stale_generation"})
LINK_FAULTS = frozenset({"stale_generation", "fingerprint_mismatch"})


@dataclass(slots=True)
class RequestRecord:
    """One request from acceptance to its end. Times are of time.monotonic.

    is_canary: it is the router's own; what lands of it is compared with what was sent.
    num_attempts: names them, so it never falls.   is_admitted: it has had its turn in the queue.
    num_resumes: how often it went on with another attempt after tokens had been emitted.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrived: float = field(default_factory=time.monotonic)
    emitted: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    num_attempts: int = 0
    is_admitted: bool = False
    num_resumes: int = 0
    queue_s: float = 0.0
    is_canary: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the next attempt prefills."""
        return len(self.prompt_token_ids) + len(self.emitted)

    @property
    def owner(self) -> str:
        """Which pair has it, or the router."""
        return "router" if self.attempt is None else self.attempt.request_id


class Dispatcher:
    """Owns the queue and every request record."""

    def __init__(self, config: RouterConfig, registry: Registry, metrics: Metrics) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.num_queued = 0
        self.is_draining = False
        self._is_closed = False
        self.seams = RouterSeams()
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._timeouts = Timeouts(
            reserve_s=config.reserve_timeout_s,
            prefill_s=config.prefill_timeout_s,
            transfer_s=config.transfer_timeout_s,
            decode_s=config.decode_timeout_s,
        )
        self._turns = Turns()
        self._background: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._name = secrets.token_hex(4)  # several routers may send canaries to one worker

    def check_admission(self, num_prompts: int = 1) -> None:
        """Raise ApiError if a request that came now could not be taken: draining, no pair, queue full."""
        if self.is_draining:
            raise ApiError(503, "router is draining and accepts nothing new", code="draining", retry_after_s=5)
        if not self._registry.is_ready and time.monotonic() - self._registry.unready_since >= UNREADY_GRACE_S:
            raise self._not_ready()
        if self.num_queued + num_prompts > self._config.max_queue:
            raise ApiError(
                429,
                f"{self.num_queued} requests are waiting, at most {self._config.max_queue} may (max_queue); try later"
                + (f", or with fewer than {num_prompts} prompts" if num_prompts > 1 else ""),
                code="queue_full",
                retry_after_s=1,
            )

    async def open(self, records: Sequence[RequestRecord]) -> list[Attempt]:
        """Wait in the queue with records that answer one prompt; return attempts of the first of them, at least one.

        They share one prefill, and belong to the caller, who gives each to `generate` or releases it, and in the end
        calls `forget`. Raises ApiError.
        """
        for record in records:
            self.records[record.request_id] = record
        return await self._admit(records, set())

    def forget(self, records: Sequence[RequestRecord]) -> None:
        """Strike out what `open` has entered and nothing runs of any more."""
        for record in records:
            self.records.pop(record.request_id, None)

    async def generate(self, record: RequestRecord, opened: Attempt | None = None) -> AsyncGenerator[Tokens, None]:
        """Yield the answer's tokens as they come, the last with its finish_reason.

        opened: what `open` has returned for it.
        Raises ApiError when the request can't be completed. Closing the generator, at any point, aborts the request.
        """
        if record.request_id not in self.records:
            self.check_admission()
        self.records[record.request_id] = record
        retries = evictions = 0
        avoid: set[str] = set()
        try:
            while True:
                attempt, opened = opened or (await self._admit([record], avoid))[0], None
                record.attempt = attempt
                try:
                    async with aclosing(self._run(attempt, record)) as outputs:
                        async for tokens in outputs:
                            record.emitted += tokens.token_ids
                            yield tokens
                    return
                except WorkerError as error:
                    self._note_failure(attempt.pair, error)
                    is_eviction = error.code == "no_capacity" and evictions < MAX_EVICTIONS
                    if error.code not in RETRYABLE or (retries >= self._config.max_retries and not is_eviction):
                        raise _public(error) from error
                    evictions, retries = (evictions + 1, retries) if is_eviction else (evictions, retries + 1)
                    avoid |= {attempt.pair.prefill.url, attempt.pair.decode.url} if not is_eviction else set()
                    self._metrics.retries.labels(error.code).inc()
                    record.num_resumes += bool(record.emitted)
                    log.warning(
                        "request %s: tried again after %d tokens: %s",
                        record.request_id,
                        len(record.emitted),
                        error.message,
                    )
                finally:
                    attempt.release()
                    record.attempt = None
        finally:
            del self.records[record.request_id]

    async def warm_up(self, pair: Pair) -> None:
        """Send a canary through `pair`, end to end. Raises WorkerError if it does not come back right.

        It fills a whole block and begins another, so that every group of the cache carries rows, and its tokens are
        random: a write that went nowhere can't be mistaken for the rows of an earlier one.
        """
        limits = self._registry.limits()
        assert limits is not None
        prompt = [
            random.randrange(limits.vocab_size) for _ in range(min(limits.block_tokens, limits.max_model_len - 3) + 1)
        ]
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        record = RequestRecord(f"warm-{self._name}-{next(self._numbers)}", prompt, sampling, is_canary=True)
        attempt = self._attempt(pair, record)
        try:
            await attempt.reserve()
            async for tokens in self._run(attempt, record):
                record.emitted += tokens.token_ids
        finally:
            attempt.release()
        if len(record.emitted) != sampling.max_tokens:
            raise WorkerError("internal", f"warm-up gave {len(record.emitted)} tokens instead of {sampling.max_tokens}")

    async def drain(self, *, timeout_s: float) -> None:
        """Accept nothing new; return when nothing runs any more, or after `timeout_s`."""
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self.records and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Fail what still runs, and wait, bounded, until the workers have been told of it."""
        self.is_draining = self._is_closed = True
        for record in self.records.values():
            if record.attempt is not None:
                record.attempt.fail(WorkerError("aborted", "router is shutting down"))
        self._registry.notify()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self.records and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT_S)
        for task in [*self._background]:
            task.cancel()

    # ------------------------------------------------------------ parts

    async def _admit(self, records: Sequence[RequestRecord], avoid: set[str]) -> list[Attempt]:
        """Return attempts of the first of `records` (at least one) whose landings are reserved, having waited for the
        turn and for room."""
        started = time.monotonic()
        self.num_queued += 1
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                if records[0].is_admitted:
                    return await self._reserve(records, avoid)
                with self._turns.line(records[0].num_tokens) as turn:
                    attempts = await self._reserve(records, avoid, turn)
                for record in records[: len(attempts)]:
                    record.is_admitted = True
                return attempts
        except TimeoutError:
            raise ApiError(
                504,
                f"no pair had room within {self._config.queue_timeout_s:g} s",
                code="timeout_queue",
                retry_after_s=5,
            ) from None
        finally:
            self.num_queued -= 1
            for record in records:
                record.queue_s += time.monotonic() - started

    async def _reserve(
        self, records: Sequence[RequestRecord], avoid: set[str], turn: Turn | None = None
    ) -> list[Attempt]:
        """turn: to be waited for before each try; None: it has had its turn."""
        record, failures = records[0], 0
        while True:
            if turn is not None:
                await turn.take()
            await self.seams.queue_is_open.wait()
            if self._is_closed:
                raise ApiError(503, "router is shutting down", code="draining", retry_after_s=5)
            full: set[str] = set()
            while True:
                snapshots = self._registry.snapshots()
                choice = policy.choose(snapshots, record.num_tokens, full=full, avoid=avoid)
                if choice is None:
                    break
                pair = self._registry.pair(choice.prefill.url, choice.decode.url)
                attempt = self._attempt(pair, record)
                is_held = False
                try:
                    await attempt.reserve()
                    attempts = [attempt, *await self._reserve_more(pair, records[1:], attempt)]
                    is_held = True
                    return attempts
                except WorkerError as error:
                    if error.code not in ("no_capacity", "not_ready", "draining"):
                        failures += 1
                        self._note_failure(pair, error)
                        if error.code not in RETRYABLE or failures > self._config.max_retries:
                            raise _public(error) from error
                    full.add(pair.decode.url)
                finally:
                    if not is_held:
                        attempt.release()
            # One that was running waits for the restarted worker; a new one is told at once.
            grace = self._config.resume_timeout_s if record.num_attempts else UNREADY_GRACE_S
            if not self._registry.is_ready and time.monotonic() - self._registry.unready_since >= grace:
                raise self._not_ready()
            if turn is not None and policy.is_held_back(snapshots, record.num_tokens):
                turn.step_aside()
            await self._registry.wait_change(CAPACITY_POLL_S)

    async def _reserve_more(self, pair: Pair, records: Sequence[RequestRecord], first: Attempt) -> list[Attempt]:
        """Return attempts of as many of `records`, in order, as decode has room for now; `first` prefills for them."""
        attempts: list[Attempt] = []
        is_done = False
        try:
            for record in records:
                attempts.append(self._attempt(pair, record))
                try:
                    await attempts[-1].reserve()
                except WorkerError as error:
                    attempts.pop().release()
                    log.debug("request %s: not reserved beside its siblings: %s", record.request_id, error.message)
                    break
            is_done = True
        finally:
            if not is_done:
                for attempt in attempts:
                    attempt.release()
        if attempts:
            SharedPrefill.join([first, *attempts])
        return attempts

    def _attempt(self, pair: Pair, record: RequestRecord) -> Attempt:
        record.num_attempts += 1
        return Attempt(
            pair,
            self._registry,
            request_id=f"{record.request_id}-{record.num_attempts}",
            prompt_token_ids=record.prompt_token_ids + record.emitted,
            sampling=record.sampling,
            num_prior_outputs=len(record.emitted),
            timeouts=self._timeouts,
            spawn=self._spawn,
            on_abort_lost=self._metrics.aborts_lost.inc,
            checksum=record.is_canary,
        )

    async def _run(self, attempt: Attempt, record: RequestRecord) -> AsyncGenerator[Tokens, None]:
        tokens = await attempt.first()
        self._metrics.prefill_queue.observe(attempt.queue_s)
        self._metrics.prefill_compute.observe(attempt.compute_s)
        yield tokens
        while tokens.finish_reason is None:
            tokens = await attempt.more()
            yield tokens

    def _note_failure(self, pair: Pair, error: WorkerError) -> None:
        self._metrics.worker_failures.labels(error.code).inc()
        if error.code in LINK_FAULTS:
            self._registry.suspect(pair, error.message)

    def _not_ready(self) -> ApiError:
        state = self._registry.state
        return ApiError(503, f"no prefill/decode pair is ready: {state}", code=state, retry_after_s=2)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _public(error: WorkerError) -> ApiError:
    """Return what the client is told of a worker's failure."""
    if isinstance(error, PhaseTimeout):
        return ApiError(504, error.message, code=f"timeout_{error.phase}")
    if error.code == "invalid_request":
        return InvalidRequest(error.message)
    if error.code in ("no_capacity", "not_ready", "draining"):
        return ApiError(503, error.message, code=error.code, retry_after_s=max(1.0, error.retry_after_s))
    if error.code == "deadline":
        return ApiError(504, error.message, code="timeout_worker")
    return ApiError(502, error.message, code=error.code)
