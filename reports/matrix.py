"""The cells of a run as a table: a row a scenario, a column a policy. Terminal, Markdown and HTML all show this.

A scenario may be run on several topologies (a row each) and seeds (one spot holds all of them, and shows the worst).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from reports.results import CellResult, LoadResult, RunResult
from reports.summary import RESULT_WORDS
from scenarios.words import Outcome, Policy, Result, Role, Truth, VerdictStatus

WORST_FIRST = (Result.FAIL, Result.UNKNOWN, Result.KNOWN_GAP, Result.PASS, Result.NOT_APPLICABLE)


FLAG_MEANINGS = {
    "silent": "silent: a request was answered from corrupted KV, or wrongly, and no check said mismatch.",
    "warned": "warned: the same, but the engine had logged the load as unverified.",
}


def flag_of(cell: CellResult, load: LoadResult) -> str | None:
    """`silent`, or `warned` where it counts apart: unverified under fail-open. Fail-closed must not serve either."""
    if not load.silent:
        return None
    return "warned" if load.warned and cell.policy is Policy.FAIL_OPEN else "silent"


@dataclass(frozen=True, slots=True)
class Finding:
    """How loads came out; loads that came out the same share one."""

    verdict: VerdictStatus
    reason: str | None
    outcome: Outcome
    truth: Truth

    @classmethod
    def of(cls, load: LoadResult) -> Finding:
        return cls(load.verdict, load.reason, load.outcome, load.truth)


@dataclass(frozen=True, slots=True)
class Spot:
    """One place of the table: the cells of one scenario, topology and policy, one a seed."""

    cells: tuple[CellResult, ...]

    @property
    def result(self) -> Result:
        results = {cell.result for cell in self.cells}
        return next(result for result in WORST_FIRST if result in results)

    @property
    def word(self) -> str:
        """The worst result, the gap it is if it is one, and of how many if not of all."""
        worst = [cell for cell in self.cells if cell.result is self.result]
        gaps = sorted({cell.known_gap for cell in worst if cell.known_gap})
        word = ", ".join(gaps) if self.result is Result.KNOWN_GAP and gaps else RESULT_WORDS[self.result]
        return word if len(self.cells) == 1 else f"{word} {len(worst)} of {len(self.cells)}"

    @property
    def findings(self) -> Counter[Finding]:
        """How the judged loads of all cells came out, and how many each way, in order of appearance."""
        return Counter(Finding.of(load) for cell in self.cells for load in cell.judged_loads)

    @property
    def ends(self) -> Counter[tuple[VerdictStatus, Outcome]]:
        """`findings` without what the narrow reports leave out."""
        return Counter((load.verdict, load.outcome) for cell in self.cells for load in cell.judged_loads)

    @property
    def flags(self) -> tuple[str, ...]:
        """What `flag_of` says of any load of these cells, as expected or not."""
        found = {flag_of(cell, load) for cell in self.cells for load in cell.loads}
        return tuple(sorted(flag for flag in found if flag))


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario on one topology. `label` names the topology only where the scenario has several."""

    scenario: str
    topology: str
    label: str
    summary: str
    faults: tuple[str, ...]
    spots: dict[Policy, Spot]

    @property
    def fault(self) -> str:
        return " + ".join(self.faults) or "no fault"


def policies_of(run: RunResult) -> tuple[Policy, ...]:
    """The policies that occur in a run, in their usual order."""
    seen = {cell.policy for cell in run.cells}
    return tuple(policy for policy in Policy if policy in seen)


def rows_of(run: RunResult, roles: Iterable[Role] = (Role.FAULT,)) -> tuple[Row, ...]:
    """The rows of a run in plan order, from the cells of these roles."""
    wanted = set(roles)
    grouped: dict[tuple[str, str], dict[Policy, list[CellResult]]] = {}
    for cell in run.cells:
        if cell.role in wanted:
            grouped.setdefault((cell.scenario, cell.topology), {}).setdefault(cell.policy, []).append(cell)
    topologies = Counter(scenario for scenario, _ in grouped)
    rows = []
    for (scenario, topology), policies in grouped.items():
        first = next(iter(policies.values()))[0]
        spots = {policy: Spot(tuple(policies[policy])) for policy in Policy if policy in policies}
        label = f"{scenario} ({topology})" if topologies[scenario] > 1 else scenario
        rows.append(Row(scenario, topology, label, first.summary, first.faults, spots))
    return tuple(rows)


def by_fault(rows: Iterable[Row]) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """Rows with the same fault kinds together, in order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.fault, []).append(row)
    return tuple((fault, tuple(group)) for fault, group in groups.items())
