"""The known workers and pairs: their state, what runs there, and how they come and go.

A worker is watched by its event stream. A pair (prefill, decode) goes

    waiting -> linking -> warming -> ready          or failed(reason): the two don't fit together

linking lets prefill connect to decode's endpoints; warming sends one real request through both. A worker that
restarts has another generation, and its pairs start over. A broken stream is no dead worker: it is opened again from
the frame that is missing. A worker that stays out of reach is lost, and its requests fail; only one whose port
refuses connections, or that came back as another generation, is declared dead to the other side, because a mute
process may still write. A prefill worker that was declared dead and lives is asked to end: its writes are void.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from router import protocol
from router.bring_up import bring_up
from router.client import WorkerError, WorkerUnreachable
from router.policy import PairSnapshot
from router.protocol import PROTOCOL_VERSION, StreamFrame, WorkerInfo, WorkerRole
from router.workers import Pair, Worker

log = logging.getLogger("isthmus.router")

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0
TELL_DELAYS_S = (0.0, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0)
LAST_WORD_S, TICK_S = 1.0, 0.02


class Registry:
    """Owns the workers, the pairs and the tasks that watch them.

    warm_up: sends one request through a pair, or raises WorkerError; given at `start`.
    """

    def __init__(
        self, *, prefill: tuple[str, ...], decode: tuple[str, ...], silence_s: float = 3.0, lost_s: float = 2.0
    ) -> None:
        self._silence_s = silence_s
        self._lost_s = lost_s
        self._router = uuid.uuid4().hex  # a router that is started again is another one
        self.prefills: list[Worker] = []
        self.decodes: list[Worker] = []
        self.pairs: list[Pair] = []
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.unready_since = time.monotonic()
        self._was_ready = self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._change: asyncio.Future[None] | None = None
        self._warm_up: Callable[[Pair], Awaitable[None]] | None = None
        for role, urls in (("prefill", prefill), ("decode", decode)):
            for url in urls:
                self.add(url, role)  # type: ignore[arg-type]

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    @property
    def is_ready(self) -> bool:
        return any(pair.state == "ready" for pair in self.pairs)

    @property
    def state(self) -> str:
        """The most advanced state of any pair."""
        states = {pair.state for pair in self.pairs}
        return next((s for s in ("ready", "warming", "linking", "waiting", "draining") if s in states), "failed")

    def start(self, warm_up: Callable[[Pair], Awaitable[None]]) -> None:
        self._warm_up = warm_up
        for worker in self.workers:
            self._watches[worker.url] = self._spawn(self._watch(worker))

    # ------------------------------------------------------------ joining and leaving

    def find(self, url: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.url == url), None)

    def add(self, url: str, role: WorkerRole) -> Worker:
        """Take in a worker; it gets requests once a pair with it is linked and warm."""
        assert self.find(url) is None
        worker = Worker(url, role, router=self._router)
        if role == "prefill":
            self.prefills.append(worker)
            self.pairs += [Pair(worker, decode) for decode in self.decodes]
        else:
            self.decodes.append(worker)
            self.pairs += [Pair(prefill, worker) for prefill in self.prefills]
        if self._warm_up is not None:
            self._watches[url] = self._spawn(self._watch(worker))
        return worker

    def drain(self, worker: Worker) -> None:
        """Give a worker nothing new; what it has goes on."""
        worker.is_draining = True
        log.info("%s worker %s is drained: %d requests go on there", worker.role, worker.url, worker.num_requests)
        self._reconcile()

    async def remove(self, worker: Worker) -> None:
        """Forget a worker. Requests that still depend on it go on elsewhere, and it is told so if it can be."""
        can_hear = worker.is_connected and not worker.is_lost
        watch = self._watches.pop(worker.url, None)
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        worker.is_draining = worker.is_lost = True
        self._fail_requests(worker, f"{worker.url} was removed")
        self.prefills, self.decodes = ([w for w in some if w is not worker] for some in (self.prefills, self.decodes))
        self.pairs = [pair for pair in self.pairs if worker not in (pair.prefill, pair.decode)]
        log.info("%s worker %s is removed", worker.role, worker.url)
        self._reconcile()
        if can_hear:
            await self._say_what_ended(worker)
        await worker.client.close()

    async def _say_what_ended(self, worker: Worker) -> None:
        """Abort at a worker that was removed what goes on elsewhere: it would compute that to its end for nobody."""
        until = time.monotonic() + LAST_WORD_S
        while worker.inboxes and time.monotonic() < until:
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(TICK_S)  # those that have let go say what they owe
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._pay(worker)

    async def close(self) -> None:
        """End all watching and close every connection."""
        self._is_closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self.workers:
            await worker.client.close()

    def ready_pairs(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.state == "ready"]

    def snapshots(self) -> list[PairSnapshot]:
        """Return what policy may look at: the ready pairs."""
        pairs = self.ready_pairs()
        prefills = {id(p.prefill): p.prefill.prefill_snapshot() for p in pairs}
        decodes = {id(p.decode): p.decode.decode_snapshot() for p in pairs}
        return [PairSnapshot(prefills[id(p.prefill)], decodes[id(p.decode)]) for p in pairs]

    def pair(self, prefill_url: str, decode_url: str) -> Pair:
        return next(p for p in self.pairs if p.prefill.url == prefill_url and p.decode.url == decode_url)

    def limits(self) -> protocol.Limits | None:
        """Return the smallest limits among workers that have told theirs."""
        known = [w.info.limits for w in self.workers if w.info is not None and w.info.limits is not None]
        return min(known, key=lambda limits: limits.max_model_len, default=None)

    async def wait_change(self, timeout_s: float) -> None:
        """Return when a worker has more room than before, a pair changed, or the time is over."""
        if self._change is None or self._change.done():
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._change}, timeout=timeout_s)

    def notify(self) -> None:
        """Wake everybody in `wait_change`."""
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def suspect(self, pair: Pair, reason: str) -> None:
        """Link and warm a pair again, because a request failed in a way that the link explains."""
        log.warning("pair %s -> %s is linked again: %s", pair.prefill.url, pair.decode.url, reason)
        pair.linked = pair.warmed = (0, 0)
        self._reconcile()

    # ------------------------------------------------------------ watching one worker

    async def _watch(self, worker: Worker) -> None:
        delay = RECONNECT_MIN_S
        while True:
            failure = WorkerUnreachable(f"{worker.url}/stream ended")
            try:
                self._register(worker, await worker.client.info(timeout_s=min(self._lost_s, 2.0)))
                async for frame in worker.client.stream(
                    start=worker.next_frame,
                    silence_s=self._silence_s,
                    on_open=functools.partial(self._connected, worker),
                ):
                    if frame.generation != worker.generation:
                        break
                    delay = RECONNECT_MIN_S
                    self._receive(worker, frame)
            except WorkerUnreachable as error:
                failure = error
            except WorkerError as error:
                # It answers, but has not kept the frames that we lack (or is no worker at all): start from now.
                failure = WorkerUnreachable(error.message)
                worker.next_frame = 0
                self._fail_requests(worker, f"{worker.url}: lost part of its event stream: {error.message}")
            self._disconnected(worker, failure)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RECONNECT_MAX_S)

    def _register(self, worker: Worker, info: WorkerInfo) -> None:
        if info.generation != worker.generation:
            if worker.generation:
                self._end_life(worker, f"{worker.url} was restarted", is_dead=True)
            log.info(
                "%s worker %s at %s: generation %s, %s", worker.role, info.id, info.url, info.generation, info.state
            )
            worker.generation = info.generation
            worker.owed.clear()
            worker.next_frame = 0
            worker.stats = info.stats
        elif worker.role == "decode":
            worker.dead_generation = 0  # a refused connection was no death: it is told again when it dies
        worker.info = info
        worker.state, worker.reason = info.state, info.reason
        refusal = _refusal(worker, info)
        if refusal and not worker.is_refused:
            log.error("%s", refusal)
            if info.generation == worker.dead_generation:
                self._spawn(self._retire(worker))
        worker.is_refused = bool(refusal)
        if refusal:
            worker.state, worker.reason = "failed", refusal
        self._reconcile()

    def _connected(self, worker: Worker) -> None:
        worker.is_connected = True
        worker.is_lost = False
        worker.unreachable_since = None
        # What changed between its /info and the opening of the stream is in no frame.
        self._spawn(self._refresh(worker))
        if worker.owed:
            self._spawn(self._pay(worker))
        self._reconcile()

    def _receive(self, worker: Worker, frame: StreamFrame) -> None:
        if worker.next_frame and frame.number < worker.next_frame:
            return
        if worker.next_frame and frame.number > worker.next_frame:
            self._fail_requests(
                worker, f"{worker.url}: frames {worker.next_frame} to {frame.number - 1} of its stream are lost"
            )
        worker.next_frame = frame.number + 1
        has_more_room = False
        for output in frame.outputs:
            inbox = worker.inboxes.get(output.request_id)
            if inbox is not None:
                inbox.push(output)
            has_more_room = has_more_room or output.finish_reason is not None or output.error is not None
        if frame.stats is not None:
            before, worker.stats = worker.stats, frame.stats
            has_more_room = has_more_room or (
                frame.stats.free_blocks > before.free_blocks
                or frame.stats.free_slots > before.free_slots
                or frame.stats.queued_tokens < before.queued_tokens
            )
        if not worker.is_refused and frame.state != worker.state:
            log.info("%s worker %s: %s -> %s", worker.role, worker.url, worker.state, frame.state)
            worker.state, worker.reason = frame.state, frame.reason
            if frame.state == "failed":
                self._fail_requests(worker, f"{worker.url} failed: {frame.reason}")
            # Endpoints, limits and fingerprints come with the later states.
            self._spawn(self._refresh(worker))
            self._reconcile()
        if has_more_room:
            self.notify()

    async def _refresh(self, worker: Worker) -> None:
        try:
            self._register(worker, await worker.client.info())
        except WorkerError as error:
            log.warning("%s: could not be asked after its state changed: %s", worker.url, error.message)

    async def _retire(self, worker: Worker) -> None:
        try:
            await worker.client.drain()
        except WorkerError as error:
            log.warning("%s could not be asked to end: %s", worker.url, error.message)

    async def _pay(self, worker: Worker) -> None:
        """Tell a worker that is back which requests ended meanwhile; what fails waits for the next time."""
        generation = worker.generation
        for request_id, request in list(worker.owed.items()):
            try:
                await worker.client.abort(request)
            except WorkerError as error:
                log.warning("%s could not be told of requests that ended: %s", worker.url, error.message)
                return
            if worker.generation != generation:
                return
            worker.owed.pop(request_id, None)

    def _disconnected(self, worker: Worker, failure: WorkerUnreachable) -> None:
        now = time.monotonic()
        if worker.unreachable_since is None:
            worker.unreachable_since = now
        worker.is_connected = False
        worker.reason = failure.message
        is_dead = failure.is_refused
        if now - worker.unreachable_since >= self._lost_s and (
            not worker.is_lost or (is_dead and worker.dead_generation != worker.generation)
        ):
            worker.state = "unreachable"
            log.warning("%s worker %s is lost: %s", worker.role, worker.url, failure.message)
            self._end_life(worker, f"{worker.url} is lost: {failure.message}", is_dead=is_dead)
        self._reconcile()

    def _end_life(self, worker: Worker, message: str, *, is_dead: bool) -> None:
        """Fail what runs at a worker; if it is dead for certain, tell the other side so that it lets go."""
        self._fail_requests(worker, message)
        worker.is_lost = True
        for pair in self.pairs:
            if worker in (pair.prefill, pair.decode):
                pair.linked = pair.warmed = (0, 0)
        if not is_dead or not worker.generation or worker.dead_generation == worker.generation:
            return
        worker.dead_generation = worker.generation
        lost = protocol.WriterLost(generation=worker.generation)
        for peer in self.decodes if worker.role == "prefill" else self.prefills:
            if peer.generation:
                self._spawn(self._tell(peer, lost))

    async def _tell(self, peer: Worker, lost: protocol.WriterLost) -> None:
        generation = peer.generation
        for delay in TELL_DELAYS_S:
            await asyncio.sleep(delay)
            if peer.generation != generation or self.find(peer.url) is not peer:
                return
            try:
                if peer.role == "decode":
                    await peer.client.writer_lost(lost)
                else:
                    await peer.client.unlink(lost)
                return
            except WorkerError as error:
                failure = error.message
        log.warning("%s could not be told that generation %s is dead: %s", peer.url, lost.generation, failure)

    def _fail_requests(self, worker: Worker, message: str) -> None:
        for inbox in worker.inboxes.values():
            inbox.fail(WorkerError("worker_lost", message))

    # ------------------------------------------------------------ bringing up pairs

    def _reconcile(self) -> None:
        """Start what a change of any worker makes necessary."""
        if self._is_closed:
            return  # a cancelled bring-up asks for the next one
        for pair in self.pairs:
            needs_work = pair.warmed != pair.generations
            if pair.state in ("linking", "warming") and needs_work and pair.task is None:
                pair.task = self._spawn(self._bring_up(pair))
        ready = self.is_ready
        if self._was_ready and not ready:
            self.unready_since = time.monotonic()
        if ready != self._was_ready:
            log.info("router is %s", "ready" if ready else f"not ready: pairs are {self.state}")
        self._was_ready = ready
        self.notify()

    async def _bring_up(self, pair: Pair) -> None:
        assert self._warm_up is not None
        try:
            await bring_up(pair, self._warm_up)
        finally:
            pair.task = None
            self._reconcile_soon()

    def _reconcile_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._reconcile)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a watching task failed", exc_info=task.exception())


def _refusal(worker: Worker, info: WorkerInfo) -> str:
    """Return why a worker can't be used at all, with what was wanted and found; "" if it can."""
    if info.role != worker.role:
        return f"{worker.url} is a {info.role} worker, but was given as --{worker.role}: swap the URLs"
    if info.fingerprints is not None and info.fingerprints.protocol != PROTOCOL_VERSION:
        return (
            f"{worker.url} speaks protocol {info.fingerprints.protocol}, this router {PROTOCOL_VERSION}: "
            "start both from the same version"
        )
    if worker.role == "prefill" and info.generation == worker.dead_generation:
        return (
            f"{worker.url} counts as dead since its port refused connections, and decode takes nothing from this life "
            "of it any more: it is asked to end; start it again"
        )
    return ""
