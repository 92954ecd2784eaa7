"""Plots as SVG, drawn by hand: axes, lines, bands, points. Colours are classes, so that a page's style decides them."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 40
_STEPS = (1, 2, 2.5, 5, 10)
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """low < high; a logarithmic axis wants low > 0."""

    low: float
    high: float
    label: str
    is_log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], label: str, *, is_log: bool = False, from_zero: bool = True) -> Axis:
        """Return an axis that holds all of `values`; for a logarithmic one those that are not above 0 are left out."""
        kept = [value for value in values if math.isfinite(value) and (not is_log or value > 0)]
        low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
        if is_log:
            low, high = (low / 1.15, high * 1.15) if kept else (1.0, 10.0)
            if high / low < 2:
                low, high = low / 1.5, high * 1.5
        else:
            low, high = (0.0 if from_zero else low), high * 1.06
            high = high if high > low else low + 1
        return cls(low, high, label, is_log)

    def share(self, value: float) -> float:
        """Return where a value lies, from 0 to 1; beyond the ends, the end."""
        if self.is_log:
            value = max(value, self.low)
            return min(1.0, math.log(value / self.low) / math.log(self.high / self.low))
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        if not self.is_log:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in _STEPS if factor * power >= rough * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            return [at * step for at in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if math.log10(self.high / self.low) < 3.2 else (1,)
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def short(value: float) -> str:
    """Return a number short enough for a tick."""
    if value and abs(value) >= 1_000_000:
        return f"{value / 1_000_000:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1_000:.4g}k"
    return f"{value:.4g}"


class Plot:
    """One chart. Series are numbered; number k has the class `s<k>`. Points are (x, y) in the axes' units."""

    def __init__(self, x: Axis, y: Axis, *, name: str, width: int = 640, height: int = 270) -> None:
        self._x, self._y = x, y
        self._name = name
        self._width, self._height = width, height
        self._under: list[str] = []
        self._over: list[str] = []

    def shade(self, begin: float, end: float, kind: str) -> None:
        """Colour the background between two values of x; kind is its class and what a pointer over it reads."""
        left, right = self._px(begin), self._px(end)
        self._under.append(
            f'<rect class="phase {kind}" x="{left:.1f}" y="{_TOP}" width="{max(0.0, right - left):.1f}" '
            f'height="{self._height - _TOP - _BOTTOM}"><title>{kind}: {short(begin)} to {short(end)} s</title></rect>'
        )

    def line(
        self, points: Sequence[Point], series: int, name: str, *, dashed: bool = False, steps: bool = False
    ) -> None:
        """Draw a line that a pointer reads values from; `steps` keeps each value until the next."""
        if not points:
            return
        placed = [(self._px(x), self._py(y)) for x, y in points]
        path = [f"M{placed[0][0]:.1f} {placed[0][1]:.1f}"]
        for px, py in placed[1:]:
            path.append(f"H{px:.1f}V{py:.1f}" if steps else f"L{px:.1f} {py:.1f}")
        values = [
            [round(px, 1), round(py, 1), short(x), short(y)] for (px, py), (x, y) in zip(placed, points, strict=True)
        ]
        self._over.append(
            f'<path class="line s{series}{" dashed" if dashed else ""}" d="{"".join(path)}" '
            f'data-name="{html.escape(name, quote=True)}" data-at="{html.escape(json.dumps(values), quote=True)}"/>'
        )

    def band(self, low: Sequence[Point], high: Sequence[Point], series: int) -> None:
        """Fill what lies between two lines."""
        outline = [f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in [*low, *reversed(high)]]
        self._under.append(f'<polygon class="band s{series}" points="{" ".join(outline)}"/>')

    def level(self, value: float, begin: float, end: float, series: int) -> None:
        """Draw a thin horizontal line between two values of x."""
        y = self._py(value)
        self._over.append(f'<path class="level s{series}" d="M{self._px(begin):.1f} {y:.1f}H{self._px(end):.1f}"/>')

    def points(self, points: Sequence[Point], series: int, names: Sequence[str], *, hollow: bool = False) -> None:
        for (x, y), name in zip(points, names, strict=True):
            self._over.append(
                f'<circle class="dot s{series}{" hollow" if hollow else ""}" cx="{self._px(x):.1f}" '
                f'cy="{self._py(y):.1f}" r="4"><title>{html.escape(name)}</title></circle>'
            )

    def svg(self) -> str:
        right, bottom = self._width - _RIGHT, self._height - _BOTTOM
        parts = [
            f'<svg viewBox="0 0 {self._width} {self._height}" role="img" '
            f'aria-label="{html.escape(self._name, quote=True)}">',
            *self._under,
        ]
        for tick in self._y.ticks():
            y = self._py(tick)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
        for tick in self._x.ticks():
            x = self._px(tick)
            parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v4"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{short(tick)}</text>')
        parts += [
            f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>',
            *self._over,
            f'<text class="label" x="{(_LEFT + right) / 2:.0f}" y="{self._height - 5}" text-anchor="middle">'
            f"{html.escape(self._x.label)}</text>",
            f'<text class="label" transform="translate(14 {(_TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{html.escape(self._y.label)}</text>",
            "</svg>",
        ]
        return "".join(parts)

    def _px(self, x: float) -> float:
        return _LEFT + self._x.share(x) * (self._width - _LEFT - _RIGHT)

    def _py(self, y: float) -> float:
        return self._height - _BOTTOM - self._y.share(y) * (self._height - _TOP - _BOTTOM)
