"""How often requests fail with and without checksums: exact intervals, because the counts are small and mostly 0."""

from __future__ import annotations

from collections.abc import Sequence

from scipy import stats

from harness.overhead.rows import ARM_OFF, ARM_ON, Row
from reports.overhead.results import ErrorRates, Interval

_CONFIDENCE = 0.95


def error_rates(rows: Sequence[Row]) -> ErrorRates:
    """The failures of both arms among these rows, none of which is warm-up."""
    sent = {arm: sum(row.arm == arm for row in rows) for arm in (ARM_OFF, ARM_ON)}
    failed = {arm: sum(row.arm == arm and not row.ok for row in rows) for arm in (ARM_OFF, ARM_ON)}
    # Both hold together with 95% if each does with 97.5% (Bonferroni), and then so does what lies between them.
    a, b = (rate_interval(failed[arm], sent[arm], 1 - (1 - _CONFIDENCE) / 2) for arm in (ARM_OFF, ARM_ON))
    table = [[failed[arm], sent[arm] - failed[arm]] for arm in (ARM_ON, ARM_OFF)]
    return ErrorRates(
        sent[ARM_OFF],
        sent[ARM_ON],
        failed[ARM_OFF],
        failed[ARM_ON],
        rate_interval(failed[ARM_OFF], sent[ARM_OFF]),
        rate_interval(failed[ARM_ON], sent[ARM_ON]),
        Interval(b.low - a.high, b.high - a.low),
        float(stats.fisher_exact(table, alternative="greater").pvalue),
    )


def rate_interval(count: int, of: int, confidence: float = _CONFIDENCE) -> Interval:
    """The exact (Clopper-Pearson) interval of a rate; 0 to 1 where nothing was tried."""
    if of == 0:
        return Interval(0.0, 1.0)
    found = stats.binomtest(count, of).proportion_ci(confidence, method="exact")
    return Interval(float(found.low), float(found.high))
