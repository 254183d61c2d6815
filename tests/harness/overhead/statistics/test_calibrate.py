"""Calibration: it judges as the estimate does, its noise has no cost in it, its rates are those that theory gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from engine.errors import InputError
from harness.overhead import calibration
from harness.overhead.calibrate import (
    SHIFTS,
    Noise,
    draw,
    fixed_cases,
    intervals,
    noise_of,
    sequential_cases,
    stopping_noise,
    trimmed_weights,
)
from harness.overhead.calibration_page import BEGIN, END, in_page, tables
from harness.overhead.choices import BLOCKS, choices
from harness.overhead.error_rates import rate_interval
from harness.overhead.intervals import location_bounds
from harness.overhead.rows import RowsFile, read_rows
from harness.overhead.stats import StatisticsError, estimate

MARGIN = 0.01
ROWS = Path(__file__).parent / "aa-rows.csv"


@pytest.fixture(scope="module")
def quiet() -> Noise:
    """Normal differences of 1.5%: after some 100 blocks the interval is half the margin wide."""
    rng = np.random.default_rng(0)
    return Noise("c", rng.normal(0, 0.015, 400), np.ones(400))


@pytest.mark.parametrize("count", [2, 5, 8, 31, 100])
def test_many_studies_at_once_get_the_bounds_of_one(count):
    values = np.random.default_rng(count).standard_t(2, (7, count))
    low, high, strict_low = intervals(np.sort(values))
    for number, study in enumerate(values):
        bounds = location_bounds(list(study))
        assert (low[number], high[number]) == pytest.approx((bounds.interval.low, bounds.interval.high), rel=1e-9)
        assert strict_low[number] == pytest.approx(bounds.strict_low, rel=1e-9)


def test_the_weights_are_those_of_scipys_trimmed_mean():
    rng = np.random.default_rng(3)
    values, picked = np.sort(rng.normal(size=17)), rng.integers(0, 17, (50, 17))
    assert trimmed_weights(picked) @ values == pytest.approx(stats.trim_mean(values[picked], 0.2, axis=1))


def test_a_case_judges_as_the_estimate_does(synthetic):
    """Synthetic studies written out as rows, with a cost planted in arm B, get the same verdicts."""
    noise = noise_of(synthetic.study(40, noise=0.001), synthetic.CELL)
    differences, levels = draw(noise, 10, 16, np.random.default_rng(0))
    for case in fixed_cases(noise, MARGIN, 16, sets=10):
        verdicts = []
        for study, level in zip(differences, levels, strict=True):
            rows = []
            for number, (difference, a) in enumerate(zip(study, level, strict=True)):
                ttfts = [a + (difference + case.shift) * (arm == "B") for arm in ("ABBA", "BAAB")[number % 2]]
                rows += synthetic.block_of(number, ttfts)
            verdicts.append(str(estimate(rows, synthetic.CELL, MARGIN).verdict))
        assert (case.equivalent, case.overhead) == (verdicts.count("EQUIVALENT"), verdicts.count("OVERHEAD"))
        assert case.inconclusive == verdicts.count("INCONCLUSIVE")


def test_drawn_blocks_come_in_runs_and_with_either_sign():
    noise = Noise("c", np.arange(1.0, 21.0), np.arange(1.0, 21.0))
    differences, levels = draw(noise, 200, 10, np.random.default_rng(1))
    assert differences.shape == levels.shape == (200, 10)
    assert (np.abs(differences) == levels).all()
    for start in (0, 4, 8):
        run = differences[:, start : start + 4]
        steps = np.diff(np.abs(run), axis=1) % 20
        assert (steps == 1).all()
        assert (np.sign(run) == np.sign(run[:, :1])).all()
    assert 0.3 < (differences > 0).mean() < 0.7


def test_the_rates_are_those_that_theory_gives(quiet):
    """At the margin EQUIVALENT is wrong in 5% of the studies and OVERHEAD in 0.5%; the limits are 1 in a million."""
    cases = {case.shift: case for case in fixed_cases(quiet, MARGIN, 64)}
    assert list(cases) == [shift * MARGIN for shift in SHIFTS]
    boundary = cases[MARGIN]
    assert stats.binom.ppf(1e-6, 1000, 0.03) <= boundary.equivalent <= stats.binom.isf(1e-6, 1000, 0.065)
    assert boundary.overhead <= stats.binom.isf(1e-6, 1000, 0.01)
    assert cases[0].overhead == 0
    assert cases[5 * MARGIN].equivalent == 0
    # With normal noise: power of the two one-sided tests at no cost.
    spread = 0.015 / np.sqrt(64) * 1.07  # The trimmed mean keeps 1.07**-2 of the mean's efficiency, about.
    power = 2 * stats.norm.cdf(MARGIN / spread - 1.645) - 1
    assert cases[0].equivalent / 1000 == pytest.approx(power, abs=0.03)


def test_stopping_when_precise_does_not_make_more_verdicts_wrong(quiet):
    quieter = Noise("c", quiet.differences * 0.6, quiet.levels)
    cases = {case.shift: case for case in sequential_cases(quieter, MARGIN, 120)}
    assert cases[MARGIN].stopped == 1000
    assert 20 < cases[MARGIN].median_blocks < 80
    assert cases[MARGIN].equivalent <= stats.binom.isf(1e-6, 1000, 0.065)
    assert cases[0].equivalent > 990
    assert cases[0].overhead == 0


def test_a_study_that_is_never_precise_ends_at_the_most_blocks(quiet):
    (first, *_) = sequential_cases(Noise("c", quiet.differences * 50, quiet.levels), MARGIN, 20, sets=50)
    assert (first.stopped, first.median_blocks, first.equivalent) == (0, 20, 0)


def test_stopping_noise_stops_after_some_tens_of_blocks(quiet):
    scaled = stopping_noise(quiet, MARGIN)
    assert scaled.differences == pytest.approx(quiet.differences * scaled.factor)
    case = sequential_cases(scaled, MARGIN, 150, sets=200)[0]
    assert 30 < case.median_blocks < 60


def test_too_few_blocks_are_no_noise(synthetic):
    with pytest.raises(StatisticsError, match="15 blocks to draw from"):
        noise_of(synthetic.study(15), synthetic.CELL)


def test_rows_with_checksums_are_no_noise(synthetic):
    rows = [replace(row, study="overhead") for row in synthetic.study(20)]
    with pytest.raises(StatisticsError, match="rows of a study 'overhead': record A/A rows"):
        calibration.calibrate(rows, MARGIN, most=8)


def test_the_median_of_the_recording_is_one(synthetic):
    noise = noise_of(synthetic.study(21, level=lambda at: 0.5), synthetic.CELL)
    assert np.median(noise.levels) == pytest.approx(1)
    assert noise.factor == 1


def test_other_estimators_are_compared_on_the_same_studies(quiet):
    found = choices(quiet, sets=100)
    assert len(found) == len(BLOCKS) * 8
    few = {(c.location, c.method): c for c in found if c.blocks == BLOCKS[0]}
    ours = few["20% trimmed mean", "expanded percentile"]
    plain = few["20% trimmed mean", "percentile"]
    assert ours.width > plain.width
    assert ours.too_low + ours.too_high <= plain.too_low + plain.too_high


@pytest.fixture(scope="module")
def small(synthetic):
    """A calibration of little noise, quick to make."""
    noise = noise_of(synthetic.study(40, noise=0.001), synthetic.CELL)
    cases = [*fixed_cases(noise, MARGIN, 8, sets=50), *sequential_cases(noise, MARGIN, 20, sets=50)]
    recorded = calibration.Recorded(synthetic.CELL, 40, 0.1, 0.01, 0.001, -0.01, 0.01, "INCONCLUSIVE")
    return calibration.Calibration(MARGIN, 20, (recorded,), tuple(cases), tuple(choices(noise, sets=20)))


def test_a_calibration_comes_back_from_its_file(small, tmp_path):
    calibration.save(small, tmp_path / "c.json")
    assert calibration.load(tmp_path / "c.json") == small


@pytest.mark.parametrize("text", ["", "[]", '{"margin": 1}', '{"margin": 1, "most": 2, "recorded": [{}]}'])
def test_what_is_no_calibration(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InputError, match="no calibration"):
        calibration.load(tmp_path / "c.json")


def test_the_worst_rates_are_the_largest_with_exact_intervals(small):
    rates = calibration.worst_rates(small)
    boundary = [case.equivalent for case in small.cases if case.shift == MARGIN]
    assert rates[1].count == max(boundary)
    assert "(the margin), called EQUIVALENT" in rates[1].what
    for rate in rates:
        assert rate.interval == rate_interval(rate.count, rate.sets)


def test_the_page_gets_the_tables_between_its_marks(small):
    page = in_page(f"# Title\n{BEGIN}\nold\n{END}\nafter\n", small)
    assert page.startswith(f"# Title\n{BEGIN}\n")
    assert page.endswith(f"{END}\nafter\n")
    assert "old" not in page
    assert all(line in page for line in tables(small))
    assert in_page(page, small) == page
    with pytest.raises(InputError, match="no place for the tables"):
        in_page("# Title\n", small)


def test_the_packaged_calibration_is_of_the_recorded_rows():
    """One of its cases, simulated again: the file was made by this code from these rows."""
    packaged, rows = calibration.load(), read_rows(ROWS)
    recorded = packaged.recorded[0]
    again = fixed_cases(noise_of(rows, recorded.cell), packaged.margin, 16)
    assert set(again) <= set(packaged.cases)
    own = estimate(rows, recorded.cell, packaged.margin)
    assert (own.relative, own.relative_low, str(own.verdict)) == pytest.approx(
        (recorded.relative, recorded.low, recorded.verdict)
    )


def test_the_recorded_rows_are_an_aa_study():
    assert {row.study for row in read_rows(ROWS)} == {"aa"}


def test_the_command_prints_tables_and_writes_the_file(kvchaos, synthetic, tmp_path, monkeypatch):
    monkeypatch.setattr("harness.overhead.calibrate.FIXED", (8,))
    write_rows(tmp_path / "rows.csv", synthetic.study(20))
    saved = tmp_path / "c.json"
    arguments = [str(tmp_path / "rows.csv"), "--max-blocks", "10", "--no-compare"]
    done = kvchaos("overhead-calibrate", *arguments, "--save", str(saved))
    assert (done.code, done.err) == (0, "")
    assert "called OVERHEAD" in done.out
    found = calibration.load(saved)
    assert {case.blocks for case in found.cases} == {8, None}
    as_json = kvchaos("overhead-calibrate", *arguments, "--json")
    assert json.loads(as_json.out)["margin"] == found.margin == MARGIN


def write_rows(path, rows):
    with RowsFile(path) as file:
        for row in rows:
            file.append(row)
