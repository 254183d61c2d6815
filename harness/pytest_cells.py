"""The half of the pytest plugin that needs the rest of kvchaos: reads, runs, and says what was judged.

Apart from `kvchaos_pytest`, so that a pytest without scenarios imports none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from engine.errors import KVChaosError
from harness.api import Runs, checked_seed, checked_target, known_policy
from reports.results import CellResult, LoadResult
from reports.summary import RESULT_WORDS, cell_title, evidence_line, expectation, no_evidence, reasons
from reports.text import visible
from scenarios.loader import load_scenario
from scenarios.problems import ScenarioError
from scenarios.schema import Scenario
from scenarios.words import Result, Role

UNKNOWN = "unknown: nothing was shown here, neither that it is right nor that it is wrong; an unknown never passes"
MAX_LINES = 6


class Unusable(Exception):  # noqa: N818 - pytest turns it into an error of its own
    """A scenario or an option that cannot be used; the text has a line for each problem."""


class JudgedError(Exception):
    """A cell, or its clean twin, that did not come out as the scenario says."""

    def __init__(self, results: Sequence[CellResult]) -> None:
        super().__init__(headline(results[0]))
        self.results = tuple(results)


def shown_path(path: Path, config: pytest.Config) -> str:
    """A path as a person would give it where pytest was started."""
    try:
        return os.path.relpath(path, config.invocation_params.dir)
    except ValueError:  # another drive
        return str(path)


def read_scenario(path: Path, file: str) -> Scenario:
    """Read a scenario file. `file` is the name that problems give.

    Raises:
        Unusable: with every problem of the file.
    """
    try:
        return load_scenario(path)
    except ScenarioError as error:
        problems = (replace(problem, file=file) for problem in error.problems)
        raise Unusable("\n".join(map(str, problems))) from None


def runs_of(options: Any) -> Runs:
    """What runs cells as the options say.

    Raises:
        Unusable: there is no such target, or the seed is none.
    """
    try:
        return Runs(checked_seed(options.kvchaos_seed), checked_target(options.kvchaos_target))
    except ScenarioError as error:
        raise Unusable(_of_option(error)) from None


def check_policies(names: Iterable[str]) -> None:
    """Refuse what is no policy.

    Raises:
        Unusable: a name is no policy's.
    """
    try:
        for name in names:
            known_policy(name)
    except ScenarioError as error:
        raise Unusable(_of_option(error)) from None


def _of_option(error: ScenarioError) -> str:
    return "\n".join(f"--kvchaos-{problem.field}: {problem.message}" for problem in error.problems)


def properties(cell: CellResult) -> list[tuple[str, object]]:
    """The user properties of a test, which are those of `kvchaos run`'s junit.xml."""
    found: list[tuple[str, object]] = [
        ("id", cell.id),
        ("topology", cell.topology),
        ("seed", str(cell.seed)),
        ("result", str(cell.result)),
    ]
    return found if cell.known_gap is None else [*found, ("known_gap", cell.known_gap)]


def require_good(results: Sequence[CellResult]) -> None:
    """Return if a cell, and its twin if it has one, came out as they must.

    Raises:
        pytest.skip.Exception: the target cannot run the cell.
        JudgedError: something failed or is unknown.
    """
    if results[0].result is Result.NOT_APPLICABLE:
        raise pytest.skip.Exception(f"not applicable: {reasons(results[0])[0]}", _use_item_location=True)
    bad = [cell for cell in results if cell.result not in (Result.PASS, Result.KNOWN_GAP)]
    if bad:
        raise JudgedError(bad)


def headline(cell: CellResult) -> str:
    """A judgement in one line: what pytest's summary shows."""
    twin = "the clean twin: " if cell.role is Role.TWIN else ""
    more = f" (and {len(reasons(cell)) - 1} more)" if len(reasons(cell)) > 1 else ""
    return f"{RESULT_WORDS[cell.result].lower()}: {twin}{reasons(cell)[0]}{more}"


def judgement(error: BaseException, file: str) -> ReprExceptionInfo | None:
    """How pytest shows what was judged, or an error that says itself what to do; None for anything else."""
    if isinstance(error, JudgedError):
        message, text = str(error), "\n\n".join("\n".join(_told(cell)) for cell in error.results)
    elif isinstance(error, KVChaosError | Unusable):
        message = text = str(error)
    else:
        return None
    # pytest's own classes: pytest-xdist sends these from its workers, and the summary finds the message in them.
    entry = ReprEntryNative([text + "\n"])
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback([entry], extraline=None, style="native"),
        reprcrash=ReprFileLocation(file, 1, message.partition("\n")[0]),
    )


def _told(cell: CellResult) -> Iterator[str]:
    """A judged cell, for somebody who has not seen the scenario."""
    twin = "the clean twin of it, which no fault touches: " if cell.role is Role.TWIN else ""
    yield f"{RESULT_WORDS[cell.result]}: {twin}{cell_title(cell)}"
    yield f"  {visible(cell.summary)}"
    if cell.result is Result.UNKNOWN:
        yield f"  {UNKNOWN}"
    yield from _section("why", reasons(cell))
    yield from _section("expected", _expected(cell))
    yield from _section("found", [_found(load) for load in _shown_loads(cell)])
    yield from _section("damage", [line for load in _shown_loads(cell) for line in _damage(load)])
    yield from _section("evidence", [evidence_line(item) for item in cell.evidence] or [no_evidence(cell)])
    yield from _section("rerun", [visible(cell.rerun)])


def _section(name: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield name
    yield from (f"  {line}" for line in lines[:MAX_LINES])
    if len(lines) > MAX_LINES:
        yield f"  and {len(lines) - MAX_LINES} more"


def _expected(cell: CellResult) -> list[str]:
    kinds = {load.faulted: cell.expected_of(load) for load in cell.loads}
    words = {True: "loads with a fault", False: "other loads" if True in kinds else "every load"}
    return [f"{words[faulted]}: {expectation(kinds[faulted])}" for faulted in sorted(kinds, reverse=True)]


def _shown_loads(cell: CellResult) -> list[LoadResult]:
    """The faulted loads, and the others that a reason names."""
    told = " ".join(cell.why)
    return [load for load in cell.loads if load.faulted or f"{load.request_id} " in told] or list(cell.loads)


def _found(load: LoadResult) -> str:
    words = [f"verdict {load.verdict}", f"outcome {load.outcome}", f"truth {load.truth}", f"tokens {load.tokens}"]
    if load.reason is not None:
        words.insert(1, f"reason {load.reason}")
    return visible(f"{load.request_id} (load {load.load}): {', '.join(words)}")


def _damage(load: LoadResult) -> list[str]:
    return [visible(f"{load.request_id}: {text}") for text in (load.damage, *load.diagnosis) if text]
