"""Time as an engine sees it: an integer that never goes back. What an engine plans or judges asks no other clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What leases are measured by."""

    @property
    def now(self) -> int: ...


class MonotonicClock:
    """Real time in milliseconds, for an engine behind a server."""

    @property
    def now(self) -> int:
        return time.monotonic_ns() // 1_000_000


class VirtualClock:
    """Ticks since the run began: only its owner moves it."""

    def __init__(self) -> None:
        self._now = 0

    @property
    def now(self) -> int:
        return self._now

    def advance(self, ticks: int = 1) -> None:
        if ticks < 0:
            raise ValueError(f"time cannot go back by {-ticks} ticks")
        self._now += ticks
