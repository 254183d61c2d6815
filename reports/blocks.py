"""Which blocks of a load were compared, and what the oracles know of each: a row of squares a KV cache group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from reports.results import CellResult, GroupCoverage, LoadResult
from reports.text import clip, ranges
from scenarios.words import Truth

# Squares of a row; the words beside it cover all blocks.
MAX_SQUARES = 128
MAX_RANGES = 120


class Square(StrEnum):
    """What is known of a block. The value is the class that the page gives its square."""

    DIFFERS = "d"
    FALSE_ALARM = "f"
    MISSED = "m"
    NOT_COMPARED = "n"
    EQUAL = "e"


MEANINGS = {
    Square.DIFFERS: "differing",
    Square.FALSE_ALARM: "false mismatch",
    Square.MISSED: "corrupted and not seen",
    Square.NOT_COMPARED: "not compared",
    Square.EQUAL: "compared and equal",
}


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A KV cache group of a load; a load of which nothing was compared has a row of what is known to be corrupted."""

    load: int
    faulted: bool
    group: str | None
    status: str
    squares: tuple[Square, ...]
    left: int
    words: str


def block_rows(cell: CellResult) -> tuple[BlockRow, ...]:
    """All rows of a cell, in order of loads and groups."""
    return tuple(row for load in cell.loads for row in _rows(load))


def meanings(rows: Iterable[BlockRow]) -> tuple[tuple[Square, str], ...]:
    """The squares that occur, with what they mean."""
    seen = {square for row in rows for square in row.squares}
    return tuple((square, meaning) for square, meaning in MEANINGS.items() if square in seen)


def _rows(load: LoadResult) -> Iterable[BlockRow]:
    if not load.groups:
        if load.corrupted_positions:
            squares = dict.fromkeys(load.corrupted_positions, Square.MISSED)
            yield _row(load, None, _status(load.verdict, load.reason), squares)
        return
    seen = {position for group in load.groups for position in group.differing}
    for group in load.groups:
        name = str(group.group_id) if len(load.groups) > 1 else None
        yield _row(load, name, _status(group.status, group.reason), _squares(load, group, seen))


def _status(status: str, reason: str | None) -> str:
    return f"{status} ({reason})" if reason is not None else status


def _squares(load: LoadResult, group: GroupCoverage, seen: set[int]) -> dict[int, Square]:
    """By position. Corruption is known by position only: in several groups, one that saw it speaks for all."""
    compared, differing = set(group.compared), set(group.differing)
    corrupted = set(load.corrupted_positions)

    def square(position: int) -> Square:
        if position in differing:
            told = load.delivered is not Truth.NONE
            return Square.FALSE_ALARM if told and position not in corrupted else Square.DIFFERS
        if position in corrupted - seen:
            return Square.MISSED
        return Square.EQUAL if position in compared else Square.NOT_COMPARED

    held = {*group.loaded, *compared, *group.not_compared, *differing}
    return {position: square(position) for position in sorted(held)}


def _row(load: LoadResult, group: str | None, status: str, squares: dict[int, Square]) -> BlockRow:
    parts = []
    for kind, meaning in MEANINGS.items():
        positions = [position for position, square in squares.items() if square is kind]
        if positions:
            parts.append(f"{meaning}: {clip(ranges(positions), MAX_RANGES)}")
    shown = tuple(squares.values())[:MAX_SQUARES]
    return BlockRow(load.load, load.faulted, group, status, shown, len(squares) - len(shown), "; ".join(parts))
