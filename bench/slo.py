"""Goodput: what was served as well as was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.stream import Outcome, Stream

NAMES = ("ttft", "tpot", "itl", "latency")


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds that every stream should keep; itl bounds the 99th percentile of its gaps."""

    bounds: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft=2000,tpot=50`. Raises ValueError."""
        bounds = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                bounds[name] = float(value)
            except ValueError:
                bounds[name] = -1
            if name not in NAMES or not bounds[name] > 0:
                raise ValueError(f"{part!r}: give NAME=MILLISECONDS with a name of {', '.join(NAMES)}")
        return cls(bounds)

    def is_met(self, stream: Stream) -> bool:
        """Whether a stream kept all bounds. One that failed has not, and neither has a time that never came."""
        if stream.outcome is not Outcome.OK:
            return False
        gaps = stream.gaps
        times = {
            "ttft": stream.ttft,
            "tpot": stream.tpot if stream.num_tokens > stream.counts[0] else 0.0,
            "itl": float(np.percentile(gaps, 99)) if gaps else 0.0,
            "latency": stream.latency,
        }
        return all(times[name] * 1000 <= bound for name, bound in self.bounds.items())

    def goodput(self, streams: Sequence[Stream], seconds: float) -> dict[str, Any]:
        """Return requests and tokens a second of the streams that kept the bounds, over the whole run."""
        met = [stream for stream in streams if self.is_met(stream)]
        return {
            "slo_ms": self.bounds,
            "met": len(met),
            "share": len(met) / len(streams) if streams else None,
            "requests_per_s": len(met) / seconds if seconds > 0 else None,
            "output_tokens_per_s": sum(stream.num_tokens for stream in met) / seconds if seconds > 0 else None,
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {bound:g} ms" for name, bound in self.bounds.items())
