"""Drawings as data, and the scales that they share. A template turns a drawing into SVG and escapes what it says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 760


@dataclass(frozen=True, slots=True)
class Line:
    """SVG path data, and the class that colours it."""

    cls: str
    d: str


@dataclass(frozen=True, slots=True)
class Label:
    """Text at a point; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    cls: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture in pixels. `words` say what it shows to who cannot see it."""

    width: int
    height: int
    words: str
    lines: tuple[Line, ...]
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` on pixels from `start` to `end`; values outside land on the edge."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel, to a tenth."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, about: int) -> list[float]:
        """Round values, `about` as many."""
        step = _round_step((self.high - self.low) / about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def scale_over(values: Sequence[float], start: float, end: float, *, from_zero: bool = False) -> Scale:
    """A scale that holds all these values, with a little room; never of no width."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, start, end)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of these are not above: an order statistic. Infinite ones count as the largest.

    `values` must be sorted and not empty.
    """
    return values[max(0, math.ceil(share * len(values)) - 1)]


def box(x1: float, y1: float, x2: float, y2: float) -> str:
    """Path data of a rectangle."""
    return f"M{x1:g} {y1:g}H{x2:g}V{y2:g}H{x1:g}z"


def dots(points: Iterable[tuple[float, float]]) -> str:
    """Points of no length, which a line cap makes dots."""
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def tick_text(value: float, step_values: Sequence[float], factor: float, unit: str) -> str:
    """A tick with as many digits as its scale needs."""
    step = abs(step_values[1] - step_values[0]) * factor if len(step_values) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value * factor + 0.0:.{digits}f}{unit}"


def unit_for(high_s: float) -> tuple[float, str]:
    """The factor and name of the unit that fits times up to `high_s` seconds."""
    return (1.0, "s") if high_s >= 2 else (1e3, "ms") if high_s >= 2e-3 else (1e6, "µs")
