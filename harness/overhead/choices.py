"""What other estimators and intervals would have done on the same synthetic A/A studies: why ours are what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from harness.overhead.blocks import TRIM
from harness.overhead.calibrate import SETS, Noise, draw
from harness.overhead.intervals import CONFIDENCE, Array, expanded_level

BLOCKS = (8, 16, 64)
_RESAMPLES = 1000
_BATCH = 2_000_000  # values of a batch of resamples: memory, nothing else

Location = Callable[..., Array]


def _mean(values: Array, axis: int = -1) -> Array:
    found: Array = np.mean(values, axis=axis)
    return found


def _trimmed(values: Array, axis: int = -1) -> Array:
    found: Array = stats.trim_mean(values, TRIM, axis=axis)
    return found


def _median(values: Array, axis: int = -1) -> Array:
    found: Array = np.median(values, axis=axis)
    return found


LOCATIONS: dict[str, Location] = {"mean": _mean, "20% trimmed mean": _trimmed, "median": _median}
METHODS = ("percentile", "BCa", "expanded percentile")


@dataclass(frozen=True, slots=True)
class Choice:
    """One estimator with one interval on `sets` synthetic A/A studies of `blocks` blocks; the true cost is 0.

    `too_low` counts the studies whose upper bound lies below 0, `too_high` those whose lower bound lies above it: 5%
    of each are due. `width` is the median width of the interval, relative to the median TTFT.
    """

    cell: str
    location: str
    method: str
    blocks: int
    sets: int
    too_low: int
    too_high: int
    width: float


def choices(noise: Noise, sets: int = SETS, seed: int = 0) -> list[Choice]:
    """Every estimator with every interval, on the same studies; not BCa of a median, whose jackknife is degenerate."""
    found = []
    for blocks in BLOCKS:
        differences, _ = draw(noise, sets, blocks, np.random.default_rng(seed))
        for name in LOCATIONS:
            methods = [method for method in METHODS if (name, method) != ("median", "BCa")]
            found += [_choice(noise.cell, name, method, differences) for method in methods]
    return found


def _choice(cell: str, name: str, method: str, differences: Array) -> Choice:
    sets, blocks = differences.shape
    level = expanded_level(blocks) if method == "expanded percentile" else CONFIDENCE
    found = stats.bootstrap(
        (differences,),
        LOCATIONS[name],
        vectorized=True,
        axis=-1,
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH // differences.size),
        confidence_level=level,
        method="BCa" if method == "BCa" else "percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Choice(
        cell,
        name,
        method,
        blocks,
        sets,
        int(np.sum(found.high < 0)),
        int(np.sum(found.low > 0)),
        float(np.median(found.high - found.low)),
    )
