"""A study by hand: one cell of each verdict, with failures, an unbounded interval and hostile names."""

from __future__ import annotations

import math

import pytest

from reports.overhead.results import (
    CalibratedRate,
    CellReport,
    Difference,
    ErrorRates,
    Estimate,
    Interval,
    Left,
    OverheadVerdict,
    Sample,
    StageCost,
    StudyReport,
)

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(2)>\"'>|`\x1b[31m\u202e"


def an_estimate(cell: str, verdict: OverheadVerdict, low: float, high: float, **changes) -> Estimate:
    """Of a median of 0.2 s and a margin of 1%."""
    middle = (low + high) / 2
    values = {
        "cell": cell,
        "blocks": 40,
        "requests_a": 80,
        "requests_b": 80,
        "errors_a": 0,
        "errors_b": 2,
        "confidence": 0.9,
        "median_a_s": 0.2,
        "median_b_s": 0.201,
        "diff_s": 0.2 * middle,
        "ci_low_s": 0.2 * low,
        "ci_high_s": 0.2 * high,
        "relative": middle,
        "relative_low": low,
        "relative_high": high,
        "relative_strict_low": low - 0.001,
        "margin": 0.01,
        "width_to_margin": (high - low) / 0.01,
        "blocks_needed": 123,
        "verdict": verdict,
        "why": "Because.",
        "p95": Difference("p95 TTFT", "s", 0.3, 0.31, 0.01, Interval(-0.002, 0.02)),
        "secondary": (Difference("throughput", "tokens/s", 13.8, None, None, None),),
        "error_rates": ErrorRates(80, 80, 0, 2, Interval(0, 0.045), Interval(0.003, 0.087), Interval(-0.05, 0.1), 0.25),
        "left": Left(4, 1, 0, 2, 1),
    }
    return Estimate(**{**values, **changes})


def a_cell(estimate: Estimate, stages=()) -> CellReport:
    times = tuple(0.2 + 0.001 * ((7 * n) % 20) for n in range(80))
    at = tuple(float(n) for n in range(80))
    a, b = Sample("checksums off", at, times), Sample("checksums on", at[2:], times[2:], (7.0, 9.0))
    return CellReport(estimate, a, b, tuple(stages), "The stages add up to 1.1 ms a request." if stages else "")


def a_study() -> StudyReport:
    """The whole study."""
    equivalent, overhead, inconclusive = OverheadVerdict
    stages = (StageCost("producer: sum", 0.0006, Interval(0.0005, 0.0007)), StageCost("compare", 0.0005))
    rate = CalibratedRate("no cost, called OVERHEAD", 3, 1000, Interval(0.0006, 0.0087), "8 blocks")
    return StudyReport(
        f"overhead {HOSTILE}",
        (("margin", "1%"), ("model", HOSTILE)),
        (
            a_cell(an_estimate("1000tok-low", equivalent, -0.002, 0.002), stages),
            a_cell(an_estimate("8000tok-low", overhead, 0.02, 0.03)),
            a_cell(an_estimate(f"x {HOSTILE}", inconclusive, -0.01, math.inf, blocks_needed=None)),
        ),
        (rate,),
        (f"A note {HOSTILE}",),
    )


@pytest.fixture
def study() -> StudyReport:
    return a_study()


@pytest.fixture
def make():
    """`make.estimate(cell, verdict, low, high)` and `make.cell(estimate, stages)`."""
    return type("Make", (), {"estimate": staticmethod(an_estimate), "cell": staticmethod(a_cell)})
