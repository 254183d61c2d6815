"""Where the time goes: each stage begins where the one before ended, so that the eye adds them up; the difference that
was measured stands below, with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reports.overhead.axes import WIDTH, Drawing, Label, Line, Scale, box, scale_over, tick_text, unit_for
from reports.overhead.results import Estimate, Interval, StageCost
from reports.overhead.words import between, seconds
from reports.text import clip, visible

LEFT, RIGHT, TOP, ROW, AXIS = 170, 230, 10, 28, 30
MAX_NAME = 24


def waterfall(stages: Sequence[StageCost], estimate: Estimate) -> Drawing:
    """The picture. Stages may be negative: a counter that differs by chance."""
    total = sum(stage.seconds for stage in stages)
    measured = Interval(estimate.ci_low_s, estimate.ci_high_s)
    starts = [sum(stage.seconds for stage in stages[:number]) for number in range(len(stages))]
    ends = [start + stage.seconds for start, stage in zip(starts, stages, strict=True)]
    known = [v for v in (*starts, *ends, estimate.diff_s, measured.low, measured.high) if math.isfinite(v)]
    x = scale_over(known, LEFT, WIDTH - RIGHT, from_zero=True)
    bottom = TOP + ROW * (len(stages) + 2)
    ticks, (factor, unit) = x.ticks(4), unit_for(max(abs(x.low), abs(x.high)))
    lines = [
        Line("grid", "".join(f"M{x.at(t):g} {TOP}V{bottom}" for t in ticks)),
        *_bars(stages, starts, x),
        Line("bar total", box(x.at(0), _top(len(stages)), x.at(total), _top(len(stages)) + ROW - 8)),
        *_measured(estimate, x, _top(len(stages) + 1) + ROW / 2 - 4),
        Line("zero", f"M{x.at(0):g} {TOP}V{bottom}"),
        Line("axis", f"M{LEFT} {bottom}H{WIDTH - RIGHT}"),
    ]
    rows = [(visible(stage.stage), _said(stage)) for stage in stages]
    rows += [("sum of the stages", seconds(total, signed=True)), ("measured difference", _difference(estimate))]
    labels = [label for number, row in enumerate(rows) for label in _labels(number, row)]
    labels += [Label(x.at(t), bottom + 18, tick_text(t, ticks, factor, f" {unit}"), "middle", "tick") for t in ticks]
    words = "Time a request by stage. " + " ".join(f"{name}: {said}." for name, said in rows)
    return Drawing(WIDTH, bottom + AXIS, words, tuple(lines), tuple(labels))


def _top(number: int) -> int:
    return TOP + ROW * number + 4


def _bars(stages: Sequence[StageCost], starts: Sequence[float], x: Scale) -> Iterator[Line]:
    for number, (stage, start) in enumerate(zip(stages, starts, strict=True)):
        top, end = _top(number), start + stage.seconds
        yield Line("bar", box(x.at(start), top, x.at(end), top + ROW - 8))
        if stage.interval is not None:
            low, high = x.at(start + stage.interval.low), x.at(start + stage.interval.high)
            middle = top + (ROW - 8) / 2
            yield Line("whisker", f"M{low:g} {middle:g}H{high:g}M{low:g} {middle - 4:g}v8M{high:g} {middle - 4:g}v8")


def _measured(estimate: Estimate, x: Scale, middle: float) -> Iterator[Line]:
    low, high = x.at(estimate.ci_low_s), x.at(estimate.ci_high_s)
    yield Line("whisker", f"M{low:g} {middle:g}H{high:g}M{low:g} {middle - 6:g}v12M{high:g} {middle - 6:g}v12")
    if math.isfinite(estimate.diff_s):
        yield Line("point", f"M{x.at(estimate.diff_s):g} {middle:g}h0")


def _labels(number: int, row: tuple[str, str]) -> Iterator[Label]:
    middle = _top(number) + ROW / 2
    yield Label(0, middle, clip(row[0], MAX_NAME))
    yield Label(WIDTH - RIGHT + 14, middle, row[1], "start", "tick")


def _said(stage: StageCost) -> str:
    said = seconds(stage.seconds, signed=True)
    return said if stage.interval is None else f"{said} ({between(stage.interval)})"


def _difference(estimate: Estimate) -> str:
    interval = between(Interval(estimate.ci_low_s, estimate.ci_high_s))
    return f"{seconds(estimate.diff_s, signed=True)} ({interval})"
