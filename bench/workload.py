"""What is asked of the server: requests drawn from a seed, or read from a trace."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.lengths import Lengths
from bench.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: JSON of a text or of token ids, encoded before the run begins.   due: seconds after the run's begin."""

    index: int
    input_tokens: int
    output_tokens: int
    prompt: bytes
    due: float = 0.0


class TraceRow(msgspec.Struct):
    """A line of a trace: JSON, one request each. timestamp is in milliseconds; further fields are read past."""

    input_length: int
    output_length: int
    timestamp: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """rows: of a trace, which then says lengths and times; the two distributions are not used."""

    input_lengths: Lengths
    output_lengths: Lengths
    prompts: Prompts
    seed: int
    rows: Sequence[TraceRow] = ()

    def requests(self, count: int, *, label: str, rate: float | None = None, poisson: bool = True) -> list[Request]:
        """Return `count` requests; a trace that is shorter begins again.

        label: of the run; runs with different labels get different prompts, so no run finds another's in a cache.
        rate: requests a second; they are due at random moments (a Poisson process), or evenly spaced.
        """
        lengths = random.Random(f"{self.seed}/lengths")  # the same lengths in every run: runs are to be compared
        words = random.Random(f"{self.seed}/prompts/{label}")
        arrivals = random.Random(f"{self.seed}/arrivals")
        due, requests = 0.0, []
        rows = itertools.cycle(self.rows) if self.rows else None
        for index in range(count):
            if rows is not None:
                row = next(rows)
                input_tokens, output_tokens = row.input_length, row.output_length
            else:
                input_tokens, output_tokens = self.input_lengths.draw(lengths), self.output_lengths.draw(lengths)
            prompt = msgspec.json.encode(self.prompts.make(words, input_tokens))
            requests.append(Request(index, input_tokens, output_tokens, prompt, due))
            if rate is not None:
                due += arrivals.expovariate(rate) if poisson else 1 / rate
        return requests

    def replay(self, *, label: str, speed: float = 1.0) -> list[Request]:
        """Return the trace's requests, due when it says, `speed` times as fast. Raises ValueError if it doesn't say."""
        times = [row.timestamp for row in self.rows if row.timestamp is not None]
        if not times or len(times) != len(self.rows):
            raise ValueError("the trace has no timestamps on every line: give --concurrency or --rate as well")
        asked = self.requests(len(self.rows), label=label)
        begin = min(times)
        placed = [
            dataclasses.replace(request, due=(time - begin) / 1000 / speed)
            for request, time in zip(asked, times, strict=True)
        ]
        return sorted(placed, key=lambda request: request.due)


def read_trace(path: Path) -> list[TraceRow]:
    """Read a trace of JSON lines. Raises ValueError naming the line."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=TraceRow)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if row.input_length < 1 or row.output_length < 1:
            raise ValueError(f"{path}, line {number}: input_length and output_length must be at least 1")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: has no requests")
    return rows
