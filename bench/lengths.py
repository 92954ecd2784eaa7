"""Distributions of prompt and answer lengths, in tokens, as a flag spells them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

HELP = "N, LOW-HIGH (uniform), normal:MEAN,STD or lognormal:MEAN,STD, in tokens"


@dataclass(frozen=True, slots=True)
class Lengths:
    """kind: fixed (first is the value), uniform (the bounds, both included), normal, lognormal (mean and deviation)."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read what HELP describes. Raises ValueError saying what was wanted."""
        kind, _, numbers = text.rpartition(":")
        separator = "," if kind else "-"
        try:
            values = [float(number) for number in numbers.split(separator)]
        except ValueError:
            values = []
        kind = kind or ("fixed" if len(values) == 1 else "uniform")
        wanted = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2}.get(kind)
        if wanted != len(values) or not all(math.isfinite(value) for value in values) or values[0] < 1:
            raise ValueError(f"{text!r} is no length: give {HELP}, of at least 1")
        if kind == "uniform" and values[1] < values[0]:
            raise ValueError(f"{text!r}: the upper bound is below the lower one")
        if kind in ("normal", "lognormal") and values[1] < 0:
            raise ValueError(f"{text!r}: a deviation can't be negative")
        return cls(kind, *values)

    def draw(self, rng: random.Random) -> int:
        """Return one length, at least 1."""
        if self.kind == "fixed":
            return round(self.first)
        if self.kind == "uniform":
            return rng.randint(math.ceil(self.first), math.floor(self.second))
        if self.kind == "normal":
            return max(1, round(rng.gauss(self.first, self.second)))
        # mean and deviation are those of the lengths, not of their logarithms
        variance = math.log1p((self.second / self.first) ** 2)
        return max(1, round(rng.lognormvariate(math.log(self.first) - variance / 2, math.sqrt(variance))))

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        if self.kind == "uniform":
            return f"{self.first:g}-{self.second:g}"
        return f"{self.kind}:{self.first:g},{self.second:g}"
