"""report.html: one file with everything in it, to be read from a CI artifact or a mail, years later, offline.

This builds what the templates show. They only lay it out: no decision about a result is taken in a template. Nothing
is loaded from anywhere: a policy in the page forbids it, and allows exactly the one style and the one script that are
written into it, by their digests, so that a hostile string could not run or load anything either. The page is
complete without the script, which only filters and copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from jinja2 import Environment
from markupsafe import Markup, escape

from reports.matrix import Row, by_fault, policies_of, rows_of
from reports.page import environment, inlined
from reports.results import CellResult, RunResult
from reports.summary import (
    RESULT_MARKS,
    RESULT_WORDS,
    headline_lines,
    no_evidence,
    notes,
    problems_of,
    reasons,
    standing_of,
    twin_totals,
)
from reports.text import counted, visible
from reports.untested import untested, untested_line
from reports.views import NO_FAULT, Section, cell_view, slug
from scenarios.words import Result, Role

# Seeds that a place of the matrix links to; all of them are below it.
MAX_LINKS = 6
# Cells that get a section: the page stays one that a browser opens at once. Those that need a person come first.
MAX_SECTIONS = 1000
MAX_HYPOTHESES = 5
STYLES = ("style.css", "cell.css")
SCRIPT = "page.js"


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
            untested=untested(run),
            untested_line=untested_line(run).removeprefix("Not tested: "),
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
            numbers=_numbers(anchors),
            choices=_choices(run),
            **inlined(STYLES, SCRIPT),
        )
    )


def _choices(run: RunResult) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The filters: name, label, and the values that occur, each with its words."""
    seen = {cell.result for cell in run.cells}
    kinds = {slug(kind): kind for cell in run.cells for kind in cell.faults or (NO_FAULT,)}
    return [
        ("result", "Result", [(result, RESULT_WORDS[result].lower()) for result in Result if result in seen]),
        ("policy", "Policy", [(policy, policy) for policy in policies_of(run)]),
        ("fault", "Fault", sorted(kinds.items())),
    ]


def _statement(line: str) -> tuple[str, str, str]:
    """A headline in three: what it is about, its count (if it has one), the rest."""
    about, said = line.split(": ", 1)
    count = re.match(r"\d+ of \d+(?= )", said)
    return (about, count.group(), said[count.end() :]) if count else (about, "", said)


def _environment() -> Environment:
    found = environment()
    found.globals.update(
        MARKS=RESULT_MARKS,
        WORDS=RESULT_WORDS,
        MAX_LINKS=MAX_LINKS,
        MAX_HYPOTHESES=MAX_HYPOTHESES,
        counted=counted,
        NO_FAULT=NO_FAULT,
        no_evidence=no_evidence,
        reasons=reasons,
        id=id,
        slug=slug,
    )
    found.filters["unbroken"] = _unbroken
    return found


def _unbroken(text: str) -> Markup:
    """`text` in which no line ends inside the name of a gap."""
    return Markup(re.sub(r"GAP-\d+(?:: \d+)?", r'<span class="nb">\g<0></span>', str(escape(visible(text)))))


def _anchors(cells: Sequence[CellResult], problems: Sequence[CellResult]) -> dict[int, str]:
    """A place in the page for each cell object that gets a section.

    It comes from the cell's own id, so that a link into a report still leads there after a rerun.
    """
    anchors: dict[int, str] = {}
    used: set[str] = set()
    troubled = {id(cell) for cell in problems}
    for cell in (*problems, *(cell for cell in cells if id(cell) not in troubled))[:MAX_SECTIONS]:
        wanted = "cell-" + slug(cell.id)
        anchor, number = wanted, 2
        while anchor in used:
            anchor, number = f"{wanted}-{number}", number + 1
        used.add(anchor)
        anchors[id(cell)] = anchor
    return anchors


def _numbers(anchors: Mapping[int, str]) -> dict[int, int]:
    """What the filter calls the cells that have a section."""
    return {cell: number for number, cell in enumerate(anchors)}


def _sections(rows: Iterable[Row], anchors: Mapping[int, str], run: RunResult) -> list[Section]:
    numbers = _numbers(anchors)
    by_id = {cell.id: anchors[id(cell)] for cell in reversed(run.cells) if id(cell) in anchors}
    sections = []
    for row in rows:
        places = [(cell, number) for spot in row.spots.values() for number, cell in enumerate(spot.cells)]
        views = [
            cell_view(cell, anchors[id(cell)], numbers[id(cell)], by_id, linked=number < MAX_LINKS)
            for cell, number in places
            if id(cell) in anchors
        ]
        if views:
            sections.append(Section(row, tuple(views)))
    return sections
