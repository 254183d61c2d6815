"""Arrivals are fixed beforehand: by a seed, a rate and a count."""

from __future__ import annotations

import itertools

import pytest

from harness.overhead.arrivals import alone, at_rate, pause


def test_a_seed_gives_one_schedule() -> None:
    assert at_rate(2.0, 20, 7) == at_rate(2.0, 20, 7) != at_rate(2.0, 20, 8)


def test_arrivals_begin_at_once_and_never_go_back() -> None:
    offsets = at_rate(3.0, 50, 1)
    assert offsets[0] == 0.0
    assert list(offsets) == sorted(offsets)
    assert len(offsets) == 50


@pytest.mark.parametrize("rate", [0.1, 5.0])
def test_gaps_are_those_of_a_poisson_process(rate: float) -> None:
    """Exponential: the mean is 1/rate, and a share of 1 - 1/e is shorter than that. 4,000 gaps, five deviations."""
    offsets = at_rate(rate, 4001, 3)
    gaps = [rate * (late - early) for early, late in itertools.pairwise(offsets)]
    assert sum(gaps) / len(gaps) == pytest.approx(1.0, abs=5 / 4000**0.5)
    assert sum(gap < 1 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=5 * 0.48 / 4000**0.5)


def test_more_arrivals_do_not_move_those_before() -> None:
    assert at_rate(2.0, 10, 7)[:4] == at_rate(2.0, 4, 7)


@pytest.mark.parametrize(("rate", "count"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_no_schedule(rate: float, count: int) -> None:
    with pytest.raises(ValueError, match="use positive numbers"):
        at_rate(rate, count, 0)


def test_one_request_alone() -> None:
    assert alone() == (0.0,)


def test_pauses_differ_and_are_never_too_short() -> None:
    pauses = [pause(seed, 0.5) for seed in range(50)]
    assert all(0.5 <= p <= 1.0 for p in pauses)
    assert len(set(pauses)) == 50
