"""Virtual time goes on when its owner says so, and never back."""

import pytest

from engine.clock import VirtualClock


def test_time_goes_on_by_ticks():
    clock = VirtualClock()
    assert clock.now == 0
    clock.advance()
    clock.advance(5)
    clock.advance(0)
    assert clock.now == 6


def test_time_does_not_go_back():
    clock = VirtualClock()
    with pytest.raises(ValueError, match="time cannot go back by 3 ticks"):
        clock.advance(-3)
    assert clock.now == 0
