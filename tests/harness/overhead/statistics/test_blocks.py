"""Rows become paired differences: what is paired, what cancels, and what becomes of requests that failed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.overhead.blocks import StatisticsError, pair, trimmed_mean


def test_the_difference_is_mean_of_b_less_mean_of_a(synthetic):
    (block,) = pair(synthetic.block_of(0, [0.1, 0.2, 0.4, 0.3]), synthetic.CELL).blocks
    assert block.difference_s == pytest.approx((0.2 + 0.4) / 2 - (0.1 + 0.3) / 2)
    assert block.ttft_a_s == (0.1, 0.3)


@pytest.mark.parametrize("number", [0, 1])
def test_a_steady_drift_cancels_in_either_order(synthetic, number):
    (block,) = pair(synthetic.block_of(number, [0.1, 0.2, 0.3, 0.4]), synthetic.CELL).blocks
    assert block.difference_s == pytest.approx(0, abs=1e-12)


def test_other_cells_warm_up_and_the_order_of_rows_do_not_matter(synthetic):
    own = synthetic.study(6)
    more = [*reversed(own), *synthetic.block_of(99, [9.0] * 4, warmup=1), *synthetic.block_of(0, [9.0] * 4, cell="x")]
    paired = pair(more, synthetic.CELL)
    assert sorted(block.difference_s for block in paired.blocks) == pytest.approx(
        sorted(block.difference_s for block in pair(own, synthetic.CELL).blocks)
    )
    assert paired.left.warmup_rows == 4
    assert len(paired.rows) == 24


def test_several_prompts_of_a_block_give_one_difference(synthetic):
    rows = [row for i in range(5) for row in synthetic.block_of(0, [0.1, 0.1 + i, 0.1 + i, 0.1], prompt_id=f"p{i}")]
    (block,) = pair(rows, synthetic.CELL).blocks
    assert block.difference_s == pytest.approx(2.0)  # Of 0 to 4, one is cut at either end.
    assert len(block.ttft_b_s) == 10


@pytest.mark.parametrize(
    ("ttfts", "difference", "counted"),
    [
        ([0.1, None, 0.1, 0.1], math.inf, (0, 1)),  # A B B A: B failed
        ([None, 0.1, 0.1, 0.1], -math.inf, (0, 1)),
        ([None, 0.1, 0.1, None], -math.inf, (0, 1)),
        ([None, None, None, 0.1], math.inf, (0, 1)),
        ([None, None, 0.1, 0.1], math.nan, (1, 0)),
    ],
)
def test_a_failed_request_is_later_than_any_that_was_answered(synthetic, ttfts, difference, counted):
    paired = pair(synthetic.block_of(0, ttfts), synthetic.CELL)
    assert paired.blocks[0].difference_s == pytest.approx(difference, nan_ok=True)
    assert (paired.left.failed_prompts, paired.left.one_sided_prompts) == counted
    assert paired.left.empty_blocks == math.isnan(difference)
    assert sum(map(len, (paired.blocks[0].ttft_a_s, paired.blocks[0].ttft_b_s))) == 4


def test_an_unfinished_block_is_counted_and_has_no_difference(synthetic):
    paired = pair([*synthetic.study(2), *synthetic.block_of(2, [0.1] * 4)[:3]], synthetic.CELL)
    assert len(paired.judged) == 2
    assert (paired.left.unfinished_prompts, paired.left.empty_blocks) == (1, 1)


def test_what_is_no_study_is_refused(synthetic):
    rows = synthetic.block_of(0, [0.1] * 4)
    for wrong, said in [
        ([], "no row of cell"),
        ([replace(row, arm="C") for row in rows], "arm A or B"),
        ([replace(row, slot=row.slot + 1) for row in rows], "slot 0 to 3"),
        ([*rows, rows[0]], "twice in one slot"),
        ([replace(row, arm="AABB"[row.slot]) for row in rows], "a drift would not cancel"),
        ([replace(row, arm="ABBB"[row.slot]) for row in rows], "a drift would not cancel"),
    ]:
        with pytest.raises(StatisticsError, match=said):
            pair(wrong, synthetic.CELL)


def test_the_trimmed_mean_with_infinite_values():
    assert trimmed_mean([1, 2, 3, 4, math.inf]) == pytest.approx(3)
    assert trimmed_mean([1, 2, 3, math.inf, math.inf]) == math.inf
    assert trimmed_mean([-math.inf, -math.inf, 1, 2, 3]) == -math.inf
    assert math.isnan(trimmed_mean([-math.inf, math.inf]))
    assert trimmed_mean([5]) == 5
