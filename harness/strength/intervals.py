"""Exact intervals of a rate: Clopper and Pearson's, which hold for no misses at all too."""

from __future__ import annotations

from scipy.stats import beta

CONFIDENCE = 0.999


def clopper_pearson(misses: int, samples: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval that holds a rate of which `misses` of `samples` were seen, with at least this confidence."""
    if not 0 <= misses <= samples or samples < 1:
        raise ValueError(f"{misses} of {samples} is no rate")
    tail = (1 - confidence) / 2
    low = 0.0 if misses == 0 else float(beta.ppf(tail, misses, samples - misses + 1))
    high = 1.0 if misses == samples else float(beta.ppf(1 - tail, misses + 1, samples - misses))
    return low, high
