"""Turns: who of those that wait may try for room next.

One at a time, in order of arrival: where decode has no room, nobody overtakes, or long requests would never find
blocks enough. One that is only held back by prefill workers full of long prompts steps aside, and those with at most
half its tokens may try meanwhile; as soon as it tries again it comes first, so it waits no longer than it had to.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A place in the line. size: tokens of its prompt."""

    def __init__(self, line: Turns, size: int) -> None:
        self.size = size
        self.is_aside = False
        self._line = line
        self._called = asyncio.Event()

    async def take(self) -> None:
        """Return when it is this one's turn, which it keeps until it steps aside or leaves the line."""
        self.is_aside = False
        self._line.call_next()
        await self._called.wait()

    def step_aside(self) -> None:
        """Let shorter ones try until `take` is called again."""
        self.is_aside = True
        self._called.clear()
        self._line.give_up(self)

    def call(self) -> None:
        self._called.set()


class Turns:
    """The line of those that wait, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[int, Turn] = {}
        self._holder: Turn | None = None
        self._numbers = itertools.count()

    @contextmanager
    def line(self, size: int) -> Iterator[Turn]:
        """Stand in line at its end, for as long as the context lasts."""
        number, turn = next(self._numbers), Turn(self, size)
        self._waiting[number] = turn
        try:
            yield turn
        finally:
            del self._waiting[number]
            self.give_up(turn)

    def give_up(self, turn: Turn) -> None:
        """Call the next one if it was this one's turn."""
        if self._holder is turn:
            self._holder = None
            self.call_next()

    def call_next(self) -> None:
        """Give the turn to the first who may have it, unless somebody has."""
        if self._holder is not None:
            return
        largest = math.inf  # that may overtake those passed over
        for turn in self._waiting.values():
            if not turn.is_aside and turn.size <= largest:
                self._holder = turn
                turn.call()
                return
            largest = min(largest, turn.size / 2)
