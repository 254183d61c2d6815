"""The bookkeeping oracle: pools return to their baseline, and every request ends exactly once."""

from __future__ import annotations

from collections import Counter

from engine.seams import RequestEnded, Seams, Stage
from harness.history import History
from harness.oracles.view import EngineView

KILLED = "oracle.engine_killed"


class BookkeepingOracle:
    """Watches one run of these engines."""

    def __init__(self, history: History, engines: tuple[EngineView, ...]) -> None:
        self._history = history
        self._engines = engines
        self._ends: Counter[tuple[str, str]] = Counter()

    def attach(self, seams: Seams) -> None:
        seams.on("request.ended", self._end, Stage.AFTER)

    def _end(self, event: RequestEnded) -> None:
        self._ends[event.engine, event.request_id] += 1

    def finish(self) -> None:
        """Write the balance when the run is over."""
        for engine in self._engines:
            ends = [
                [request, count] for (where, request), count in sorted(self._ends.items()) if where == engine.engine_id
            ]
            if engine.killed():
                # A fault took the process with all of its memory: it has no pool that anything could come back to.
                self._history.add(KILLED, engine=engine.engine_id, ends=ends)
                continue
            free, total = engine.pool()
            self._history.add("oracle.pool", engine=engine.engine_id, free=free, total=total, ends=ends)
