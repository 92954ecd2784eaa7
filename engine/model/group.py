"""Group: what the model asks of the ranks that compute it together. The exchange itself is engine/parallel.py.

Every rank runs the same steps in the same order, so each call here meets the same call of every other rank. Streams,
caches, routing and logits are the same bits on all of them: sums come back the same everywhere, and all else that a
rank knows it computes from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Rank `index` of `count`. Calls may be captured in a CUDA graph, `agree` excepted."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x [T, H], the same bits on all, in x's dtype; x may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's x [N, C] side by side, [N, count C] in the order of ranks."""

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Return of each flag whether any rank has raised it. Waits for all of them, on the host."""


class Alone:
    """A group of one: it has nobody to exchange with."""

    index, count = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)
