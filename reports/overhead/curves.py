"""Two pictures of a cell's raw times: how they are distributed (ECDF), and when they happened (timeline).

Both are cut above the 99th percentile, because one request that waited a second would press all others into a line; how
many are beyond is said. A failed request has no time: the ECDF never reaches 100% for it, the timeline has a cross.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reports.overhead.axes import (
    WIDTH,
    Drawing,
    Label,
    Line,
    Scale,
    dots,
    quantile,
    scale_over,
    tick_text,
    unit_for,
)
from reports.overhead.results import Sample
from reports.overhead.words import seconds
from reports.text import counted, visible

LEFT, RIGHT, TOP, BOTTOM, AXIS = 64, 24, 34, 250, 44
SHOWN_SHARE = 0.99
MAX_STEPS = 600
MAX_DOTS = 1500
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_CROSS = 4


def ecdf(a: Sample, b: Sample) -> Drawing:
    """Which share of all requests that were sent had their first token by when."""
    x, beyond = _times_scale((a, b), LEFT, WIDTH - RIGHT)
    y = Scale(0, 1, BOTTOM, TOP)
    lines = [*_frame(x, y), Line("a", _steps(a, x, y)), Line("b", _steps(b, x, y))]
    labels = [*_legend(a, b), *_tick_labels(x, along=True), *_shares(y)]
    labels.append(Label((LEFT + WIDTH - RIGHT) / 2, BOTTOM + 38, _cut("time to first token", beyond), "middle", "tick"))
    words = f"Empirical distribution of time to first token. {_medians(a, b)} The table has the quantiles."
    return Drawing(WIDTH, BOTTOM + AXIS, words, tuple(lines), tuple(labels))


def timeline(a: Sample, b: Sample) -> Drawing:
    """The time to first token of each request, at the moment at which it was to be sent."""
    y, beyond = _times_scale((a, b), BOTTOM, TOP)
    x = scale_over([t for sample in (a, b) for t in (*sample.at_s, *sample.failed_at_s)], LEFT, WIDTH - RIGHT)
    lines = _frame(x, y)
    for cls, sample in (("dot-a", a), ("dot-b", b)):
        points = _thinned([(x.at(t), y.at(ttft)) for t, ttft in zip(sample.at_s, sample.ttft_s, strict=True)])
        lines.append(Line(cls, dots(points)))
    for cls, sample in (("cross-a", a), ("cross-b", b)):
        lines.append(Line(cls, "".join(_cross(x.at(t)) for t in sample.failed_at_s)))
    ticks = x.ticks(8)
    labels = [*_legend(a, b), *_tick_labels(y, along=False)]
    labels += [Label(x.at(t), BOTTOM + 18, tick_text(t, ticks, 1, " s"), "middle", "tick") for t in ticks]
    said = _cut("time since the study began", beyond, "at the upper edge")
    labels.append(Label((LEFT + WIDTH - RIGHT) / 2, BOTTOM + 38, said, "middle", "tick"))
    failed = len(a.failed_at_s) + len(b.failed_at_s)
    words = f"Time to first token over time. {_halves(a)} {_halves(b)} {counted(failed, 'failed request')}."
    return Drawing(WIDTH, BOTTOM + AXIS, words, tuple(lines), tuple(labels))


def quantiles(sample: Sample) -> tuple[float, ...]:
    """The times by which 5, 25, 50, 75, 95 and 99% of all requests that were sent had their first token, in seconds."""
    values = sorted([*sample.ttft_s, *(math.inf for _ in sample.failed_at_s)])
    return tuple(quantile(values, share) for share in QUANTILES) if values else ()


def _times_scale(samples: Sequence[Sample], start: float, end: float) -> tuple[Scale, int]:
    """A scale for times to first token, and how many lie beyond it."""
    times = sorted(t for sample in samples for t in sample.ttft_s)
    if not times:
        return Scale(0, 1, start, end), 0
    scale = scale_over([times[0], quantile(times, SHOWN_SHARE)], start, end)
    return scale, sum(t > scale.high for t in times)


def _steps(sample: Sample, x: Scale, y: Scale) -> str:
    """A step at every time; of very many, at even shares."""
    times, sent = sorted(sample.ttft_s), len(sample.ttft_s) + len(sample.failed_at_s)
    if not times:
        return ""
    stride = math.ceil(len(times) / MAX_STEPS)
    parts = [f"M{x.start:g} {y.at(0):g}"]
    for number in sorted({*range(stride - 1, len(times), stride), len(times) - 1}):
        if not x.holds(times[number]):
            break
        parts.append(f"H{x.at(times[number]):g}V{y.at((number + 1) / sent):g}")
    return "".join(parts) + f"H{x.end:g}"


def _frame(x: Scale, y: Scale) -> list[Line]:
    grid = "".join(f"M{x.start:g} {y.at(t):g}H{x.end:g}" for t in y.ticks(4))
    return [Line("grid", grid), Line("axis", f"M{x.start:g} {y.start:g}H{x.end:g}")]


def _legend(a: Sample, b: Sample) -> list[Label]:
    return [
        Label(LEFT, 16, f"● A: {visible(a.label)}", "start", "legend-a"),
        Label(WIDTH / 2, 16, f"■ B: {visible(b.label)}", "start", "legend-b"),
    ]


def _tick_labels(scale: Scale, *, along: bool) -> list[Label]:
    factor, unit = unit_for(scale.high)
    ticks = scale.ticks(6 if along else 4)
    texts = [(scale.at(t), tick_text(t, ticks, factor, f" {unit}")) for t in ticks]
    if along:
        return [Label(at, BOTTOM + 18, text, "middle", "tick") for at, text in texts]
    return [Label(LEFT - 8, at + 4, text, "end", "tick") for at, text in texts]


def _shares(y: Scale) -> list[Label]:
    return [Label(LEFT - 8, y.at(t) + 4, f"{t:.0%}", "end", "tick") for t in (0, 0.25, 0.5, 0.75, 1)]


def _cut(axis: str, beyond: int, where: str = "not drawn") -> str:
    return f"{axis}; {counted(beyond, 'slower request')} {where}" if beyond else axis


def _cross(x: float) -> str:
    y = TOP + _CROSS
    return f"M{x - _CROSS:g} {y - _CROSS}l{2 * _CROSS} {2 * _CROSS}m0 {-2 * _CROSS}l{-2 * _CROSS} {2 * _CROSS}"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: math.ceil(len(points) / MAX_DOTS) or 1]


def _median(sample: Sample) -> float | None:
    return quantile(sorted(sample.ttft_s), 0.5) if sample.ttft_s else None


def _medians(a: Sample, b: Sample) -> str:
    return f"Median of A {seconds(_median(a))}, of B {seconds(_median(b))}."


def _halves(sample: Sample) -> str:
    """How a reader who sees no dots learns of a drift."""
    ordered = [ttft for _, ttft in sorted(zip(sample.at_s, sample.ttft_s, strict=True))]
    half = len(ordered) // 2
    if not half:
        return f"{visible(sample.label)}: {counted(len(ordered), 'answered request')}."
    first, last = (quantile(sorted(part), 0.5) for part in (ordered[:half], ordered[half:]))
    return f"{visible(sample.label)}: median {seconds(first)} in the first half, {seconds(last)} in the second."
