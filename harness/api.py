"""Run one scenario from a test: no command line, no folder, nothing left behind.

    from harness.api import run_scenario

    def test_a_stale_read_is_caught() -> None:
        cell = run_scenario("scenarios/smoke/stale-read-after-reuse.yaml", policy="fail_closed_fail", seed=7)
        assert cell.result == "pass", cell.why

What is run and how it is judged is what `kvchaos run` does: the same seeds, the same history, the same judge. The
pytest plugin (`kvchaos_pytest`) is built on this.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from engine.extensions import ExtensionError
from harness.history import History, Line, dump_line, error_text
from harness.observe import observe
from harness.plan import Cell, plan_cells
from harness.rundir import Options
from harness.runner import judge_told
from harness.targets import TARGETS
from reports.results import CellResult, RunResult
from scenarios.loader import SUFFIXES, load_scenario, load_scenarios, parse_scenario
from scenarios.problems import Problem, ScenarioError, did_you_mean, listed, shown
from scenarios.schema import Scenario
from scenarios.words import Policy, Role

MAX_SEED = 2**63 - 1


def run_scenario(
    scenario: Scenario | str | Path, *, policy: Policy | str, seed: int = 0, target: str = "sim", twin: bool = False
) -> CellResult:
    """Run one scenario under one policy in this process, and judge it.

    Args:
        scenario: a scenario; the path of its file; or YAML text (a str with a line break).
        policy: one of the scenario's policies.
        seed: 0 to 2**63 - 1; drives every choice. The same seed gives the same result.
        target: where to run it (`kvchaos list targets`).
        twin: run its clean twin instead: the same seed and workload, each fault replaced by noop.

    Returns:
        what the judge found. A cell that fails is a result, not an error: look at `result` and `why`. A cell that
        cannot run on the target is `not_applicable`, also where its twin was asked for.

    Raises:
        ScenarioError: the file, the text or an argument cannot be used; a line for each problem.
    """
    read, file = _read(scenario)
    chosen = chosen_policy(policy, read, file)
    return Runs(checked_seed(seed), checked_target(target)).judge_one(read, chosen, file, twin)


def run_scenarios(
    scenarios: Iterable[Scenario | str | Path],
    *,
    policies: Iterable[Policy | str] = tuple(Policy),
    seed: int = 0,
    target: str = "sim",
) -> RunResult:
    """Run several scenarios, with their clean twins, in this process: `kvchaos run` without its folder.

    Args:
        scenarios: as for `run_scenario`; a path may also be a folder, for all scenarios below it.
        policies: each scenario runs under those of them that it names.

    Returns:
        all cells in the order of a plan, and what they add up to (`exit_code`, `totals`, `headline`).

    Raises:
        ScenarioError: something cannot be used, two scenarios have one name, or there is nothing to run.
    """
    runs = Runs(checked_seed(seed), checked_target(target))
    wanted = tuple(known_policy(policy) for policy in policies)
    read, files = _read_all(scenarios)
    cells = plan_cells(read, wanted, runs.seed, TARGETS[runs.target].provides)
    if not cells:
        names = ", ".join(wanted) or "no policy"
        raise _problem("scenarios", "policies", f"none of the {len(read)} scenarios runs under {names}: choose others")
    options = Options("scenarios", target, seed, wanted, files)
    through = {cell.twin: cell.scenario.name for cell in reversed(cells) if cell.twin is not None}
    results = tuple(_judge(cell, target, _rerun(options, cell, through.get(cell.id))) for cell in cells)
    return RunResult(options.name, target, seed, interrupted=False, cells=results)


@dataclass(slots=True)
class Runs:
    """Runs cells with one seed on one target, and each clean twin once."""

    seed: int
    target: str
    _twins: dict[str, CellResult] = field(default_factory=dict)

    def judge(self, scenario: Scenario, policy: Policy, file: str | None) -> tuple[CellResult, ...]:
        """The cell of a scenario and a policy, then its clean twin if it has one.

        Args:
            file: what a command that runs it again calls the scenario's file.
        """
        options = self._options(scenario, policy, file)
        return tuple(self._once(cell, _rerun(options, cell, scenario.name)) for cell in self._plan(scenario, policy))

    def judge_one(self, scenario: Scenario, policy: Policy, file: str | None, twin: bool) -> CellResult:
        """The cell of a scenario and a policy, or only its twin; of one that the target cannot run, the cell itself.

        Raises:
            ScenarioError: the twin is asked for, and the scenario has none.
        """
        cell, *twins = self._plan(scenario, policy)
        if twin and not cell.missing:
            if not twins:
                message = "the scenario has no clean twin (no fault, or twin: false): run it without twin"
                raise _problem(file or scenario.name, "twin", message)
            cell = twins[0]
        return self._once(cell, _rerun(self._options(scenario, policy, file), cell, scenario.name))

    def _plan(self, scenario: Scenario, policy: Policy) -> list[Cell]:
        return plan_cells([scenario], [policy], self.seed, TARGETS[self.target].provides)

    def _options(self, scenario: Scenario, policy: Policy, file: str | None) -> Options:
        sources = {} if file is None else {scenario.name: file}
        return Options(scenario.name, self.target, self.seed, (policy,), sources)

    def _once(self, cell: Cell, rerun: str) -> CellResult:
        """Judge a cell; a twin that was judged before is not run again."""
        if cell.id in self._twins:
            return replace(self._twins[cell.id], rerun=rerun)
        result = _judge(cell, self.target, rerun)
        if cell.role is Role.TWIN:
            self._twins[cell.id] = result
        return result


def chosen_policy(policy: Policy | str, scenario: Scenario, file: str | None = None) -> Policy:
    """A policy that the scenario runs under.

    Raises:
        ScenarioError: there is no such policy, or the scenario does not name it.
    """
    where = file or scenario.name
    chosen = known_policy(policy, where)
    if chosen not in scenario.policies:
        message = f"policy is {shown(str(policy))}, which the scenario does not run: {listed(scenario.policies)}"
        raise _problem(where, "policy", message)
    return chosen


def checked_seed(seed: int) -> int:
    """The seed, if it is one.

    Raises:
        ScenarioError: it is not a whole number from 0 to 2**63 - 1.
    """
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise _problem("arguments", "seed", f"seed is {shown(seed)}: use a whole number from 0 to 2**63 - 1")
    return seed


def checked_target(target: str) -> str:
    """The target, if there is one of that name.

    Raises:
        ScenarioError: there is none, or another distribution's that cannot be used.
    """
    try:
        TARGETS.choose(target)
    except KeyError:
        advice = f"{listed(TARGETS.names)}{did_you_mean(target, TARGETS.names)}"
        raise _problem("arguments", "target", f"target is {shown(target)}: {advice}") from None
    except ExtensionError as error:
        raise _problem("arguments", "target", str(error)) from None
    return target


def known_policy(policy: Policy | str, where: str = "arguments") -> Policy:
    """The policy of a name.

    Raises:
        ScenarioError: there is none.
    """
    if policy not in tuple(Policy):
        words = [str(known) for known in Policy]
        advice = f"{listed(words)}{did_you_mean(policy, words)}"
        raise _problem(where, "policy", f"policy is {shown(policy)}: {advice}")
    return Policy(policy)


def _read(scenario: Scenario | str | Path) -> tuple[Scenario, str | None]:
    """The scenario, and its file if it came from one."""
    if isinstance(scenario, Scenario):
        return scenario, None
    if isinstance(scenario, str) and ("\n" in scenario or "\r" in scenario):
        return parse_scenario(scenario), None
    return load_scenario(Path(scenario)), str(scenario)


def _read_all(scenarios: Iterable[Scenario | str | Path]) -> tuple[list[Scenario], dict[str, str]]:
    """The scenarios by name, and the files of those that came from one."""
    paths: list[Path] = []
    read: list[Scenario] = []
    for item in scenarios:
        if isinstance(item, Path) or (isinstance(item, str) and "\n" not in item):
            paths.append(Path(item))
        else:
            read.append(_read(item)[0])
    read += load_scenarios(paths) if paths or not read else []
    read.sort(key=lambda scenario: scenario.name)
    for one, other in pairwise(read):
        if one.name == other.name:
            raise _problem("scenarios", "name", f"{one.name} is given twice: rename one, or give only one")
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return read, {file.stem: str(file) for file in reversed(files) if file.suffix in SUFFIXES}


def _rerun(options: Options, cell: Cell, through: str | None) -> str:
    """The command that runs a cell again; a call where the scenario is in no file.

    Args:
        through: of a twin, the scenario that it is reached through.
    """
    name = through or cell.scenario.name
    if name not in options.sources:
        policy, twin = str(cell.policy), ", twin=True" if cell.role is Role.TWIN else ""
        return f"run_scenario(<{name}>, policy={policy!r}, seed={options.seed}, target={options.target!r}{twin})"
    return options.rerun(name, cell.policy)


def _judge(cell: Cell, target: str, rerun: str) -> CellResult:
    lines = _record(cell, target)
    return judge_told(observe(lines), lines, rerun)


def _record(cell: Cell, target: str) -> list[Line]:
    """The history of a cell, as it would be read from a file, so that both are judged alike."""
    history = History()
    with _undisturbed():
        try:
            TARGETS[target].run(cell, history)
        except Exception as error:  # noqa: BLE001 - not the engine (targets record its crashes): the cell is unknown
            history.add("checker.crashed", error=f"harness: {error_text(error)}")
    return [json.loads(dump_line(line)) for line in history.lines]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """One thread, and no log of mismatches, which are what is looked for; both as before at the end."""
    log = logging.getLogger("engine")
    level, threads = log.level, torch.get_num_threads()
    log.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        log.setLevel(level)


def _problem(file: str, where: str, message: str) -> ScenarioError:
    return ScenarioError([Problem(file, 0, where, message)])
