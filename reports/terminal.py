"""What a person sees when a run ends: the matrix, what needs them, and the headline last, where the eye is.

Everything is said in words, so that it reads the same without colour, in a log file and on a terminal without
Unicode. Text from a run is never markup and never a control sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reports.matrix import FLAG_MEANINGS, Row, Spot, policies_of, rows_of
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
    totals_sentence,
    twin_totals,
)
from reports.text import counted, visible
from reports.untested import untested_line
from reports.write import REPORT_FILES
from scenarios.words import Policy, Result

STYLES = {
    Result.PASS: "green",
    Result.FAIL: "bold red",
    Result.UNKNOWN: "bold yellow",
    Result.KNOWN_GAP: "magenta",
    Result.NOT_APPLICABLE: "dim",
}
SCENARIO = "scenario"
MAX_PROBLEMS = 20
MAX_LINES = 6
# A scenario's name may be folded down to this; with less room the matrix is printed as a list.
NAME_WIDTHS = (18, 32)
# A column's padding and divider.
_LEGEND = (
    "pass: came out as the scenario says it must. Below it verdict/outcome of the faulted requests; of all requests "
    "where the scenario has no fault."
)
GAP = 2


def print_run(run: RunResult, run_dir: Path | None = None, console: Console | None = None) -> None:
    """Print a finished run. `run_dir` is where its report files are, if they were written."""
    screen = _Screen(console or Console())
    screen.print(f"kvchaos {run.name} on {run.target}, seed {run.seed}", "bold")
    screen.print("")
    if rows := rows_of(run):
        _print_matrix(screen, rows, policies_of(run))
    _print_problems(screen, problems_of(run))
    _print_totals(screen, run)
    if run_dir is not None:
        screen.print("Reports", "bold")
        for name in REPORT_FILES:
            screen.print_whole(f"  {run_dir / name}")
        screen.print("")
    standing = standing_of(run)
    screen.print(f"{standing.word}: {standing.sentence}", STYLES[standing.result])
    for line in headline_lines(run):
        screen.print(line, "bold")
    screen.print(untested_line(run))


class _Screen:
    """A console, and the one way in which text gets onto it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.marks = not console.options.ascii_only

    def text(self, text: str, style: str = "") -> Text:
        """`text` without markup or control characters, and with only what the terminal's encoding has."""
        encoding = self.console.encoding
        return Text(visible(text).encode(encoding, "backslashreplace").decode(encoding), style=style)

    def print(self, text: str, style: str = "", indent: int = 0) -> None:
        shown = self.text(text, style)
        self.console.print(Padding(shown, (0, 0, 0, indent), expand=False) if indent else shown)

    def print_whole(self, text: str) -> None:
        """One line however long, so that what is copied from it is what was printed."""
        self.console.print(self.text(text), soft_wrap=True)

    def print_some(self, lines: Sequence[str], indent: int) -> None:
        for line in lines[:MAX_LINES]:
            self.print(f"- {line}", indent=indent)
        if len(lines) > MAX_LINES:
            self.print(f"- and {len(lines) - MAX_LINES} more", indent=indent)

    def label(self, spot: Spot) -> str:
        return f"{RESULT_MARKS[spot.result]} {spot.word}" if self.marks else spot.word


Layout = Callable[[_Screen, Spot], list[str]]


def _ends(spot: Spot) -> list[tuple[str, str]]:
    """How the judged requests ended: verdict and outcome, with a count where they differ."""
    if not spot.ends:
        return [("no request", "")] if spot.result is not Result.NOT_APPLICABLE else []
    several = len(spot.ends) > 1
    return [(f"{count}x {verdict}" if several else verdict, outcome) for (verdict, outcome), count in spot.ends.items()]


def _wide(screen: _Screen, spot: Spot) -> list[str]:
    ends = ["/".join(filter(None, end)) for end in _ends(spot)]
    return [f"{screen.label(spot)}  {', '.join(['; '.join(ends), *spot.flags])}".rstrip()]


def _medium(screen: _Screen, spot: Spot) -> list[str]:
    return [screen.label(spot), *("/".join(filter(None, end)) for end in _ends(spot)), *spot.flags]


def _narrow(screen: _Screen, spot: Spot) -> list[str]:
    return [screen.label(spot), *(part for end in _ends(spot) for part in end if part), *spot.flags]


def _print_matrix(screen: _Screen, rows: Sequence[Row], policies: Sequence[Policy]) -> None:
    """The widest layout that fits; a list where none does."""
    longest = max(len(SCENARIO), *(len(visible(row.label)) for row in rows))
    for layout in (_wide, _medium, _narrow):
        widths = [_width(screen, rows, policy, layout) for policy in policies]
        room = screen.console.width - sum(width + GAP for width in widths) - GAP
        if room >= min(longest, NAME_WIDTHS[layout is not _narrow]):
            name_width = min(longest, room)
            screen.console.print(_table(screen, rows, policies, layout, [name_width, *widths]))
            break
    else:
        _print_list(screen, rows, policies)
    screen.print("")
    screen.print(_LEGEND, "dim")
    flags = {flag for row in rows for spot in row.spots.values() for flag in spot.flags}
    for flag in sorted(flags):
        screen.print(FLAG_MEANINGS[flag], "dim")
    screen.print("")


def _width(screen: _Screen, rows: Sequence[Row], policy: Policy, layout: Layout) -> int:
    cells = [line for row in rows for line in _lines(screen, row, policy, layout)]
    return max(len(line) for line in [*cells, *_header(policy, layout)])


def _lines(screen: _Screen, row: Row, policy: Policy, layout: Layout) -> list[str]:
    spot = row.spots.get(policy)
    return layout(screen, spot) if spot else ["not run"]


def _header(policy: Policy, layout: Layout) -> list[str]:
    if layout is _narrow and policy.fail_closed:
        return ["fail_closed", policy.removeprefix("fail_closed")]
    return [policy]


def _table(
    screen: _Screen, rows: Sequence[Row], policies: Sequence[Policy], layout: Layout, widths: Sequence[int]
) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), leading=0 if layout is _wide else 1
    )
    table.add_column(SCENARIO, width=widths[0], overflow="fold")
    for policy, width in zip(policies, widths[1:], strict=True):
        table.add_column("\n".join(_header(policy, layout)), width=width, overflow="fold")
    for row in rows:
        cells = [_styled(screen, row.spots.get(policy), _lines(screen, row, policy, layout)) for policy in policies]
        table.add_row(screen.text(row.label), *cells)
    return table


def _styled(screen: _Screen, spot: Spot | None, lines: Sequence[str]) -> Text:
    """The result in its colour, what follows it plain."""
    text = Text("\n").join(screen.text(line) for line in lines)
    if spot is None:
        text.stylize("dim")
    else:
        text.stylize(STYLES[spot.result], 0, len(screen.label(spot)))
    return text


def _print_list(screen: _Screen, rows: Sequence[Row], policies: Sequence[Policy]) -> None:
    for row in rows:
        screen.print(row.label, "bold")
        for policy in policies:
            (line,) = _lines(screen, row, policy, _wide)
            spot = row.spots.get(policy)
            screen.print(f"{policy}: {line}", STYLES[spot.result] if spot else "dim", indent=2)


def _print_problems(screen: _Screen, cells: Sequence[CellResult]) -> None:
    for cell in cells[:MAX_PROBLEMS]:
        mark = f"{RESULT_MARKS[cell.result]} " if screen.marks else ""
        screen.print(f"{mark}{RESULT_WORDS[cell.result]}: {cell_title(cell)}", STYLES[cell.result])
        screen.print("why", indent=2)
        screen.print_some(reasons(cell), indent=4)
        screen.print("evidence", indent=2)
        screen.print_some([evidence_line(item) for item in cell.evidence] or [no_evidence(cell)], indent=4)
        screen.print("rerun", indent=2)
        screen.print_whole(f"    {cell.rerun}")
        screen.print("")
    left = len(cells) - MAX_PROBLEMS
    if left > 0:
        screen.print(f"{counted(left, 'more failed or unknown cell')}: see the reports.", "bold")
        screen.print("")


def _print_totals(screen: _Screen, run: RunResult) -> None:
    if not run.cells:
        return
    screen.print(f"{counted(len(run.cells), 'cell')}: {totals_sentence(run)}. {twin_totals(run)}".rstrip())
    for line in _not_applicable(run):
        screen.print(line, indent=2)
    for note in notes(run):
        screen.print(note)
    screen.print("")


def _not_applicable(run: RunResult) -> list[str]:
    """Why cells did not apply, the most common reason first."""
    why = Counter("; ".join(reasons(cell)) for cell in run.cells if cell.result is Result.NOT_APPLICABLE)
    lines = [f"n/a in {counted(count, 'cell')}: {reason}" for reason, count in why.most_common()]
    left = len(lines) - MAX_LINES
    return lines if left <= 0 else [*lines[:MAX_LINES], f"n/a for {counted(left, 'other reason')}: see the reports."]
