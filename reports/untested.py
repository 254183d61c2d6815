"""What a run did not test, so that its headline is not read as more than it is.

Every sentence is about this run only. A known gap or a kind of fault counts as tested when a cell with it was judged:
one that did not apply, or that is unknown, has shown nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from faults.registry import FAULTS
from reports.gaps import GAPS
from reports.results import CellResult, RunResult
from reports.summary import reasons
from reports.text import counted, listed, visible
from scenarios.words import Policy, Result, Role

# The fault of the clean twin: it does nothing, so nothing is missing where it was not run.
NOTHING = "noop"
TARGET_LIMITS = {"sim": "no real transport, process or network"}
MAX_REASONS = 6


@dataclass(frozen=True, slots=True)
class Untested:
    """One thing that a run left out: in a few words, in a sentence, and item by item where there are several.

    `named` is the sentence with the items in it, for where they are not listed.
    """

    short: str
    sentence: str
    details: tuple[tuple[str, str], ...] = ()
    named: str = ""

    @property
    def whole(self) -> str:
        """The sentence, with all that it is about."""
        return self.named or self.sentence


def untested(run: RunResult) -> tuple[Untested, ...]:
    """What was left out, the most telling first. Never empty: no run tests everything."""
    cells = [cell for cell in run.cells if cell.role is Role.FAULT]
    if not cells:
        return (Untested("everything", "Nothing was tested: no cell was run."),)
    judged = [cell for cell in cells if cell.result not in (Result.NOT_APPLICABLE, Result.UNKNOWN)]
    parts = (_interrupted(run), _policies(judged), _gaps(judged), _kinds(judged), _not_applicable(cells))
    return (*(part for found in parts for part in found), _target(run), _seeds(run, cells))


def untested_line(run: RunResult) -> str:
    """All of it in one line."""
    return f"Not tested: {'; '.join(part.short for part in untested(run))}."


def _interrupted(run: RunResult) -> Iterator[Untested]:
    if run.interrupted:
        yield Untested("what the stopped run did not reach", "The run was stopped: what it did not reach is not here.")


def _policies(judged: Sequence[CellResult]) -> Iterator[Untested]:
    seen = {cell.policy for cell in judged}
    left = [str(policy) for policy in Policy if policy not in seen]
    if left:
        noun = "policy" if len(left) == 1 else "policies"
        yield Untested(f"{noun} {listed(left)}", f"No cell was judged under {noun} {listed(left)}.")


def _gaps(judged: Sequence[CellResult]) -> Iterator[Untested]:
    seen = {cell.known_gap for cell in judged}
    left = tuple((gap, meaning) for gap, meaning in GAPS.items() if gap not in seen)
    if left:
        said = f"{len(left)} of the {len(GAPS)} known gaps had no cell"
        names = listed([gap for gap, _ in left])
        yield Untested(f"{len(left)} of {len(GAPS)} known gaps", f"{said}.", left, f"{said}: {names}.")


def _kinds(judged: Sequence[CellResult]) -> Iterator[Untested]:
    seen = {kind for cell in judged for kind in cell.faults}
    left = [kind for kind in sorted(FAULTS) if kind not in seen and kind != NOTHING]
    if left:
        known = len(FAULTS) - (NOTHING in FAULTS)
        verb = "was" if len(left) == 1 else "were"
        sentence = f"{len(left)} of the {known} kinds of fault {verb} judged in no cell: {listed(left)}."
        yield Untested(f"{len(left)} of {known} kinds of fault", sentence)


def _not_applicable(cells: Sequence[CellResult]) -> Iterator[Untested]:
    """What did not apply: how many cells, which faults, and what was missing."""
    kinds: dict[str, set[str]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for cell in cells:
        if cell.result is Result.NOT_APPLICABLE:
            why = "; ".join(reasons(cell))
            counts[why] += 1
            kinds[why] |= set(cell.faults)
    if not counts:
        return
    total = counted(sum(counts.values()), "cell")
    items = [
        (visible(listed(sorted(kinds[why])) or "no fault"), f"{counted(count, 'cell')}: {why}")
        for why, count in counts.most_common(MAX_REASONS)
    ]
    left = len(counts) - len(items)
    if left:
        items.append(("others", f"{counted(left, 'other reason')}: see the cells"))
    said = f"{total} did not apply"
    names = "; ".join(f"{name} ({why})" for name, why in items)
    yield Untested(f"{total} that did not apply", f"{said}.", tuple(items), f"{said}: {names}.")


def _target(run: RunResult) -> Untested:
    target = visible(run.target)
    limits = f": {TARGET_LIMITS[run.target]}" if run.target in TARGET_LIMITS else ""
    return Untested(f"any target but {target}", f"Only target {target} was run{limits}.")


def _seeds(run: RunResult, cells: Sequence[CellResult]) -> Untested:
    """Seeds per scenario, topology and policy. With one, luck is not told from rule."""
    seeds: dict[tuple[str, str, Policy], set[int]] = defaultdict(set)
    for cell in cells:
        seeds[cell.scenario, cell.topology, cell.policy].add(cell.seed)
    fewest = min(len(found) for found in seeds.values())
    if fewest == 1:
        some = "Each cell" if max(len(found) for found in seeds.values()) == 1 else "Some of the cells"
        sentence = f"{some} ran with one seed only (the run's is {run.seed}): with others it may come out otherwise."
        return Untested("more than one seed", sentence)
    return Untested(f"more than {fewest} seeds", f"At least {fewest} seeds for each scenario and policy, and no more.")
