"""The estimate, its interval and its verdict, on studies whose truth is known and at the edges of the rule."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from harness.overhead.error_rates import error_rates
from harness.overhead.intervals import RESAMPLES, expanded_level, location_bounds, p95, p95_difference
from harness.overhead.stats import (
    MIN_BLOCKS,
    OverheadVerdict,
    StatisticsError,
    cells_of,
    decide,
    estimate,
    is_precise,
)
from reports.overhead.results import Interval

EQUIVALENT, OVERHEAD, INCONCLUSIVE = OverheadVerdict


@pytest.fixture
def no_errors(synthetic):
    return error_rates(synthetic.study(8))


def test_the_interval_is_that_of_a_bootstrap_by_hand():
    values = np.random.default_rng(5).normal(1, 2, 23)
    bounds = location_bounds(list(values), seed=3)
    middle, interval = bounds.middle, bounds.interval
    resamples = np.random.default_rng(11).integers(0, 23, (20_000, 23))
    by_hand = [np.sort(values[picked])[4:-4].mean() for picked in resamples]
    student = stats.t.ppf(0.95, 23 - 8 - 1) * math.sqrt(15 / 14)
    low, high = np.quantile(by_hand, [stats.norm.cdf(-student), stats.norm.cdf(student)])
    assert middle == pytest.approx(np.sort(values)[4:-4].mean())
    # A bound is a quantile of 4000 resamples: the difference of two such is far below a tenth of the width.
    assert interval.low == pytest.approx(low, abs=0.1 * (high - low))
    assert interval.high == pytest.approx(high, abs=0.1 * (high - low))


def test_the_level_approaches_the_nominal_one():
    levels = [expanded_level(n) for n in (8, 16, 64, 10_000)]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == pytest.approx(0.9, abs=1e-4)
    assert levels[0] > 0.95


@pytest.mark.parametrize("blocks", [8, 24])
def test_each_bound_misses_the_truth_as_often_as_it_says(blocks):
    """500 studies of known truth. 5% are due on either side; the limits are the 1-in-a-million ones of a binomial."""
    rng = np.random.default_rng(blocks)
    found = [location_bounds(list(rng.standard_t(4, blocks) + 7.0)).interval for _ in range(500)]
    most = stats.binom.isf(1e-6, 500, 0.06)
    assert sum(interval.high < 7 for interval in found) <= most
    assert sum(interval.low > 7 for interval in found) <= most
    # Nor are they so wide that they say nothing: with a true level of 99.8% this would be below 4.
    assert sum(not interval.low <= 7 <= interval.high for interval in found) >= stats.binom.ppf(1e-6, 500, 0.04)


def test_a_known_cost_is_found(synthetic):
    found = estimate(synthetic.study(60, noise=0.002, cost=0.01), synthetic.CELL)
    assert found.diff_s == pytest.approx(0.01, abs=0.001)
    assert found.ci_low_s < 0.01 < found.ci_high_s
    assert found.relative == pytest.approx(found.diff_s / found.median_a_s)
    assert found.median_b_s - found.median_a_s == pytest.approx(0.01, abs=0.002)
    assert found.verdict is OVERHEAD
    assert (found.blocks, found.requests_a, found.errors_b, found.confidence) == (60, 120, 0, pytest.approx(0.9))


def test_no_cost_is_equivalent_with_enough_blocks(synthetic):
    found = estimate(synthetic.study(60, noise=0.0005), synthetic.CELL)
    assert found.verdict is EQUIVALENT
    assert found.precise
    assert found.width_to_margin == pytest.approx((found.relative_high - found.relative_low) / 0.01)


def test_drift_cancels_and_would_not_in_another_order(synthetic):
    drifting = synthetic.study(40, noise=0.0002, level=lambda at: 0.1 + 0.01 * at)
    assert abs(estimate(drifting, synthetic.CELL).diff_s) < 0.0005
    in_order = [replace(row, arm="AABB"[row.slot]) for row in drifting]
    a, b = ([row.ttft_s for row in in_order if row.arm == arm] for arm in "AB")
    assert np.mean(b) - np.mean(a) > 0.015


def test_rows_in_another_order_give_the_same_estimate(synthetic):
    rows = synthetic.study(20)
    assert estimate(rows[::-1], synthetic.CELL) == estimate(rows, synthetic.CELL)


@pytest.mark.parametrize("slot", range(4))
def test_one_spike_does_not_change_the_verdict(synthetic, slot):
    rows = synthetic.study(40, noise=0.0005)
    spiked = [replace(r, ttft_s=30.0) if (r.block, r.slot) == (7, slot) else r for r in rows]
    before, after = (estimate(each, synthetic.CELL) for each in (rows, spiked))
    assert before.verdict is after.verdict is EQUIVALENT
    assert after.diff_s == pytest.approx(before.diff_s, abs=0.0002)


@pytest.mark.parametrize(
    ("low", "high", "strict_low", "verdict"),
    [
        (-0.009, 0.009, -0.02, EQUIVALENT),
        (0.001, 0.0099, 0.0005, EQUIVALENT),  # A cost that is seen, and within the margin.
        (-0.01, 0.009, -0.02, INCONCLUSIVE),
        (-0.009, 0.01, -0.02, INCONCLUSIVE),
        (0.0101, 0.02, 0.01, INCONCLUSIVE),
        (0.0105, 0.02, 0.0101, OVERHEAD),
        (-0.05, 0.05, -0.1, INCONCLUSIVE),
        (-0.05, -0.02, -0.06, INCONCLUSIVE),  # Faster by more than the margin: something else differs.
        (-math.inf, math.inf, -math.inf, INCONCLUSIVE),
        (0.03, math.inf, 0.02, OVERHEAD),
    ],
)
def test_the_rule_at_its_edges(no_errors, low, high, strict_low, verdict):
    assert decide(Interval(low, high), strict_low, 0.01, MIN_BLOCKS, no_errors)[0] is verdict


def test_few_blocks_never_get_a_verdict(no_errors):
    for interval in (Interval(-0.001, 0.001), Interval(0.5, 0.6)):
        verdict, why = decide(interval, interval.low, 0.01, MIN_BLOCKS - 1, no_errors)
        assert verdict is INCONCLUSIVE
        assert "7 blocks" in why
    with pytest.raises(StatisticsError, match="margin of 0"):
        decide(Interval(0, 0), 0, 0, 20, no_errors)


def test_one_block_and_none(synthetic):
    one = estimate(synthetic.study(1), synthetic.CELL)
    assert (one.blocks, one.verdict, one.blocks_needed) == (1, INCONCLUSIVE, None)
    assert (one.ci_low_s, one.ci_high_s) == (-math.inf, math.inf)
    assert one.p95.interval is None
    none = estimate(synthetic.block_of(0, [0.1, 0.1, 0.1, 0.1])[:3], synthetic.CELL)
    assert (none.blocks, none.verdict) == (0, INCONCLUSIVE)
    assert math.isnan(none.diff_s)
    with pytest.raises(StatisticsError, match="no row of cell 'x'"):
        estimate(synthetic.study(1), "x")
    with pytest.raises(StatisticsError, match="no request of arm A was answered"):
        estimate(synthetic.block_of(0, [None] * 4), synthetic.CELL)


def test_failed_requests_stay_in_the_denominator(synthetic):
    rows = synthetic.study(40, noise=0.0005)
    failed = {(block, slot) for block, slot in [(3, 0), (9, 1)]}  # Odd blocks: B A A B.
    broken = [synthetic.row(r.block, r.slot, r.arm, None) if (r.block, r.slot) in failed else r for r in rows]
    found = estimate(broken, synthetic.CELL)
    assert (found.requests_a, found.errors_a, found.requests_b, found.errors_b) == (80, 1, 80, 1)
    assert (found.blocks, found.left.one_sided_prompts) == (40, 2)
    exact = stats.beta.ppf([0.025, 0.975], [1, 2], [80, 79])  # Clopper-Pearson, from its definition
    assert (found.error_rates.a.low, found.error_rates.a.high) == pytest.approx(tuple(exact))
    assert found.error_rates.difference.low < 0 < found.error_rates.difference.high
    assert found.verdict is EQUIVALENT


def test_an_arm_that_fails_more_is_never_equivalent(synthetic):
    rows = [
        synthetic.row(r.block, r.slot, "B", None)
        if r.arm == "B" and r.block in (0, 20, 40, 60, 80) and r.slot < 2
        else r
        for r in synthetic.study(100, noise=0.0005)
    ]
    found = estimate(rows, synthetic.CELL)
    assert (found.errors_a, found.errors_b) == (0, 5)
    assert found.error_rates.more_in_b_p == pytest.approx(stats.hypergeom.sf(4, 400, 5, 200))
    assert found.relative_high < found.margin
    assert found.verdict is INCONCLUSIVE
    assert "5 of 200 requests failed with checksums and 0 of 200 without (Fisher" in found.why


@pytest.mark.parametrize(("arm", "sign", "verdict"), [("B", 1, OVERHEAD), ("A", -1, INCONCLUSIVE)])
def test_many_failures_of_one_arm_leave_the_cost_unbounded(synthetic, arm, sign, verdict):
    rows = [
        synthetic.row(r.block, r.slot, arm, None) if r.arm == arm and r.block < 20 else r
        for r in synthetic.study(40, noise=0.0005)
    ]
    found = estimate(rows, synthetic.CELL)
    assert found.ci_low_s == found.diff_s == found.ci_high_s == sign * math.inf
    assert found.verdict is verdict
    assert found.p95.difference is None


def test_a_share_of_failures_that_could_be_large_leaves_one_side_open(synthetic):
    """6 of 40 blocks are cut by the trimmed mean, but a resample may well hold more of them than it cuts."""
    rows = [
        synthetic.row(r.block, r.slot, "B", None) if r.arm == "B" and r.block < 6 else r
        for r in synthetic.study(40, noise=0.0005)
    ]
    found = estimate(rows, synthetic.CELL)
    assert math.isfinite(found.diff_s)
    assert math.isfinite(found.ci_low_s)
    assert found.ci_high_s == math.inf
    assert (found.verdict, found.width_to_margin, found.blocks_needed) == (INCONCLUSIVE, math.inf, None)


def test_is_precise_agrees_with_the_estimate(synthetic):
    for noise in (0.0002, 0.0005, 0.001, 0.002, 0.01):
        rows = synthetic.study(30, noise=noise, cost=0.005)
        assert is_precise(rows, synthetic.CELL) is estimate(rows, synthetic.CELL).precise
    assert not is_precise(synthetic.study(MIN_BLOCKS - 1, noise=1e-9), synthetic.CELL)
    assert is_precise(synthetic.study(MIN_BLOCKS, noise=1e-9), synthetic.CELL)


def test_blocks_needed_follow_the_root_of_n(synthetic):
    found = estimate(synthetic.study(50, noise=0.005), synthetic.CELL)
    assert found.blocks_needed == pytest.approx(50 * (found.width_to_margin / 0.5) ** 2, abs=1)


def test_p95_counts_failures_as_the_slowest():
    times = np.arange(1, 21, dtype=float)
    assert p95(times) == 19
    times[-1] = math.inf
    assert p95(times) == 19
    times[-2] = math.inf
    assert p95(times) is None
    assert p95(np.array([])) is None


def test_the_p95_interval_holds_a_known_shift():
    rng = np.random.default_rng(2)
    a = rng.exponential(1, (200, 2))
    interval = p95_difference([tuple(r) for r in a], [tuple(r) for r in a + 3])
    assert interval is not None
    assert interval.low == pytest.approx(3)
    assert interval.high == pytest.approx(3)
    assert p95_difference([(1.0,)], [(2.0,)]) is None
    assert RESAMPLES >= 2000


def test_secondary_figures_have_known_values(synthetic):
    rows = [
        replace(r, itl_s=0.01 + 0.002 * (r.arm == "B"), end_s=r.intended_s + 2 + 2 * (r.arm == "B"))
        for r in synthetic.study(10)
    ]
    itl, whole, throughput = estimate(rows, synthetic.CELL).secondary
    assert (itl.a, itl.b, itl.difference) == pytest.approx((0.01, 0.012, 0.002))
    assert (whole.a, whole.b) == pytest.approx((2, 4))
    assert (throughput.a, throughput.b) == pytest.approx((2, 1))
    assert itl.interval is not None
    assert itl.interval.low == pytest.approx(0.002)


def test_throughput_leaves_out_a_block_that_was_interrupted(synthetic):
    """Its last slot had fewer requests than the others, so its load was another."""
    rows = [
        replace(r, prompt_id=f"{r.prompt_id}{name}", end_s=r.intended_s + 2, output_tokens=tokens)
        for r in synthetic.study(10)
        for name, tokens in (("x", 4), ("y", 6))
    ]
    cut = [r for r in rows if not (r.block == 9 and r.slot == 3 and r.prompt_id.endswith("y"))]
    whole = [r for r in rows if r.block != 9]
    assert estimate(cut, synthetic.CELL).secondary[2] == estimate(whole, synthetic.CELL).secondary[2]
    assert estimate(cut, synthetic.CELL).secondary[2].a == pytest.approx(5)


def test_cells_come_in_order_without_those_of_warm_up_alone(synthetic):
    rows = [*synthetic.block_of(0, [1.0] * 4, cell="w", warmup=1), *synthetic.block_of(0, [1.0] * 4, cell="z")]
    assert cells_of([*rows, *synthetic.study(1)]) == ("z", synthetic.CELL)
