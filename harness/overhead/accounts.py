"""Books what checksums cost each arm by the engines' own counters, slot by slot, while a study runs.

The counters are read between slots, when nothing is under way, so that reading them is in nobody's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx

from harness.overhead.decomposition import Costs, Explanation, Reading, costs, explain, read_engines
from harness.overhead.rows import ARM_OFF, ARM_ON, Row
from harness.overhead.stats import Estimate


class Accounts:
    """The costs of each (cell, arm) of one study. `urls` are those of the engines, `producer` and `consumer`."""

    def __init__(self, client: httpx.AsyncClient, urls: Mapping[str, str]) -> None:
        self._client = client
        self._urls = urls
        self._before: Mapping[str, Reading] | None = None
        self.booked: dict[tuple[str, str], Costs] = {}

    async def open(self) -> None:
        """Before a slot. Raises DecompositionError when an engine does not say."""
        self._before = await read_engines(self._client, self._urls)

    async def close(self, rows: Sequence[Row]) -> None:
        """After a slot: book what it cost. Warm-up, and slots in which a request failed, say nothing.

        Raises:
            DecompositionError: an engine does not say, or was started again.
        """
        before, after = self._before, await read_engines(self._client, self._urls)
        if before is None or any(row.warmup or not row.ok for row in rows):
            return
        where = rows[0].cell, rows[0].arm
        self.booked[where] = self.booked.get(where, Costs()) + costs(before, after, len(rows))

    def explanation(self, estimate: Estimate) -> Explanation | None:
        """How far the stages explain what was measured in a cell; None where an arm has no costs."""
        off, on = (self.booked.get((estimate.cell, arm), Costs()) for arm in (ARM_OFF, ARM_ON))
        if not off.requests or not on.requests:
            return None
        return explain(off, on, estimate.ci_low_s, estimate.ci_high_s)
