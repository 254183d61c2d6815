"""The bookkeeping oracle: pools return to their baseline, and every request ends exactly once.

Counts references from the seams alone, and compares with what the pools say of themselves when the run is over.
"""

from __future__ import annotations

from collections import Counter

from engine.core import EngineCore
from engine.seams import BlocksAllocated, BlocksFreed, RequestEnded, Seams, Stage
from harness.history import History


class BookkeepingOracle:
    """Watches one run of two engines."""

    def __init__(self, history: History, engines: tuple[EngineCore, ...]) -> None:
        self._history = history
        self._engines = engines
        self._allocated: Counter[str] = Counter()
        self._ends: Counter[tuple[str, str]] = Counter()

    def attach(self, seams: Seams) -> None:
        seams.on("blocks.allocated", self._allocate, Stage.AFTER)
        seams.on("blocks.freed", self._free, Stage.AFTER)
        seams.on("request.ended", self._end, Stage.AFTER)

    def _allocate(self, event: BlocksAllocated) -> None:
        self._allocated[event.engine] += len(event.block_ids)

    def _free(self, event: BlocksFreed) -> None:
        self._allocated[event.engine] -= 0 if not event.block_ids else len(event.block_ids)

    def _end(self, event: RequestEnded) -> None:
        self._ends[event.engine, event.request_id] += 1

    def finish(self) -> None:
        """Write the balance when the run is over."""
        for engine in self._engines:
            pool = engine.scheduler.kv.pool
            name = engine.config.engine_id
            self._history.add(
                "oracle.pool",
                engine=name,
                free=pool.num_free,
                total=pool.num_blocks - 1,
                ends=[[request, count] for (where, request), count in sorted(self._ends.items()) if where == name],
            )
