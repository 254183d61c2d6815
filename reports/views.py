"""A cell as its section of report.html shows it: what came out beside what should have, and what explains it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from reports.blocks import BlockRow, Square, block_rows, meanings
from reports.matrix import Row, flag_of
from reports.results import CellResult, Evidence, Expected, LoadResult
from reports.story import PROBLEMS, Story, story_of
from reports.summary import expectation, reasons
from reports.text import clip, counted, ranges
from scenarios.words import Result, Role, Tokens

# How many tokens around the first difference are shown, and how many of them come before it.
TOKENS_SHOWN = 24
TOKENS_BEFORE = 6
# Rows of evidence of a cell that needs a person, and of any other.
MAX_EVIDENCE_PROBLEM = 40
MAX_EVIDENCE = 5
MAX_POSITIONS_TEXT = 120
# What the filter calls a cell without a fault.
NO_FAULT = "none"


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
class LoadView:
    """A row of a cell's table of loads."""

    load: LoadResult
    verdict: Found
    outcome: Found
    truth: Found
    tokens: Found
    corrupted: str
    diff: TokenDiff | None
    flag: str | None


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell's section.

    `anchor` is its place in the page, `number` what the filter calls it, `back` where it is linked from,
    `twin_anchor` its twin's.
    """

    cell: CellResult
    anchor: str
    number: int
    back: str
    twin_anchor: str | None
    reasons: tuple[str, ...]
    expected: str
    others: str | None
    loads: tuple[LoadView, ...]
    diagnosed: tuple[LoadResult, ...]
    blocks: tuple[BlockRow, ...]
    squares: tuple[tuple[Square, str], ...]
    grouped: bool
    story: Story | None
    evidence: tuple[Evidence, ...]
    evidence_left: int


@dataclass(frozen=True, slots=True)
class Section:
    """The cells of one row, one below the other."""

    row: Row
    cells: tuple[CellView, ...]


def slug(text: str) -> str:
    """`text` as one word of plain letters: for an id, a class or a filter."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def cell_view(cell: CellResult, anchor: str, number: int, by_id: Mapping[str, str], *, linked: bool) -> CellView:
    """`by_id` are the anchors by cell id; `linked` says whether the cell has a link of its own in its table."""
    table = "matrix" if cell.role is Role.FAULT else "twins"
    told = bool(cell.why or cell.violations) or cell.result in (Result.FAIL, Result.UNKNOWN, Result.NOT_APPLICABLE)
    apart = any(load.faulted for load in cell.loads) and not all(load.faulted for load in cell.loads)
    blocks = block_rows(cell)
    shown = cell.evidence[: MAX_EVIDENCE_PROBLEM if cell.result in PROBLEMS else MAX_EVIDENCE]
    return CellView(
        cell=cell,
        anchor=anchor,
        number=number,
        back=f"in-{anchor}" if linked else table,
        twin_anchor=by_id.get(cell.twin) if cell.twin is not None else None,
        reasons=reasons(cell) if told else (),
        expected=expectation(cell.expected),
        others=expectation(cell.others) if apart and cell.others is not None else None,
        loads=tuple(_load(cell, load) for load in cell.loads),
        diagnosed=tuple(load for load in cell.loads if load.damage or load.diagnosis),
        blocks=blocks,
        squares=meanings(blocks),
        grouped=any(row.group is not None for row in blocks),
        story=story_of(cell),
        evidence=shown,
        evidence_left=len(cell.evidence) - len(shown),
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
