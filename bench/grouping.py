"""Chunks that arrive together although they were made one after another.

A proxy or a server that buffers its stream makes TTFT the time to the end and ITL zero. Such figures are not shown:
what was measured is the buffer. A server that sends several chunks a step (speculation), or holds back a few, makes
gaps between groups; they are measured, and the report says that they are groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.stream import Stream

_MIN_TOKENS = 8  # of an answer, to judge by: a shorter one may well arrive at once
_BUFFERED_GROUPS = 3  # a whole answer in so few: it came at the end, cut by the size of a read
_BUFFERED_TOKENS_A_GROUP = 8
_NEAR, _NEAR_S = 0.02, 0.001  # of the latency a token, and at most: a chunk that near belongs to the one before
_LARGE_GROUP = 4.0
_SHARE = 0.5  # of the streams


@dataclass(frozen=True, slots=True)
class Grouping:
    """num_judged: streams that are long enough.   tokens_a_group: the median over streams of their mean."""

    num_judged: int
    num_buffered: int
    tokens_a_group: float

    @property
    def is_buffered(self) -> bool:
        return self.num_judged > 0 and self.num_buffered >= _SHARE * self.num_judged

    @property
    def is_grouped(self) -> bool:
        return not self.is_buffered and self.tokens_a_group >= _LARGE_GROUP

    def describe(self) -> str:
        if self.is_buffered:
            return (
                f"the stream is buffered: {self.num_buffered} of {self.num_judged} answers arrived whole, at the end. "
                "TTFT, TPOT and ITL can't be measured; ask the server itself, without what lies between "
                "(proxy_buffering off in nginx)"
            )
        if self.is_grouped:
            return (
                f"tokens arrive in groups of about {self.tokens_a_group:.0f}: something between buffers, or the server "
                "sends several a step. ITL is the time between groups"
            )
        return ""


def find_grouping(streams: Sequence[Stream]) -> Grouping:
    judged = [stream for stream in streams if stream.num_tokens >= _MIN_TOKENS]
    sizes, num_buffered = [], 0
    for stream in judged:
        groups = _num_groups(stream)
        sizes.append(stream.num_tokens / groups)
        num_buffered += groups <= _BUFFERED_GROUPS and sizes[-1] >= min(_BUFFERED_TOKENS_A_GROUP, stream.num_tokens / 2)
    return Grouping(len(judged), num_buffered, statistics.median(sizes) if sizes else 1.0)


def _num_groups(stream: Stream) -> int:
    near = min(_NEAR_S, _NEAR * (stream.times[-1] - stream.sent) / len(stream.times))
    return 1 + sum(gap > near for gap in stream.gaps)
