"""What was seen of one request: when, how many tokens, and how it ended."""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from dataclasses import dataclass, field


class Outcome(enum.StrEnum):
    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TokenSource(enum.StrEnum):
    """Where a stream's number of tokens comes from, best first."""

    TOKEN_IDS = "token ids"
    CONTINUOUS_USAGE = "usage in every chunk"
    USAGE = "usage at the end"
    CHUNKS = "chunks, since usage is missing: a lower bound"


@dataclass(slots=True)
class Stream:
    """Moments are seconds on the run's clock; NaN is one that never came.

    due: when the request should have been sent; latencies count from here, so a client that is late hides nothing.
    times, counts: each chunk that brought tokens and how many. Chunks that were read together have the same time.
    """

    index: int
    input_tokens: int
    wanted_tokens: int
    due: float
    sent: float = math.nan
    ended: float = math.nan
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    source: TokenSource = TokenSource.CHUNKS
    outcome: Outcome = Outcome.CANCELLED
    error: str = ""
    finish_reason: str = ""
    has_done: bool = False
    prompt_usage: int | None = None
    completion_usage: int | None = None
    num_events: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due if self.times else math.nan

    @property
    def joined(self) -> float:
        """When the stream began to decode: a step of its own before its second chunk; NaN without a chunk.

        A first token comes from the prefill. Its stream may then wait: for its cache to arrive, for a place in the
        batch, for the prompts of others.
        """
        if len(self.times) < 3:
            return self.times[0] if self.times else math.nan
        gaps = self.gaps
        return self.times[1] - min(gaps[0], statistics.median(gaps[1:]))

    @property
    def latency(self) -> float:
        return self.ended - self.due

    @property
    def tpot(self) -> float:
        """Seconds a token behind the first chunk; NaN if there is only one."""
        rest = self.num_tokens - self.counts[0] if self.counts else 0
        return (self.times[-1] - self.times[0]) / rest if rest > 0 else math.nan

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]

    def settle(self, *, has_ids: bool, running_usage: list[int | None], reasoning: list[bool]) -> None:
        """Decide what to count by, once the stream has ended.

        has_ids: counts came from token ids.   running_usage: completion tokens up to each chunk, where the server said.
        reasoning: whether each chunk was reasoning.
        """
        totals = [usage for usage in running_usage if usage is not None]
        if has_ids:
            self.source = TokenSource.TOKEN_IDS
        elif totals and len(totals) == len(self.counts):
            self.source = TokenSource.CONTINUOUS_USAGE
            self.counts = [max(0, b - a) for a, b in itertools.pairwise([0, *totals])]
            # tokens that showed no text after the last chunk that did
            self.counts[-1] += max(0, (self.completion_usage or 0) - totals[-1])
        elif self.completion_usage is not None:
            self.source = TokenSource.USAGE
            self._spread(self.completion_usage)
        if not self.reasoning_tokens:
            self.reasoning_tokens = sum(
                n for n, is_reasoning in zip(self.counts, reasoning, strict=True) if is_reasoning
            )

    def _spread(self, total: int) -> None:
        """Share `total` out over the chunks as evenly as whole tokens can be."""
        num = len(self.counts)
        edges = [at * total // num for at in range(num + 1)] if num else [0]
        self.counts = [b - a for a, b in itertools.pairwise(edges)]
