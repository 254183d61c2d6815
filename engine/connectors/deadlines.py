"""Deadlines by request id: how long P's blocks are held for a consumer, and how long D waits for a producer."""

from __future__ import annotations

from collections.abc import Iterator

from engine.clock import Clock


class Deadlines:
    """Each ends `ticks` after it was started, unless it is dropped before."""

    def __init__(self, ticks: int, clock: Clock) -> None:
        self._ticks = ticks
        self._clock = clock
        self._ends: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ends

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def start(self, request_id: str) -> None:
        """Start it, or start it again."""
        self._ends[request_id] = self._clock.now + self._ticks

    def renew(self, request_id: str) -> None:
        """Start it again, unless it has ended already or there is none."""
        end = self._ends.get(request_id)
        if end is not None and self._clock.now < end:
            self.start(request_id)

    def end(self, request_id: str) -> None:
        """Let it end now, as if its time had passed. Raises KeyError if there is none."""
        self._ends[request_id] = min(self._ends[request_id], self._clock.now)

    def drop(self, request_id: str) -> bool:
        """Forget it. False if there is none (any more)."""
        return self._ends.pop(request_id, None) is not None

    def take_ended(self) -> list[str]:
        """Those whose time has passed, once each."""
        ended = [request_id for request_id, end in self._ends.items() if end <= self._clock.now]
        for request_id in ended:
            del self._ends[request_id]
        return ended
