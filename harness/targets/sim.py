"""Target `sim`: both engines in one process, virtual time, one seeded sequence of choices."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import StartupError
from engine.request import RequestOutput
from engine.seams import SEAMS, Seams
from faults.levers import BIDIRECTIONAL, CLOCK, COMPETITORS, CONNECTORS, PUSH, RANKS, Levers
from harness.errors import CheckerError
from harness.history import History, error_text
from harness.oracles.view import view_of
from harness.plan import Cell
from harness.targets.conduct import Conductor, Stage, plain_output
from harness.targets.sim_world import SimClock, SimWorld
from harness.targets.workload import make_prompts


class SimTarget:
    """The default target: thousands of cells, no processes, no network."""

    name = "sim"
    summary = "both engines in one process, virtual time, one seeded sequence of choices"
    provides = frozenset(SEAMS) | {BIDIRECTIONAL, CLOCK, COMPETITORS, CONNECTORS, PUSH, RANKS}
    takes_connector = True

    def __init__(self, watch: Callable[[Seams], None] | None = None) -> None:
        """`watch` hangs more handlers on the seams of every cell, after all others."""
        self._watch = watch

    def run(self, cell: Cell, history: History) -> None:
        """Run the cell and write its history."""
        Conductor.begin(cell, history, self.name)
        if cell.missing:
            return
        try:
            self._run(cell, history)
        except CheckerError as error:
            history.add("checker.crashed", error=str(error))

    def _run(self, cell: Cell, history: History) -> None:
        conductor = Conductor(cell, history)
        conductor.expect(make_prompts(cell.scenario, cell.data_seed))

        def answered(engine: str, output: RequestOutput) -> None:
            history.add("answer", t=world.clock.now, engine=engine, **plain_output(output))

        try:
            world = SimWorld(cell, conductor.seams, answered)
        except StartupError as error:
            history.add("engine.refused", error=str(error))
            return
        conductor.attach(
            Stage(
                producer=view_of(world.producer),
                consumer=view_of(world.consumer),
                levers=Levers(SimClock(world.leases), world.competitors),
                now=lambda: world.clock.now,
                prompts=world.all_prompts,
            ),
            self._watch,
        )
        finished = None
        try:
            finished = world.run()
        except CheckerError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is a finding
            history.add("engine.crashed", error=error_text(error))
        conductor.end(world.clock.now, finished, world.fabric.held())
