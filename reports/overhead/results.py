"""What an overhead study found, as data. The harness fills this in; the page, the summary and the JSON only show it.

Times are seconds, shares and relative differences are fractions (0.01 is 1%). A bound of an interval may be infinite:
where too many requests failed, nothing limits what the arm costs. In JSON an infinite bound is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class OverheadVerdict(StrEnum):
    """What the interval of the relative difference says against a margin that was fixed beforehand."""

    EQUIVALENT = "EQUIVALENT"
    OVERHEAD = "OVERHEAD"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval; the confidence level is that of the estimate it belongs to."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of both arms and their difference, B - A, over the same blocks. It carries no verdict.

    `unit` is "s" or "tokens/s". A figure is None where it does not exist: too few blocks, or a p95 with more than 5%
    of the requests failed.
    """

    name: str
    unit: str
    a: float | None
    b: float | None
    difference: float | None
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class ErrorRates:
    """Failed requests of both arms, in requests that were not warm-up.

    `a` and `b` are exact (Clopper-Pearson) 95% intervals of the rates. `difference` holds the true difference, B - A,
    with at least 95%: it spans the two exact 97.5% intervals. `more_in_b_p` is Fisher's exact one-sided p value of "B
    fails no more often than A".
    """

    requests_a: int
    requests_b: int
    errors_a: int
    errors_b: int
    a: Interval
    b: Interval
    difference: Interval
    more_in_b_p: float


@dataclass(frozen=True, slots=True)
class Left:
    """What is in the rows and not in the difference, so that nothing is left out in silence.

    Attributes:
        warmup_rows: rows marked as warm-up.
        unfinished_prompts: prompts of a block whose four slots were not all sent (the study ended there).
        failed_prompts: prompts of a block that failed equally often in both arms: they say nothing of the difference.
        one_sided_prompts: prompts that failed more often in one arm. They are not left out: their difference counts as
            beyond every other, on the side of the arm that failed more.
        empty_blocks: blocks without any difference.
    """

    warmup_rows: int
    unfinished_prompts: int
    failed_prompts: int
    one_sided_prompts: int
    empty_blocks: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of one cell: TTFT of arm B (checksums) less that of arm A (none), and what that says.

    Attributes:
        cell: prompt length and load level.
        blocks: blocks with a difference.
        confidence: of every interval but those of the error rates, 0.9: each bound is a one-sided test at 5%.
        median_a_s, median_b_s: of the answered requests of each arm.
        diff_s, ci_low_s, ci_high_s: 20% trimmed mean of the blocks' paired differences, and its interval.
        relative, relative_low, relative_high: the same, divided by `median_a_s`. The verdict is about these.
        relative_strict_low: lower bound of the 99% interval, which OVERHEAD takes.
        margin: relative, fixed beforehand.
        width_to_margin: relative_high - relative_low in margins. A study may stop when it is 0.5 or less.
        blocks_needed: how many blocks would bring `width_to_margin` to 0.5 if the noise stays what it is; None if
            the rows do not say.
        why: the verdict in words.
    """

    cell: str
    blocks: int
    requests_a: int
    requests_b: int
    errors_a: int
    errors_b: int
    confidence: float
    median_a_s: float
    median_b_s: float
    diff_s: float
    ci_low_s: float
    ci_high_s: float
    relative: float
    relative_low: float
    relative_high: float
    relative_strict_low: float
    margin: float
    width_to_margin: float
    blocks_needed: int | None
    verdict: OverheadVerdict
    why: str
    p95: Difference
    secondary: tuple[Difference, ...]
    error_rates: ErrorRates
    left: Left

    @property
    def precise(self) -> bool:
        """The interval is narrower than half the margin: more blocks would not be asked for."""
        return self.width_to_margin <= PRECISE_WIDTH


PRECISE_WIDTH = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """The requests of an arm of a cell: `at_s` when each was to be sent, `ttft_s` of the answered ones, in its order.

    `failed_at_s` are the times at which those that failed were to be sent.
    """

    label: str
    at_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    failed_at_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage of the checksums takes, in seconds a request. Stages are in the order of a request's life."""

    stage: str
    seconds: float
    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class CellReport:
    """All that the report says of one cell. `stages` is empty where nobody measured; `stages_said` sums them up."""

    estimate: Estimate
    a: Sample
    b: Sample
    stages: tuple[StageCost, ...] = ()
    stages_said: str = ""


@dataclass(frozen=True, slots=True)
class CalibratedRate:
    """How often simulated studies came to a verdict that is wrong, and the worst case in which they did.

    `interval` is the exact 95% interval of the rate.
    """

    what: str
    count: int
    sets: int
    interval: Interval
    case: str


@dataclass(frozen=True, slots=True)
class StudyReport:
    """The whole study. `facts` are label and value, in the order in which they are shown."""

    name: str
    facts: tuple[tuple[str, str], ...]
    cells: tuple[CellReport, ...]
    calibration: tuple[CalibratedRate, ...] = ()
    notes: tuple[str, ...] = ()


def finite(value: object) -> object:
    """`value`, a JSON value, with null for each number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
