"""Writer: the prefill side of a transfer. Turns pushes and cancels of landings into writes, in the right order.

Per landing:

    open --push--> writing --ended--> open ... --last ended--> complete            ("last" also means drained)
     |                |
     |              failure, deadline or cancel
     |                v
     +--cancel--> draining --nothing under way--> void          drained (or undelivered) said to every destination

One push of a landing is under way at a time, to all destinations of this rank. So the last one, whose notification
tells decode to start, begins only when all earlier bytes are in place everywhere. A landing that is complete or void
is remembered, so that late pushes are refused and late cancels answered.

Single-threaded: whoever owns the transport calls `push`, `cancel` and, often, `pump`.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from kv_transfer.coverage import Coverage
from kv_transfer.landing import Landing, Notification, encode
from kv_transfer.layout import KVLayout
from kv_transfer.locality import host_id
from kv_transfer.plan import TransferPlan, destinations_of
from kv_transfer.transport import KvTransport, Transfer, TransferError, TransferStatus

EventStatus = Literal["done", "failed", "drained", "undelivered"]
FailureCause = Literal["", "refused", "peer", "deadline"]
_MEASURABLE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class WriterEvent:
    """What became of a push, or of a landing.

    Every push is answered by one "done" or "failed". A landing ends with "done" of its last push, or with "drained";
    "undelivered" is a drained whose word could not be sent to every destination: it must be said another way.
    num_bytes, num_pieces: over all destinations.  seconds: from start to end of the push, of which post_seconds inside
    the transport's call; exposed_seconds: from `asked` to the end, of the last push of a landing: decode waits for it.
    cause: of a first failure: the plan was refused, the peer is gone or its lane broke, or a write took too long. What
    fails behind it has none.
    """

    key: int
    generation: int
    status: EventStatus
    is_last: bool = False
    num_bytes: int = 0
    num_pieces: int = 0
    seconds: float = 0.0
    post_seconds: float = 0.0
    exposed_seconds: float = 0.0
    error: str = ""
    cause: FailureCause = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Push:
    plan: TransferPlan
    is_last: bool
    first_token: int
    checksums: Mapping[str, int]
    fails: str
    asked: float


@dataclasses.dataclass(slots=True)
class _Flight:
    agent: str
    transfer: Transfer
    deadline: float
    is_expired: bool = False


@dataclasses.dataclass(slots=True)
class _Course:
    """A landing that is not over. coverage: what has arrived at every destination."""

    landing: Landing
    destinations: tuple[str, ...]
    coverage: Coverage
    queue: collections.deque[_Push] = dataclasses.field(default_factory=collections.deque)
    current: _Push | None = None
    flights: list[_Flight] = dataclasses.field(default_factory=list)
    started: float = 0.0
    post_seconds: float = 0.0
    num_bytes: int = 0
    num_pieces: int = 0
    error: str = ""
    is_cancelled: bool = False
    is_complete: bool = False

    @property
    def is_void(self) -> bool:
        return self.is_cancelled or bool(self.error)


class Writer:
    """Pushes landings over `transport` for one rank of a prefill group.

    generation: of the prefill group.  A write is given max(min_deadline_s, deadline_factor * bytes under way to that
    peer / measured bandwidth), starting from `bandwidth` bytes a second; then it counts as failed and its peer is
    disconnected, but its landing is not drained before the write has really ended.
    remember: how many ended landings are known.
    """

    def __init__(
        self,
        transport: KvTransport,
        *,
        layout: KVLayout,
        generation: int,
        rank: int = 0,
        num_ranks: int = 1,
        min_deadline_s: float = 1.0,
        deadline_factor: float = 4.0,
        bandwidth: float = 100e6,
        remember: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._generation = generation
        self._rank = rank
        self._num_ranks = num_ranks
        self._min_deadline_s = min_deadline_s
        self._deadline_factor = deadline_factor
        self._bandwidth: dict[str, float] = {}
        self._first_bandwidth = bandwidth
        self._remember = remember
        self._clock = clock
        self._open: dict[tuple[int, int], _Course] = {}
        self._over: collections.OrderedDict[tuple[int, int], EventStatus] = collections.OrderedDict()
        self._events: list[WriterEvent] = []

    @property
    def is_idle(self) -> bool:
        """Nothing under way or waiting, and no event unread: `pump` may be called seldom."""
        busy = any(c.current is not None or c.queue or c.is_void for c in self._open.values())
        return not self._events and not busy

    @property
    def num_open(self) -> int:
        """Landings that are neither complete nor void."""
        return len(self._open)

    def push(
        self,
        landing: Landing,
        plan: TransferPlan,
        *,
        is_last: bool = False,
        first_token: int = -1,
        checksums: Mapping[str, int] | None = None,
        asked: float | None = None,
        fails: str = "",
    ) -> None:
        """Queue a write into a landing, to each destination of this rank. The answer comes from `pump`.

        The plan may touch whole units of this landing only. With is_last it must complete the landing: every block
        of the prompt in every group, and the state record; the notification carries manifest and first token.
        checksums: with is_last, of the whole landing by group, for the receiver to compare.
        asked: when the push became possible, of the clock; None: now.   fails: why the write must fail instead.
        """
        key = (landing.generation, landing.key)
        refusal = ""
        if key in self._over:
            refusal = "is complete" if self._over[key] == "done" else "was cancelled or has failed"
        elif (course := self._open.get(key)) and course.is_void:
            refusal = "was cancelled" if course.is_cancelled else f"has failed: {course.error}"
        if refusal:
            self._emit(landing, "failed", is_last=is_last, error=f"push refused: landing {landing.key} {refusal}")
            return
        course = self._open.setdefault(key, self._course(landing))
        course.queue.append(
            _Push(plan, is_last, first_token, checksums or {}, fails, self._clock() if asked is None else asked)
        )

    def cancel(self, landing: Landing) -> None:
        """Start nothing more for a landing; when nothing is under way, say drained to its destinations.

        A landing never seen is drained at once; one that is over is answered without sending again.
        """
        key = (landing.generation, landing.key)
        if (ending := self._over.get(key)) is not None:
            self._emit(landing, "undelivered" if ending == "undelivered" else "drained")
            return
        course = self._open.setdefault(key, self._course(landing))
        course.is_cancelled = True
        self._drop_queue(course, "the landing was cancelled")

    def pump(self) -> list[WriterEvent]:
        """Drive everything that is under way and return what has happened since the last call, in order."""
        for key in list(self._open):
            self._advance(key, self._open[key])
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ below: one landing

    def _advance(self, key: tuple[int, int], course: _Course) -> None:
        while True:
            self._check_flights(course)
            if course.flights:
                return
            if course.current is not None:
                self._finish_push(course, course.current)
            if course.is_complete:
                if course.is_cancelled:
                    self._emit(course.landing, "drained")
                self._end(key, "done")
                return
            if course.is_void:
                self._end(key, self._say_drained(course))
                return
            if not course.queue:
                return
            self._start_push(course, course.queue.popleft())

    def _start_push(self, course: _Course, push: _Push) -> None:
        course.current = push
        course.started = self._clock()
        course.num_bytes = course.num_pieces = 0
        if problem := course.coverage.problem(push.plan, is_last=push.is_last):
            self._fail(course, problem, "refused")
            return
        message = encode(self._last_notification(course, push)) if push.is_last else b""
        for agent in course.destinations:
            try:
                if push.fails:
                    raise TransferError(f"write to {agent}: {push.fails}")
                transfer = self._transport.write(agent, push.plan, message)
            except TransferError as error:
                self._fail(course, str(error), "peer")
                return
            course.num_bytes += transfer.num_bytes
            course.num_pieces += transfer.num_pieces
            under_way = transfer.num_bytes + self._bytes_under_way(agent)
            allowed = self._deadline_factor * under_way / self._bandwidth.get(agent, self._first_bandwidth)
            deadline = self._clock() + max(self._min_deadline_s, allowed)
            course.flights.append(_Flight(agent, transfer, deadline))
        course.post_seconds = self._clock() - course.started

    def _check_flights(self, course: _Course) -> None:
        """Drop what has ended. What has expired stays: its bytes may still move."""
        for flight in list(course.flights):
            status = self._transport.check(flight.transfer)
            if status is TransferStatus.PENDING:
                if not flight.is_expired and self._clock() > flight.deadline:
                    flight.is_expired = True
                    self._fail(
                        course, f"write to {flight.agent} missed its deadline; the peer is disconnected", "deadline"
                    )
                    self._transport.disconnect(flight.agent)
                continue
            course.flights.remove(flight)
            if status is TransferStatus.FAILED:
                self._fail(course, flight.transfer.error, "peer")
            elif not flight.is_expired:
                self._measure(flight, self._clock() - course.started)

    def _finish_push(self, course: _Course, push: _Push) -> None:
        """Answer a push whose writes have all ended, unless its failure was the answer."""
        course.current = None
        if course.error:
            return
        course.coverage.add(push.plan)
        self._emit(
            course.landing,
            "done",
            is_last=push.is_last,
            num_bytes=course.num_bytes,
            num_pieces=course.num_pieces,
            seconds=self._clock() - course.started,
            post_seconds=course.post_seconds,
            exposed_seconds=self._clock() - push.asked if push.is_last else 0.0,
        )
        if push.is_last:
            course.is_complete = True
            self._drop_queue(course, "the landing is complete")

    def _fail(self, course: _Course, error: str, cause: FailureCause) -> None:
        """Void a landing: its first failure answers the push under way, and everything that waits behind it."""
        if course.error:
            return
        course.error = error
        if course.current is not None:
            self._emit(course.landing, "failed", is_last=course.current.is_last, error=error, cause=cause)
        self._drop_queue(course, f"landing {course.landing.key} has failed: {error}")

    def _drop_queue(self, course: _Course, reason: str) -> None:
        while course.queue:
            push = course.queue.popleft()
            self._emit(course.landing, "failed", is_last=push.is_last, error=f"push dropped: {reason}")

    def _say_drained(self, course: _Course) -> EventStatus:
        """Send the word to every destination, those that have got a "last" included: the landing is void."""
        notification = self._notification(course.landing, "drained")
        errors = []
        for agent in course.destinations:
            try:
                self._transport.notify(agent, encode(notification))
            except TransferError as error:
                errors.append(str(error))
        ending: EventStatus = "undelivered" if errors else "drained"
        self._emit(course.landing, ending, error="; ".join(errors))
        return ending

    def _end(self, key: tuple[int, int], ending: EventStatus) -> None:
        del self._open[key]
        self._over[key] = ending
        while len(self._over) > self._remember:
            self._over.popitem(last=False)

    # ------------------------------------------------------------ below: what belongs to a landing

    def _course(self, landing: Landing) -> _Course:
        ranks = destinations_of(self._rank, num_sources=self._num_ranks, num_targets=len(landing.agents))
        return _Course(landing, tuple(landing.agents[rank] for rank in ranks), Coverage(self._layout, landing))

    def _notification(self, landing: Landing, kind: Literal["last", "drained"]) -> Notification:
        return Notification(
            kind=kind,
            key=landing.key,
            generation=landing.generation,
            writer_rank=self._rank,
            writer_generation=self._generation,
        )

    def _last_notification(self, course: _Course, push: _Push) -> Notification:
        """Count what was really written, so that decode compares facts with what it expects."""
        return msgspec.structs.replace(
            self._notification(course.landing, "last"),
            first_token=push.first_token,
            num_tokens=course.landing.num_tokens,
            sent_at=self._clock(),
            sent_by=host_id(),
            manifest=tuple(
                msgspec.structs.replace(counted, checksum=push.checksums.get(counted.name))
                for counted in course.coverage.counts_with(push.plan)
            ),
        )

    def _bytes_under_way(self, agent: str) -> int:
        flights = (f for course in self._open.values() for f in course.flights)
        return sum(f.transfer.num_bytes for f in flights if f.agent == agent)

    def _measure(self, flight: _Flight, seconds: float) -> None:
        """Follow the peer's bandwidth slowly; small writes say nothing about it."""
        if flight.transfer.num_bytes >= _MEASURABLE_BYTES and seconds > 0:
            measured = flight.transfer.num_bytes / seconds
            known = self._bandwidth.get(flight.agent)
            self._bandwidth[flight.agent] = measured if known is None else 0.75 * known + 0.25 * measured

    def _emit(
        self,
        landing: Landing,
        status: EventStatus,
        *,
        is_last: bool = False,
        num_bytes: int = 0,
        num_pieces: int = 0,
        seconds: float = 0.0,
        post_seconds: float = 0.0,
        exposed_seconds: float = 0.0,
        error: str = "",
        cause: FailureCause = "",
    ) -> None:
        self._events.append(
            WriterEvent(
                key=landing.key,
                generation=landing.generation,
                status=status,
                is_last=is_last,
                num_bytes=num_bytes,
                num_pieces=num_pieces,
                seconds=seconds,
                post_seconds=post_seconds,
                exposed_seconds=exposed_seconds,
                error=error,
                cause=cause,
            )
        )
