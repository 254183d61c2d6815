"""Deadlines end by time, by hand, or not at all."""

import pytest

from engine.clock import VirtualClock
from engine.connectors.deadlines import Deadlines


@pytest.fixture
def clock():
    return VirtualClock()


def test_each_ends_once_when_its_time_has_passed(clock):
    deadlines = Deadlines(10, clock)
    deadlines.start("a")
    clock.advance(4)
    deadlines.start("b")
    clock.advance(5)
    assert deadlines.take_ended() == []
    clock.advance(1)
    assert deadlines.take_ended() == ["a"]
    assert (list(deadlines), len(deadlines), "a" in deadlines) == (["b"], 1, False)
    clock.advance(4)
    assert deadlines.take_ended() == ["b"]
    assert deadlines.take_ended() == []


def test_one_that_is_renewed_lasts_longer_unless_it_has_ended(clock):
    deadlines = Deadlines(10, clock)
    deadlines.start("a")
    clock.advance(9)
    deadlines.renew("a")
    clock.advance(9)
    assert deadlines.take_ended() == []
    clock.advance(1)
    deadlines.renew("a")
    deadlines.renew("nobody")
    assert deadlines.take_ended() == ["a"]


def test_one_that_is_ended_by_hand_has_ended_now(clock):
    deadlines = Deadlines(10, clock)
    deadlines.start("a")
    deadlines.end("a")
    assert deadlines.take_ended() == ["a"]
    with pytest.raises(KeyError):
        deadlines.end("a")


def test_one_that_is_dropped_never_ends(clock):
    deadlines = Deadlines(10, clock)
    deadlines.start("a")
    assert deadlines.drop("a")
    assert not deadlines.drop("a")
    clock.advance(10)
    assert deadlines.take_ended() == []
