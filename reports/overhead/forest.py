"""The forest plot: each cell's relative difference with its interval, over the band that the margin leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reports.overhead.axes import WIDTH, Drawing, Label, Line, Scale, box, tick_text
from reports.overhead.results import Estimate
from reports.overhead.words import percent, relative_interval
from reports.text import clip, visible

LEFT, RIGHT, TOP, ROW, AXIS = 150, 230, 30, 38, 42
MAX_NAME = 20
_ARROW = 6


def forest(estimates: Sequence[Estimate]) -> Drawing:
    """The picture of all cells. Margins may differ between cells: each row has its own band."""
    reach = max((_reach(found) for found in estimates), default=0.01)
    scale = Scale(-reach, reach, LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * len(estimates)
    ticks = scale.ticks(6)
    lines = [Line("grid", "".join(f"M{scale.at(t):g} {TOP}V{bottom}" for t in ticks))]
    for number, found in enumerate(estimates):
        lines += _row(found, scale, TOP + ROW * number)
    zero = scale.at(0)
    lines += [Line("zero", f"M{zero:g} {TOP}V{bottom}"), Line("axis", f"M{LEFT} {bottom}H{WIDTH - RIGHT}")]
    labels = [Label(scale.at(t), bottom + 18, tick_text(t, ticks, 100, "%"), "middle", "tick") for t in ticks]
    labels.append(Label(scale.at(0), bottom + 36, "TTFT with checksums against without", "middle", "tick"))
    labels.append(
        Label(
            scale.at(0), TOP - 12, "shaded: within the margin; thin line: to the lower bound at 99%", "middle", "tick"
        )
    )
    for number, found in enumerate(estimates):
        labels += _names(found, TOP + ROW * number + ROW / 2)
    return Drawing(WIDTH, bottom + AXIS, " ".join(map(_sentence, estimates)), tuple(lines), tuple(labels))


def _reach(found: Estimate) -> float:
    outer = (found.relative_low, found.relative_high, found.relative, found.relative_strict_low)
    bounds = [abs(bound) for bound in outer if math.isfinite(bound)]
    return 1.1 * max([2 * found.margin, *bounds])


def _row(found: Estimate, scale: Scale, top: float) -> Iterator[Line]:
    yield Line("band", box(scale.at(-found.margin), top + 2, scale.at(found.margin), top + ROW - 2))
    middle, verdict = top + ROW / 2, f"v-{found.verdict.lower()}"
    low, high = scale.at(found.relative_low), scale.at(found.relative_high)
    yield Line(f"whisker {verdict}", f"M{low:g} {middle:g}H{high:g}")
    yield Line(f"whisker thin {verdict}", f"M{scale.at(found.relative_strict_low):g} {middle:g}H{low:g}")
    ends = (_end(found.relative_low, low, middle, -1), _end(found.relative_high, high, middle, 1))
    yield Line(f"whisker {verdict}", "".join(ends))
    if math.isfinite(found.relative):
        yield Line(f"point {verdict}", f"M{scale.at(found.relative):g} {middle:g}h0")


def _end(bound: float, x: float, y: float, side: int) -> str:
    """A bar, or an arrow where nothing bounds the interval."""
    if math.isfinite(bound):
        return f"M{x:g} {y - _ARROW:g}v{2 * _ARROW}"
    return f"M{x - side * _ARROW:g} {y - _ARROW:g}L{x:g} {y:g}L{x - side * _ARROW:g} {y + _ARROW:g}"


def _names(found: Estimate, middle: float) -> Iterator[Label]:
    yield Label(0, middle + 4, clip(visible(found.cell), MAX_NAME))
    at = WIDTH - RIGHT + 14
    yield Label(at, middle - 3, str(found.verdict), "start", f"strong v-{found.verdict.lower()}")
    yield Label(at, middle + 13, f"{percent(found.relative)} ({relative_interval(found)})", "start", "tick")


def _sentence(found: Estimate) -> str:
    return (
        f"{visible(found.cell)}: {percent(found.relative)}, interval {relative_interval(found)}, margin "
        f"{percent(found.margin)}, {found.verdict}."
    )
