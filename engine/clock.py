"""Virtual time: an integer that only its owner moves. Nothing in the engine reads a wall clock."""

from __future__ import annotations


class VirtualClock:
    """Ticks since the run began."""

    def __init__(self) -> None:
        self._now = 0

    @property
    def now(self) -> int:
        return self._now

    def advance(self, ticks: int = 1) -> None:
        if ticks < 0:
            raise ValueError(f"time cannot go back by {-ticks} ticks")
        self._now += ticks
