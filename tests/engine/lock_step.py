"""Ranks of one group in one process, each in a thread, one at a time: kernels of one stream keep their order.

A rank runs until it needs the others' part, and then the next one has its turn. What a rank is given is what it would
be given by others on GPUs of their own: sums in the order of ranks, rounded once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


class Hub:
    """`run` gives every rank its turns. timeout_s: of one wait; a rank that fails ends the others' waiting."""

    def __init__(self, count: int, *, timeout_s: float = 600.0) -> None:
        self.count, self._timeout_s = count, timeout_s
        self._turn, self._changed = 0, threading.Condition()
        # Of the exchange under way and the one before, which others have yet to read.
        self._given: list[dict[int, torch.Tensor]] = [{}, {}]
        self._numbers = [0] * count
        self._error: BaseException | None = None

    def run(self, work: Callable[[LockStep], T]) -> list[T]:
        """Return what `work` returns for each rank. Raises what the first to fail raised."""
        found: dict[int, T] = {}

        def one(index: int) -> None:
            try:
                self._await_turn(index)
                found[index] = work(LockStep(self, index))
                self._pass_on(index)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [found[index] for index in range(self.count)]

    def exchange(self, index: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's x, once all have given theirs."""
        place = self._given[self._numbers[index] % 2]
        self._numbers[index] += 1
        place[index] = x.clone()
        self._pass_on(index)
        self._await_turn(index)
        given = [place[rank] for rank in range(self.count)]
        assert len({(part.shape, part.dtype) for part in given}) == 1, "the ranks are out of step"
        return given

    def _await_turn(self, index: int) -> None:
        with self._changed:
            ready = self._changed.wait_for(lambda: self._turn == index or self._error is not None, self._timeout_s)
            if self._error is not None or not ready:
                raise RuntimeError(f"rank {index} waits for others in vain") from self._error

    def _pass_on(self, index: int) -> None:
        with self._changed:
            self._turn = (index + 1) % self.count
            self._changed.notify_all()


class LockStep:
    """One rank's end of a Hub; an engine.model.group.Group."""

    def __init__(self, hub: Hub, index: int) -> None:
        self._hub, self.index, self.count = hub, index, hub.count

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in self._hub.exchange(self.index, x):
            total += part.float()
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._hub.exchange(self.index, x), -1)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        given = self._hub.exchange(self.index, torch.tensor(list(flags)))
        return [bool(any(parts)) for parts in zip(*(part.tolist() for part in given), strict=True)]
