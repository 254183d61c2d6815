"""summary.md: the run on the page of a CI job, headline first.

GitHub drops a step summary of more than 1 MiB whole, so this one has a budget: what does not fit is left out from
the end of its section, and the summary says how much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from reports.matrix import Row, Spot, policies_of, rows_of
from reports.results import CellResult, RunResult
from reports.summary import (
    RESULT_MARKS,
    RESULT_WORDS,
    cell_title,
    evidence_line,
    headline_lines,
    no_evidence,
    notes,
    problems_of,
    reasons,
    standing_of,
    twin_totals,
)
from reports.text import clip, counted, visible
from reports.untested import untested
from scenarios.words import Policy, Result, Role

# Below GitHub's limit with room for what a workflow appends itself.
LIMIT_BYTES = 900_000
# The matrix may not take the room of the problems, which come after it.
MATRIX_BYTES = 500_000
MAX_ROWS = 400
MAX_PROBLEMS = 100
MAX_LINES = 8
MAX_CHARACTERS = 400

_SPECIAL = re.compile(r"[\\`*_{}\[\]<>|~#$&]")


def summary_markdown(run: RunResult) -> str:
    """The whole page."""
    standing = standing_of(run)
    page = [
        f"# kvchaos: {standing.word}",
        "",
        *(f"**{escape(line)}**  " for line in headline_lines(run)),
        "",
        escape(standing.sentence),
        "",
        *(f"- {escape(note)}" for note in notes(run)),
        "",
        f"Run {escape(run.name)} on target {escape(run.target)}, seed {run.seed}. {twin_totals(run)}".rstrip(),
    ]
    page += ["", "## Not tested", "", *(f"- {escape(part.whole)}" for part in untested(run))]
    page += _totals(run)
    page += _matrix(run)
    page += _problems(run, LIMIT_BYTES - _size(page))
    return "\n".join(page) + "\n"


def escape(text: str) -> str:
    """`text` so that GitHub shows it as it is: no markup, no HTML, no table cell of its own."""
    clipped = clip(visible(text), MAX_CHARACTERS)
    return _SPECIAL.sub(lambda match: f"&#{ord(match.group())};", clipped)


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _fill(blocks: Iterable[Sequence[str]], budget: int, most: int) -> tuple[list[str], int]:
    """The lines of as many blocks as fit, and how many blocks did not."""
    lines: list[str] = []
    taken = total = 0
    for block in blocks:
        total += 1
        cost = _size(block)
        if taken == total - 1 and taken < most and cost <= budget:
            lines += block
            budget -= cost
            taken += 1
    return lines, total - taken


def _totals(run: RunResult) -> list[str]:
    if not run.cells:
        return []
    shown = [result for result in Result if run.totals[result]]
    return [
        "",
        "| " + " | ".join(f"{RESULT_MARKS[result]} {RESULT_WORDS[result]}" for result in shown) + " |",
        "|" + " ---: |" * len(shown),
        "| " + " | ".join(str(run.totals[result]) for result in shown) + " |",
    ]


def _matrix(run: RunResult) -> list[str]:
    rows = rows_of(run)
    if not rows:
        return []
    policies = policies_of(run)
    lines, left = _fill(([_row(row, policies)] for row in rows), MATRIX_BYTES, MAX_ROWS)
    return [
        "",
        "## Scenarios",
        "",
        "Verdict / outcome of the faulted requests; of all requests where the scenario has no fault.",
        "",
        "| Scenario | Fault | " + " | ".join(f"`{policy}`" for policy in policies) + " |",
        "|" + " --- |" * (len(policies) + 2),
        *lines,
        *(["", f"{counted(left, 'more row')} left out: see `report.html`."] if left else []),
    ]


def _row(row: Row, policies: Sequence[Policy]) -> str:
    spots = (_spot(row.spots.get(policy)) for policy in policies)
    return f"| {escape(row.label)} | {escape(row.fault)} | " + " | ".join(spots) + " |"


def _spot(spot: Spot | None) -> str:
    if spot is None:
        return "not run"
    lines = [f"{RESULT_MARKS[spot.result]} {escape(spot.word)}"]
    several = len(spot.ends) > 1
    for (verdict, outcome), count in spot.ends.items():
        lines.append(f"{verdict} / {outcome}{f' ×{count}' if several else ''}")  # noqa: RUF001 - the sign itself
    lines += [f"**{flag} corruption**" for flag in spot.flags]
    return "<br>".join(lines)


def _problems(run: RunResult, budget: int) -> list[str]:
    cells = problems_of(run)
    if not cells:
        return []
    heading = ["", "## Failed and unknown cells", ""]
    last = "more cells left out: see `report.html`."
    lines, left = _fill((_problem(cell) for cell in cells), budget - _size([*heading, last]) - 20, MAX_PROBLEMS)
    return [*heading, *lines, *([f"{counted(left, 'more cell')} left out: see `report.html`."] if left else [])]


def _problem(cell: CellResult) -> list[str]:
    evidence = [evidence_line(item) for item in cell.evidence] or [no_evidence(cell)]
    command = visible(cell.rerun)
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    role = "" if cell.role is Role.FAULT else f" {cell.role}"
    return [
        f"### {RESULT_MARKS[cell.result]} {RESULT_WORDS[cell.result]}{role}: {escape(cell_title(cell))}",
        "",
        *_bullets(reasons(cell)),
        "",
        "Evidence:",
        "",
        *_bullets(evidence),
        "",
        f"{fence}sh",
        command,
        fence,
        "",
    ]


def _bullets(lines: Sequence[str]) -> list[str]:
    left = len(lines) - MAX_LINES
    more = [f"- and {left} more"] if left > 0 else []
    return [*(f"- {escape(line)}" for line in lines[:MAX_LINES]), *more]
