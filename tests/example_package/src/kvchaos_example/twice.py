"""A target that runs every cell twice in the simulator, and believes neither run if they differ."""

from __future__ import annotations

from harness.history import History
from harness.plan import Cell
from harness.targets.sim import SimTarget


class TwiceTarget(SimTarget):
    """The simulator with a check of its own. A target needs no base class: this one shares the simulator's."""

    API_VERSION = 1
    name = "twice"
    summary = "the simulator, each cell twice: a cell whose two histories differ is unknown"

    def run(self, cell: Cell, history: History) -> None:
        first = History()
        super().run(cell, first)
        super().run(cell, history)
        if history.lines != first.lines:
            history.add("checker.crashed", error="two runs of this cell left different histories")


TWICE = TwiceTarget()
