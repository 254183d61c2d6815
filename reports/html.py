"""report.html: one file with everything in it, to be read from a CI artifact or a mail, years later, offline.

This builds what the templates show. They only lay it out: no decision about a result is taken in a template. Nothing
is loaded from anywhere: a policy in the page forbids it, so that a hostile string could not either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from reports.matrix import Row, by_fault, flag_of, policies_of, rows_of
from reports.results import CellResult, Expected, GroupCoverage, LoadResult, RunResult
from reports.summary import (
    RESULT_MARKS,
    RESULT_WORDS,
    evidence_line,
    expectation,
    headline_lines,
    no_evidence,
    notes,
    problems_of,
    reasons,
    standing_of,
    twin_totals,
)
from reports.text import clip, counted, ranges, visible
from scenarios.words import Result, Role, Tokens

# How many tokens around the first difference are shown, and how many of them come before it.
TOKENS_SHOWN = 24
TOKENS_BEFORE = 6
# Seeds that a place of the matrix links to; all of them are below it.
MAX_LINKS = 6
# Cells that get a section: the page stays one that a browser opens at once. Those that need a person come first.
MAX_SECTIONS = 1000
MAX_POSITIONS_TEXT = 120


@dataclass(frozen=True, slots=True)
class Found:
    """What came out, and what should have. `met` is None where nothing was said."""

    value: str
    wanted: str | None
    met: bool | None


@dataclass(frozen=True, slots=True)
class Token:
    """One column of a token comparison; None where one side has no token left."""

    position: int
    got: int | None
    wanted: int | None
    first: bool


@dataclass(frozen=True, slots=True)
class TokenDiff:
    sentence: str
    shown: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    group: str
    status: str
    loaded: str
    compared: str
    not_compared: str
    differing: str


@dataclass(frozen=True, slots=True)
class LoadView:
    """A row of a cell's table of loads."""

    load: LoadResult
    verdict: Found
    outcome: Found
    truth: Found
    tokens: Found
    corrupted: str
    coverage: tuple[Coverage, ...]
    diff: TokenDiff | None
    flag: str | None


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell's section. `anchor` is its place in the page, `back` where it is linked from, `twin_anchor` its twin's."""

    cell: CellResult
    anchor: str
    back: str
    twin_anchor: str | None
    reasons: tuple[str, ...]
    expected: str
    others: str | None
    loads: tuple[LoadView, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """The cells of one row, one below the other."""

    row: Row
    cells: tuple[CellView, ...]


def report_html(run: RunResult) -> str:
    """The whole page."""
    problems = problems_of(run)
    anchors = _anchors(run.cells, problems)
    fault_rows = rows_of(run)
    other_rows = rows_of(run, (Role.TWIN, Role.REPEAT))
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            standing=standing_of(run),
            headline=[_statement(line) for line in headline_lines(run)],
            notes=notes(run),
            totals=[(result, run.totals[result]) for result in Result],
            twins=twin_totals(run),
            policies=policies_of(run),
            groups=by_fault(fault_rows),
            problems=[(anchors[id(cell)], cell, reasons(cell)[0]) for cell in problems if id(cell) in anchors],
            problems_left=sum(id(cell) not in anchors for cell in problems),
            cells_left=len(run.cells) - len(anchors),
            sections=_sections(fault_rows, anchors, run),
            other_rows=other_rows,
            other_sections=_sections(other_rows, anchors, run),
            anchors=anchors,
        )
    )


def _statement(line: str) -> tuple[str, str, str]:
    """A headline in three: what it is about, its count (if it has one), the rest."""
    about, said = line.split(": ", 1)
    count = re.match(r"\d+ of \d+(?= )", said)
    return (about, count.group(), said[count.end() :]) if count else (about, "", said)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.globals.update(
        MARKS=RESULT_MARKS,
        WORDS=RESULT_WORDS,
        MAX_LINKS=MAX_LINKS,
        counted=counted,
        no_evidence=no_evidence,
        reasons=reasons,
        id=id,
    )
    environment.filters["evidence"] = evidence_line
    return environment


def _shown(value: object) -> object:
    """What every expression of a template goes through on its way to the page, before it is escaped."""
    return visible(str(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _anchors(cells: Sequence[CellResult], problems: Sequence[CellResult]) -> dict[int, str]:
    """A place in the page for each cell object that gets a section.

    It comes from the cell's own id, so that a link into a report still leads there after a rerun.
    """
    anchors: dict[int, str] = {}
    used: set[str] = set()
    troubled = {id(cell) for cell in problems}
    for cell in (*problems, *(cell for cell in cells if id(cell) not in troubled))[:MAX_SECTIONS]:
        wanted = "cell-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", cell.id)
        anchor, number = wanted, 2
        while anchor in used:
            anchor, number = f"{wanted}-{number}", number + 1
        used.add(anchor)
        anchors[id(cell)] = anchor
    return anchors


def _sections(rows: Iterable[Row], anchors: Mapping[int, str], run: RunResult) -> list[Section]:
    by_id = {cell.id: anchors[id(cell)] for cell in reversed(run.cells) if id(cell) in anchors}
    sections = []
    for row in rows:
        places = [(cell, number) for spot in row.spots.values() for number, cell in enumerate(spot.cells)]
        views = [
            _cell(cell, anchors[id(cell)], by_id, linked=number < MAX_LINKS)
            for cell, number in places
            if id(cell) in anchors
        ]
        if views:
            sections.append(Section(row, tuple(views)))
    return sections


def _cell(cell: CellResult, anchor: str, by_id: Mapping[str, str], *, linked: bool) -> CellView:
    table = "matrix" if cell.role is Role.FAULT else "twins"
    told = bool(cell.why or cell.violations) or cell.result in (Result.FAIL, Result.UNKNOWN, Result.NOT_APPLICABLE)
    apart = any(load.faulted for load in cell.loads) and not all(load.faulted for load in cell.loads)
    return CellView(
        cell=cell,
        anchor=anchor,
        back=f"in-{anchor}" if linked else table,
        twin_anchor=by_id.get(cell.twin) if cell.twin is not None else None,
        reasons=reasons(cell) if told else (),
        expected=expectation(cell.expected),
        others=expectation(cell.others) if apart and cell.others is not None else None,
        loads=tuple(_load(cell, load) for load in cell.loads),
    )


def _load(cell: CellResult, load: LoadResult) -> LoadView:
    wanted = cell.expected_of(load) or Expected()
    return LoadView(
        load=load,
        verdict=_verdict(load, wanted),
        outcome=_found(load.outcome, wanted.outcome),
        truth=_found(load.truth, wanted.truth),
        tokens=_found(load.tokens, wanted.tokens),
        corrupted=_positions(load.corrupted_positions),
        coverage=tuple(_coverage(group) for group in load.groups),
        diff=_diff(load),
        flag=flag_of(cell, load),
    )


def _found(value: StrEnum, wanted: StrEnum | None) -> Found:
    return Found(value, wanted, None if wanted is None else value == wanted)


def _verdict(load: LoadResult, wanted: Expected) -> Found:
    value = _with_reason(load.verdict, load.reason)
    if wanted.verdict is None:
        return Found(value, None, None)
    met = load.verdict == wanted.verdict and wanted.reason in (None, load.reason)
    return Found(value, _with_reason(wanted.verdict, wanted.reason), met)


def _with_reason(status: str, reason: str | None) -> str:
    return f"{status} ({reason})" if reason is not None else status


def _coverage(group: GroupCoverage) -> Coverage:
    return Coverage(
        group=str(group.group_id),
        status=_with_reason(group.status, group.reason),
        loaded=_positions(group.loaded),
        compared=_positions(group.compared),
        not_compared=_positions(group.not_compared),
        differing=_positions(group.differing),
    )


def _positions(positions: tuple[int, ...]) -> str:
    if not positions:
        return "none"
    return f"{len(positions)} ({clip(ranges(positions), MAX_POSITIONS_TEXT)})"


def _diff(load: LoadResult) -> TokenDiff | None:
    """Where an answer leaves the token oracle's; None if it does not, or if there was no answer to compare."""
    got, wanted = load.tokens_got, load.tokens_wanted
    if got == wanted or (load.tokens is Tokens.NONE and not got):
        return None
    common = min(len(got), len(wanted))
    first = next((i for i in range(common) if got[i] != wanted[i]), common)
    longest = max(len(got), len(wanted))
    start = max(0, first - TOKENS_BEFORE)
    shown = tuple(
        Token(i, got[i] if i < len(got) else None, wanted[i] if i < len(wanted) else None, i == first)
        for i in range(start, min(longest, start + TOKENS_SHOWN))
    )
    differing = sum(a != b for a, b in zip(got, wanted, strict=False)) + longest - common
    left = longest - len(shown)
    sentence = (
        f"Load {load.load}: got {counted(len(got), 'token')}, wanted {len(wanted)}; {differing} "
        f"{'differs' if differing == 1 else 'differ'}, the first at position {first}, counted from 0."
    )
    return TokenDiff(f"{sentence} {left} more not shown." if left else sentence, shown)
