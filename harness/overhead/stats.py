"""What checksums cost one cell, with an interval, and whether that is within the margin. docs/overhead.md says why so.

The verdict is read off intervals of the relative difference:

- EQUIVALENT: the 90% interval lies inside -margin to +margin, which is two one-sided tests at 5% each. The cost is
  below the margin, and nothing else is odd either: an arm with checksums that is faster by more than the margin means
  that something other than checksums differs.
- OVERHEAD: the 99% interval lies above +margin, which is a one-sided test at 0.5%. A cost that is seen but that is
  within the margin is not OVERHEAD.
- INCONCLUSIVE: anything else, also an interval that is too wide to say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from harness.overhead.blocks import Paired, StatisticsError, differences, pair
from harness.overhead.error_rates import error_rates
from harness.overhead.intervals import CONFIDENCE, location, location_bounds, p95, p95_difference
from harness.overhead.rows import ARM_OFF, ARM_ON, Row
from reports.overhead.results import (
    PRECISE_WIDTH,
    Difference,
    ErrorRates,
    Estimate,
    Interval,
    OverheadVerdict,
)

__all__ = [
    "MIN_BLOCKS",
    "Estimate",
    "OverheadVerdict",
    "StatisticsError",
    "cells_of",
    "decide",
    "estimate",
    "is_precise",
]

DEFAULT_MARGIN = 0.01
# Fewer differences than this are no basis for a verdict: the smallest number that was calibrated.
MIN_BLOCKS = 8
# Below this, more requests fail with checksums than without, and times of the others alone are no basis for EQUIVALENT.
ERRORS_DIFFER_P = 0.05


def cells_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """The cells that have a row which is not warm-up, in the order in which they first occur."""
    return tuple(dict.fromkeys(row.cell for row in rows if not row.warmup))


def estimate(rows: Iterable[Row], cell: str, margin: float = DEFAULT_MARGIN, seed: int = 0) -> Estimate:
    """What the rows say of one cell. The same rows, in any order, give the same estimate.

    Args:
        margin: relative to the median TTFT of arm A, fixed before the study.
        seed: of the bootstrap.

    Raises:
        StatisticsError: the cell has no row, none of arm A was answered, or the rows are no ABBA blocks.
    """
    paired = pair(rows, cell)
    judged = [block.difference_s for block in paired.judged]
    median_a, median_b = _median_of(paired, ARM_OFF), _median_of(paired, ARM_ON)
    if not median_a > 0:
        raise StatisticsError(f"cell {cell}: no request of arm A was answered: there is nothing to compare with")
    bounds = location_bounds(judged, seed)
    relative = Interval(bounds.interval.low / median_a, bounds.interval.high / median_a)
    strict_low = bounds.strict_low / median_a
    rates = error_rates(paired.rows)
    verdict, why = decide(relative, strict_low, margin, len(judged), rates)
    width = relative.width / margin
    return Estimate(
        cell=cell,
        blocks=len(judged),
        requests_a=rates.requests_a,
        requests_b=rates.requests_b,
        errors_a=rates.errors_a,
        errors_b=rates.errors_b,
        confidence=CONFIDENCE,
        median_a_s=median_a,
        median_b_s=median_b,
        diff_s=bounds.middle,
        ci_low_s=bounds.interval.low,
        ci_high_s=bounds.interval.high,
        relative=bounds.middle / median_a,
        relative_low=relative.low,
        relative_high=relative.high,
        relative_strict_low=strict_low,
        margin=margin,
        width_to_margin=width,
        blocks_needed=_blocks_needed(len(judged), width),
        verdict=verdict,
        why=why,
        p95=_p95(paired, seed),
        secondary=_secondary(paired.rows, seed),
        error_rates=rates,
        left=paired.left,
    )


def is_precise(rows: Iterable[Row], cell: str, margin: float = DEFAULT_MARGIN) -> bool:
    """Whether a study may stop: `MIN_BLOCKS` or more, and the interval no wider than half the margin.

    It looks at the width only, never at where the interval lies. As `estimate`, but quick enough for after each block.

    Raises:
        StatisticsError: as `estimate` does.
    """
    paired = pair(rows, cell)
    judged = [block.difference_s for block in paired.judged]
    if len(judged) < MIN_BLOCKS:
        return False
    width = location_bounds(judged).interval.width
    return width / _median_of(paired, ARM_OFF) <= PRECISE_WIDTH * margin


def decide(
    relative: Interval, strict_low: float, margin: float, blocks: int, rates: ErrorRates
) -> tuple[OverheadVerdict, str]:
    """The verdict on the 90% interval of the relative difference and the lower bound of the 99% one, and why.

    Raises:
        StatisticsError: the margin is not positive.
    """
    if not margin > 0:
        raise StatisticsError(f"a margin of {margin}: use a share of the median above 0, such as 0.01")
    if blocks < MIN_BLOCKS:
        return OverheadVerdict.INCONCLUSIVE, f"{blocks} blocks with a difference: a verdict takes {MIN_BLOCKS} or more."
    limit = f"{margin * 100:.3g}% of the median without checksums"
    failed = ""
    if more_fail := rates.more_in_b_p < ERRORS_DIFFER_P:
        failed = (
            f" {rates.errors_b} of {rates.requests_b} requests failed with checksums and {rates.errors_a} of "
            f"{rates.requests_a} without (Fisher's exact p {rates.more_in_b_p:.2g}): that is a cost too."
        )
    if strict_low > margin:
        return OverheadVerdict.OVERHEAD, f"The whole interval, also that at 99%, lies above {limit}.{failed}"
    if not (-margin < relative.low and relative.high < margin):
        return OverheadVerdict.INCONCLUSIVE, _undecided(relative, margin) + failed
    if more_fail:
        return OverheadVerdict.INCONCLUSIVE, f"Of the answered requests the interval lies within {limit}.{failed}"
    return OverheadVerdict.EQUIVALENT, f"The whole interval lies within {limit}, on either side of none."


def _undecided(relative: Interval, margin: float) -> str:
    if relative.low > margin:
        return "The 90% interval lies above the margin, but the 99% one does not: more blocks would tell."
    if relative.high < -margin:
        return "The arm with checksums is faster by more than the margin: something else differs between the arms."
    if relative.width > 2 * margin:
        return "The interval is wider than the margin is on both sides: more blocks, or a quieter machine, would help."
    if relative.low <= -margin:
        return "The interval reaches below the margin on the side of a gain: more blocks would help."
    return "The margin lies inside the interval: the cost may be a little below it or a little above it."


def _blocks_needed(blocks: int, width: float) -> int | None:
    """The width falls with the square root of the number of blocks."""
    if blocks < MIN_BLOCKS or not math.isfinite(width):
        return None
    return max(MIN_BLOCKS, math.ceil(blocks * (width / PRECISE_WIDTH) ** 2))


def _median_of(paired: Paired, arm: str) -> float:
    times = [row.ttft_s for row in paired.rows if row.arm == arm and row.ok and row.ttft_s is not None]
    return float(np.median(times)) if times else math.nan


def _p95(paired: Paired, seed: int) -> Difference:
    a = [block.ttft_a_s for block in paired.blocks]
    b = [block.ttft_b_s for block in paired.blocks]
    p95_a, p95_b = (p95(np.array([t for times in arm for t in times])) for arm in (a, b))
    known = p95_a is not None and p95_b is not None
    difference = p95_b - p95_a if p95_a is not None and p95_b is not None else None
    return Difference("p95 TTFT", "s", p95_a, p95_b, difference, p95_difference(a, b, seed) if known else None)


def _secondary(rows: Sequence[Row], seed: int) -> tuple[Difference, ...]:
    """Figures beside TTFT, over the prompts that were answered in all four slots. No verdict is taken on them."""
    itl = differences(rows, lambda row: row.itl_s if row.ok else None)
    whole = differences(rows, lambda row: row.end_s - row.intended_s if row.ok else None)
    return (
        _compared("inter-token latency", "s", itl, seed),
        _compared("end to end", "s", whole, seed),
        _compared("throughput", "tokens/s", _throughputs(rows), seed),
    )


def _compared(name: str, unit: str, found: Sequence[tuple[float, float]], seed: int) -> Difference:
    if len(found) < 2:
        return Difference(name, unit, None, None, None, None)
    a, change = np.array(found).T
    bounds = location_bounds(list(change), seed)
    return Difference(name, unit, float(location(a)), float(location(a + change)), bounds.middle, bounds.interval)


def _throughputs(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(A, B - A) of each block that was sent in full: output tokens of a slot by the time from its start to its end."""
    slots: dict[int, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        slots[row.block][row.slot].append(row)
    found = []
    for block in slots.values():
        if len({len(slot) for slot in block.values()}) > 1:  # interrupted: the load of its last slot was another
            continue
        arms: dict[str, list[float]] = {ARM_OFF: [], ARM_ON: []}
        for slot in block.values():
            took = max(row.end_s for row in slot) - min(row.intended_s for row in slot)
            arms[slot[0].arm].append(sum(row.output_tokens for row in slot if row.ok) / took if took > 0 else math.nan)
        a, b = (np.array(arms[arm]) for arm in (ARM_OFF, ARM_ON))
        if a.size == b.size == 2 and np.isfinite([*a, *b]).all():
            found.append((float(a.mean()), float(b.mean() - a.mean())))
    return found
