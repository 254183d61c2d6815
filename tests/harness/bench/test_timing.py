"""Medians, interleaving and the number of calls, on a clock of the test's own."""

import pytest

from harness.bench import timing


class Clock:
    """CPU time that only jobs spend."""

    def __init__(self):
        self.now = 0.0
        self.called = []

    def job(self, name, *costs):
        remaining = list(costs)

        def run():
            self.called.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "thread_time", lambda: clock.now)
    return clock


def test_jobs_take_turns_and_the_median_counts(clock):
    slow, slower = clock.job("a", 9, 9, 1, 5, 2), clock.job("b", 9, 9, 30, 10, 20)
    assert timing.medians({"a": slow, "b": slower}, 3) == {"a": 2, "b": 20}
    assert clock.called == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]


def test_a_short_job_is_called_often_enough_for_the_clock(clock):
    assert timing.medians({"a": clock.job("a", timing.MIN_SAMPLE_S / 50)}, 1)["a"] == pytest.approx(
        timing.MIN_SAMPLE_S / 50
    )
    assert len(clock.called) == 2 + 50


def test_a_job_that_costs_nothing_ends(clock):
    timing.medians({"a": clock.job("a", 0.0)}, 1)
    assert len(clock.called) == 2 + timing.MAX_CALLS
