"""Where killers and controls are tried: whole cells through the runner and the judge, or one history to doctor.

Everything runs on the real path (the target, histories on disk, the judge), in this process.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import scenarios
from harness.errors import CheckerError
from harness.history import History, Line, dump_line
from harness.judge import judge
from harness.observe import observe
from harness.plan import Cell, plan_cells
from harness.rundir import Options, create
from harness.runner import judge_run, run_cells
from harness.targets import TARGETS
from reports.results import CellResult, RunResult
from scenarios.loader import load_scenario
from scenarios.schema import Scenario
from scenarios.words import Policy, Role

TARGET = "sim"
SCENARIOS = Path(str(scenarios.__file__)).parent


class MutantError(CheckerError):
    """A mutant, a killer or a control cannot be used as it is declared."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs cells. `seed` is the run seed of all of them."""

    seed: int = 0

    def run(self, *cells: str, twins: bool = False, seed: int | None = None) -> RunResult:
        """Run scenarios ("flip-before-verify") or cells of them ("flip-before-verify--off"), and judge them."""
        plan = [cell for name in cells for cell in self.plan(name, seed)]
        if not twins:
            plan = [cell for cell in plan if cell.role is not Role.TWIN]
        return self.run_plan(plan)

    def run_plan(self, plan: Sequence[Cell]) -> RunResult:
        """Run these cells, keep nothing."""
        options = Options("selftest", TARGET, self.seed, tuple(Policy), {})
        with tempfile.TemporaryDirectory(prefix="kvchaos-selftest-") as folder:
            ids = [cell.id for cell in plan]
            run_dir = create(Path(folder), options, ids, None, ["kvchaos", "selftest"], datetime.now(UTC))
            _, interrupted = run_cells(plan, TARGET, run_dir, 1, lambda _: None)
            if interrupted:
                raise KeyboardInterrupt
            return judge_run(run_dir, options)

    def plan(self, name: str, seed: int | None = None) -> list[Cell]:
        """The cells of a scenario or one of them, with their twins."""
        scenario, policies = named(name)
        return plan_cells([scenario], policies, self.seed if seed is None else seed, TARGETS[TARGET].provides)

    def history(self, cell: str) -> list[Line]:
        """What one cell leaves, as it is read back from disk."""
        history = History()
        TARGETS[TARGET].run(self.plan(cell)[0], history)
        return [json.loads(dump_line(line)) for line in history.lines]

    def judge(self, lines: list[Line]) -> CellResult:
        """Judge a history, doctored or not."""
        return judge(observe(lines), "")


def named(name: str) -> tuple[Scenario, tuple[Policy, ...]]:
    """The scenario and the policies of "scenario" or "scenario--policy".

    Raises:
        MutantError: there is none.
    """
    stem, _, policy = name.partition("--")
    paths = sorted(SCENARIOS.rglob(f"{stem}.yaml"))
    if not paths:
        raise MutantError(f"{name}: no scenario {stem} in the folder scenarios: was it renamed?")
    scenario = load_scenario(paths[0])
    policies = (Policy(policy),) if policy else scenario.policies
    if not set(policies) <= set(scenario.policies):
        raise MutantError(f"{name}: {stem} does not run under {policy}: use {', '.join(scenario.policies)}")
    return scenario, policies


def doctored(lines: list[Line], event: str, request: str | None = None, **changes: Any) -> list[Line]:
    """A history in which the lines of an event, of one request or of all, say something else."""
    return [
        {**line, **changes} if line["event"] == event and request in (None, line.get("request")) else line
        for line in lines
    ]
