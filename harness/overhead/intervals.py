"""The interval of a cell's cost: 20% trimmed mean of the blocks' differences, bootstrap over blocks.

The trimmed mean, because one request that waits for the machine's other work must not decide a study. The interval is
scipy's percentile interval at a level that is expanded for few blocks (Hesterberg, What Teachers Should Know About the
Bootstrap, The American Statistician 69:4, 2015, section 5.2): without that it is too narrow, as BCa is too.
docs/overhead.md has the rates of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from harness.overhead.blocks import TRIM
from reports.overhead.results import Interval

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

ALPHA = 0.05
CONFIDENCE = 1 - 2 * ALPHA
# OVERHEAD accuses: a report has many cells, a nightly job many reports, and noise alone must hardly ever do it.
STRICT_ALPHA = 0.005
RESAMPLES = 4000
# Stands for "never" where arithmetic cannot do with infinity; a bound beyond UNBOUNDED_S is infinite.
_NEVER_S, _UNBOUNDED_S = 1e12, 1e6


def cut_of(count: int) -> int:
    """How many of `count` values the trimmed mean leaves out at either end."""
    return int(TRIM * count)


def expanded_level(count: int, alpha: float = ALPHA) -> float:
    """The level of a percentile interval over `count` blocks that misses on either side with probability `alpha`.

    The percentile interval uses the normal quantile where Student's is due, and a variance over n where n - 1 is due.
    n is the number of blocks that the trimmed mean keeps.
    """
    kept = count - 2 * cut_of(count)
    return float(1 - 2 * stats.norm.sf(stats.t.isf(alpha, kept - 1) * math.sqrt(kept / (kept - 1))))


def location(values: Array, axis: int = -1) -> Array:
    """The trimmed mean along an axis."""
    found: Array = stats.trim_mean(values, TRIM, axis=axis)
    return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """A trimmed mean, its interval, and the lower bound of the interval that misses with `STRICT_ALPHA` on a side."""

    middle: float
    interval: Interval
    strict_low: float


def location_bounds(differences: Sequence[float], seed: int = 0) -> Bounds:
    """The trimmed mean of the blocks' differences (seconds, infinite ones allowed) and its bounds.

    They depend on the values and not on their order. With fewer than two blocks nothing is bounded; with none the mean
    is nan.
    """
    if not len(differences):
        return Bounds(math.nan, Interval(-math.inf, math.inf), -math.inf)
    values = np.sort(np.clip(np.asarray(differences, np.float64), -_NEVER_S, _NEVER_S))
    middle = _bound(float(location(values)))
    if values.size < 2:
        return Bounds(middle, Interval(-math.inf, math.inf), -math.inf)
    found = stats.bootstrap(
        (values,),
        location,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=expanded_level(values.size),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    strict = stats.bootstrap(
        (values,),
        location,
        vectorized=True,
        n_resamples=0,
        confidence_level=expanded_level(values.size, STRICT_ALPHA),
        method="percentile",
        bootstrap_result=found,
    )
    low, high = (_bound(float(bound)) for bound in found.confidence_interval)
    return Bounds(middle, Interval(low, high), _bound(float(strict.confidence_interval.low)))


def _bound(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > _UNBOUNDED_S else value


def p95_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], seed: int = 0) -> Interval | None:
    """The interval of p95(B) - p95(A), both over all requests: percentile bootstrap over blocks.

    Args:
        a, b: of each block the times of either arm, seconds; infinite for a failed request.

    Returns:
        None with fewer than two blocks, or where more than one resample in a hundred has no finite difference.
    """
    if len(a) < 2:
        return None
    rng = np.random.default_rng(seed)
    padded = _padded(a), _padded(b)
    found = []
    for picked in rng.integers(0, len(a), (RESAMPLES // 4, len(a))):
        p95_a, p95_b = (p95(arm[picked].ravel()) for arm in padded)
        if p95_a is not None and p95_b is not None:
            found.append(p95_b - p95_a)
    if len(found) < 0.99 * (RESAMPLES // 4):
        return None
    low, high = np.quantile(found, [ALPHA, 1 - ALPHA])
    return Interval(float(low), float(high))


def p95(times: Array) -> float | None:
    """The 95th percentile of the times that are not nan; None if that is a request that failed."""
    known = np.sort(times[~np.isnan(times)])
    if not known.size:
        return None
    # The order statistic, not an interpolation: between a time and never there is nothing.
    found = float(known[max(0, math.ceil(0.95 * known.size) - 1)])
    return found if math.isfinite(found) else None


def _padded(blocks: Sequence[Sequence[float]]) -> Array:
    """One row a block, filled up with nan."""
    padded = np.full((len(blocks), max(map(len, blocks))), np.nan)
    for row, times in zip(padded, blocks, strict=True):
        row[: len(times)] = times
    return padded
