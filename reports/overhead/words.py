"""Figures of an overhead study as a person reads them: times with a unit that fits, shares in percent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reports.overhead.results import Estimate, Interval, Left, OverheadVerdict
from reports.text import counted, listed

VERDICT_MARKS = {
    OverheadVerdict.EQUIVALENT: "✓",
    OverheadVerdict.OVERHEAD: "✗",
    OverheadVerdict.INCONCLUSIVE: "?",
}


def seconds(value: float | None, signed: bool = False) -> str:
    """`1.23 s`, `45.6 ms`, `7.89 µs`; `unbounded` for an infinite time, `unknown` where there is none."""
    if value is None or math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "unbounded"
    size = abs(value)
    scale, unit = (1.0, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 or size == 0 else (1e6, "µs")
    return f"{_three(value * scale, signed)} {unit}"


def percent(value: float) -> str:
    """A relative difference with its sign: `+0.42%`."""
    if math.isnan(value):
        return "unknown"
    return f"{value:+.2%}" if math.isfinite(value) else "unbounded"


def rate(count: int, of: int) -> str:
    """`3 of 1000 (0.3%)`."""
    return f"{count} of {of} ({count / of:.1%})" if of else "none of 0"


def between(interval: Interval | None, unit: str = "s") -> str:
    """An interval of a difference: `-1.2 ms to +3.4 ms`."""
    if interval is None:
        return "unknown"
    return f"{amount(interval.low, unit, signed=True)} to {amount(interval.high, unit, signed=True)}"


def amount(value: float | None, unit: str, signed: bool = False) -> str:
    """A figure in its unit."""
    if unit == "s" or value is None or not math.isfinite(value):
        return seconds(value, signed)
    return f"{_three(value, signed)} {unit}"


def relative_interval(estimate: Estimate) -> str:
    """`+0.1% to +0.9%`."""
    return f"{percent(estimate.relative_low)} to {percent(estimate.relative_high)}"


def _three(value: float, signed: bool) -> str:
    """Three digits that mean something, never in powers of ten."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:{'+' if signed else ''}.{digits}f}"


def share_interval(interval: Interval) -> str:
    """An interval of a share: `0.0% to 0.9%`."""
    return f"{interval.low:.1%} to {interval.high:.1%}"


def sentence_of(estimates: Sequence[Estimate]) -> str:
    """What a study comes to."""
    if not estimates:
        return "No cell was judged."
    counts = [(verdict, sum(found.verdict is verdict for found in estimates)) for verdict in OverheadVerdict]
    said = listed([f"{count} {verdict}" for verdict, count in counts if count])
    return f"{counted(len(estimates), 'cell')}: {said}."


def left_out(left: Left) -> tuple[str, ...]:
    """What is in the rows and not in the difference, in sentences; always something."""
    said = [f"{counted(left.warmup_rows, 'row')} of warm-up dropped."]
    if left.one_sided_prompts:
        said.append(
            f"{counted(left.one_sided_prompts, 'prompt')} of a block failed more often in one arm: counted as beyond "
            "every other difference, on the side of that arm."
        )
    if left.failed_prompts:
        said.append(
            f"{counted(left.failed_prompts, 'prompt')} of a block failed equally often in both arms: no difference."
        )
    if left.unfinished_prompts:
        said.append(f"{counted(left.unfinished_prompts, 'prompt')} of a block not sent in all four slots: left out.")
    if left.empty_blocks:
        said.append(f"{counted(left.empty_blocks, 'block')} without any difference.")
    return tuple(said)
