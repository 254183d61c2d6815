"""What of a cell's timeline its section shows: the requests that it is about, in a table and as a strip of lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.results import CellResult, TimelineEvent
from reports.strip import Strip, strip_of
from reports.text import counted, listed, visible
from scenarios.words import Outcome, Result, Role, VerdictStatus

# Rows of a cell that needs a person, and of any other.
MAX_ROWS_PROBLEM = 120
MAX_ROWS = 40
PROBLEMS = (Result.FAIL, Result.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Story:
    """`about` names the requests, `aside` are rows of others, `left_out` says what is not in `rows`.

    A twin that passed has no strip.
    """

    about: str
    rows: tuple[TimelineEvent, ...]
    aside: frozenset[TimelineEvent]
    left_out: str | None
    strip: Strip | None
    opened: bool


def story_of(cell: CellResult) -> Story | None:
    """None where nothing was recorded."""
    if not cell.timeline:
        return None
    focus = _focus(cell)
    own = [event for event in cell.timeline if _is_about(event, focus, cell)]
    troubled = cell.result in PROBLEMS
    wanted, most = (list(cell.timeline), MAX_ROWS_PROBLEM) if troubled else (own, MAX_ROWS)
    rows = _middle_cut(wanted, most)
    named = focus if not troubled else tuple(load.request_id for load in cell.loads)
    return Story(
        about=visible(listed(named)) or "the cell",
        rows=tuple(rows),
        aside=frozenset(rows) - frozenset(own),
        left_out=_left_out(cell, rows),
        strip=strip_of(cell, own, focus) if cell.role is Role.FAULT or troubled else None,
        opened=troubled,
    )


def _focus(cell: CellResult) -> tuple[str, ...]:
    """The faulted requests; without any, those that came out badly; without those, the first as an example."""
    faulted = [load for load in cell.loads if load.faulted]
    bad = [load for load in cell.loads if load.verdict in _BAD_VERDICTS or load.outcome is not Outcome.SERVED]
    return tuple(load.request_id for load in faulted or bad or cell.loads[:1])


_BAD_VERDICTS = (VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED)


def _is_about(event: TimelineEvent, focus: Sequence[str], cell: CellResult) -> bool:
    """Whether it is of these requests, of no request, of a fault, or of a competitor."""
    others = {load.request_id for load in cell.loads} - set(focus)
    return event.where == "fault" or event.request_id not in others


def _middle_cut(events: Sequence[TimelineEvent], most: int) -> list[TimelineEvent]:
    if len(events) <= most:
        return list(events)
    return [*events[: most // 2], *events[len(events) - most // 2 :]]


def _left_out(cell: CellResult, rows: Sequence[TimelineEvent]) -> str | None:
    shown = {id(event) for event in rows}
    left = [event for event in cell.timeline if id(event) not in shown]
    if not left:
        return None
    names = sorted({event.request_id for event in left if event.request_id is not None}, key=lambda n: (len(n), n))
    of = f" of {visible(listed(names))}" if 0 < len(names) <= 6 else ""
    return f"{counted(len(left), 'more event')}{of} not shown: see results.json."
