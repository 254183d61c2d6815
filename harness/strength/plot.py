"""docs/strength.svg: the rates of misses on a logarithmic axis, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from harness.strength.page import read_results
from harness.strength.results import Rate, StrengthResult

COLOURS = ("#c0392b", "#1a7f37", "#b8860b", "#6f42c1", "#0b6e99", "#57606a")
"""One a checksum, told apart by their height in a row too."""
LEFT, WIDTH, ROW, TOP = 250, 560, 42, 56
DECADES = 8


def strength_plot(root: Path) -> str:
    """The plot of the committed campaign as the text of an SVG."""
    return svg(read_results(root))


def svg(result: StrengthResult) -> str:
    """Draw a campaign: a row a fault, a dot where something was missed, an open bar up to the interval's end if not."""
    height = TOP + ROW * len(result.models) + 36
    total = LEFT + WIDTH + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="Rate of missed corruptions by fault and checksum">',
        f'<rect width="{total}" height="{height}" fill="#fff"/>',
        *_legend([rate.checksum for rate in result.models[0].rates]),
        *_axis(height),
    ]
    for row, model in enumerate(result.models):
        y = TOP + ROW * row
        if row % 2:
            lines.append(f'<rect x="0" y="{y}" width="{total}" height="{ROW}" fill="#000" fill-opacity=".04"/>')
        lines.append(f'<text x="{LEFT - 12}" y="{y + ROW / 2 + 4}" text-anchor="end">{escape(model.model)}</text>')
        for place, rate in enumerate(model.rates):
            lines += _mark(rate, y + 6 + place * 6, COLOURS[place])
        if model.theory is not None and model.theory >= 10.0**-DECADES:
            lines.append(f'<path d="M{_x(model.theory)} {y + 1}v10" stroke="#000" stroke-width="1.5"/>')
    return "\n".join([*lines, "</svg>", ""])


def _legend(names: list[str]) -> Iterator[str]:
    for place, name in enumerate(names):
        x = 20 + place * 135
        yield f'<circle cx="{x}" cy="18" r="4" fill="{COLOURS[place]}"/>'
        yield f'<text x="{x + 9}" y="22">{escape(name)}</text>'


def _axis(height: int) -> Iterator[str]:
    for decade in range(DECADES + 1):
        x = _x(10.0 ** (decade - DECADES))
        yield f'<path d="M{x} {TOP}V{height - 30}" stroke="#ccc"/>'
        label = "1" if decade == DECADES else f"1e{decade - DECADES}"
        yield f'<text x="{x}" y="{TOP - 8}" text-anchor="middle" fill="#555">{label}</text>'
    yield (
        f'<text x="{LEFT}" y="{height - 10}" fill="#555">Share of corruptions missed. Dot: measured. '
        "Bar: 99.9% interval; without a dot nothing was missed. Tick: version 1, expected.</text>"
    )


def _mark(rate: Rate, y: int, colour: str) -> Iterator[str]:
    if not rate.samples:
        return
    low, high = _x(rate.low), _x(rate.high)
    opacity = 1 if rate.misses else 0.35
    yield f'<path d="M{low} {y}H{high}" stroke="{colour}" stroke-width="2" stroke-opacity="{opacity}"/>'
    if rate.misses:
        yield f'<circle cx="{_x(rate.misses / rate.samples)}" cy="{y}" r="3.5" fill="{colour}"/>'


def _x(rate: float) -> float:
    exponent = math.log10(max(rate, 10.0**-DECADES))
    return round(LEFT + WIDTH * (1 + exponent / DECADES), 1)
