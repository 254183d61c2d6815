"""Zeros, or a short pattern over and over: nothing arrived, and what was written there before shows."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from harness.diagnosis.compare import Bytes, Comparison, Mask
from harness.diagnosis.finding import Finding, Place, place
from harness.diagnosis.words import numbered

PERIOD = 8
MOST_PATTERNS = 4
_ROWS_OF_ONE_WORD = 4


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """Rows of D that hold nothing but a pattern. `pattern` begins as a token's bytes do."""

    pattern: bytes
    rows: Mask

    @property
    def text(self) -> str:
        """What stands there."""
        pattern = shortest(self.pattern)
        if pattern == b"\0":
            return "zeros"
        if len(pattern) == 1:
            return f"the byte 0x{pattern[0]:02x} over and over"
        shown = f'"{pattern.decode()}" ' if all(32 < byte < 127 for byte in pattern) else ""
        return f"the {len(pattern)}-byte pattern {shown}({pattern.hex(' ')}) over and over"


def shortest(pattern: bytes) -> bytes:
    """The shortest pattern that repeats to this one."""
    return next(
        pattern[:size] for size in range(1, len(pattern) + 1) if pattern[:size] * (len(pattern) // size) == pattern
    )


def find_fills(cmp: Comparison) -> list[Fill]:
    """Patterns among the differing rows, the most frequent first."""
    period = gcd(cmp.half, PERIOD)
    fills = _by_pattern(cmp.wrong, cmp.consumer_rows(cmp.wrong), period)
    if period == PERIOD or gcd(cmp.half * 2, PERIOD) == period:
        return fills
    rest = cmp.wrong.copy()
    for fill in fills:
        rest &= ~fill.rows
    # A row is no whole number of patterns, but a token is.
    tokens = np.repeat(rest.any(axis=2, keepdims=True), 2, axis=2)
    data = [cmp.consumer_rows(tokens & _part(tokens, part)) for part in (0, 1)]
    whole = _by_pattern(tokens[:, :, :1], np.concatenate(data, axis=1), gcd(cmp.half * 2, PERIOD))
    return fills + [Fill(fill.pattern, np.repeat(fill.rows, 2, axis=2) & cmp.wrong) for fill in whole]


def _part(like: Mask, part: int) -> Mask:
    chosen = np.zeros_like(like)
    chosen[:, :, part] = True
    return chosen


def _by_pattern(mask: Mask, data: Bytes, period: int) -> list[Fill]:
    words = np.ascontiguousarray(data).view(f"<u{period}")
    periodic = np.flatnonzero(words[:, 0] == words[:, -1])
    periodic = periodic[(words[periodic] == words[periodic][:, :1]).all(axis=1)]
    values, inverse, counts = np.unique(words[periodic][:, 0], return_inverse=True, return_counts=True)
    fills = []
    for number in np.argsort(-counts, kind="stable")[:MOST_PATTERNS]:
        pattern = values[number].tobytes()
        if words.shape[1] == 1 and counts[number] < _ROWS_OF_ONE_WORD and len(shortest(pattern)) == period:
            continue
        where = np.zeros(len(data), bool)
        where[periodic[inverse == number]] = True
        rows = np.zeros_like(mask)
        rows[mask] = where
        fills.append(Fill(pattern, rows))
    return fills


def holds(cmp: Comparison, fill: Fill, rows: Mask) -> Mask:
    """Which of these rows hold the pattern in D."""
    layer, head, part, token = np.nonzero(rows)
    unit = np.frombuffer(fill.pattern, np.uint8)
    starts = part * cmp.half
    wanted = unit[(starts[:, None] + np.arange(cmp.half)) % len(unit)]
    held = np.zeros_like(rows)
    held[layer, head, part, token] = (cmp.consumer_rows(rows) == wanted).all(axis=1)
    return held


def filled(cmp: Comparison, fills: list[Fill]) -> list[Finding]:
    """A finding for each pattern."""
    findings = []
    for fill in fills:
        where = place(cmp, fill.rows, around=None)
        if not where.is_box:
            where = place(cmp, fill.rows, around=holds(cmp, fill, ~cmp.wrong))
        zeros = not any(fill.pattern)
        missing = _missing(where)
        if missing:
            kind, text, cost = "not_copied", f"{missing} was not copied and holds {fill.text}", 1.0
        else:
            kind, text, cost = "zeros" if zeros else "pattern", _text(where, fill.text), 1.5 + where.cost
        findings.append(Finding(kind, text, cost, fill.rows))
    return findings


def _text(where: Place, what: str) -> str:
    if where.all_tokens:
        return f"{'every token' if where.is_box else 'part of the tokens'} holds {what}{where.text()}"
    tokens = numbered("token", where.tokens.tolist())
    verb = "hold" if len(where.tokens) > 1 else "holds"
    if not where.is_box:
        return f"parts of {tokens} {'hold' if len(where.tokens) > 1 else 'hold'} {what}{where.text(tokens=False)}"
    return f"{tokens} {verb} {what}{where.text(tokens=False)}"


def _missing(where: Place) -> str:
    """The layer, head or part of which nothing arrived, if that is what the rows are."""
    single = where.planes.startswith(("layer ", "head ", "K", "V")) and not {",", "a"} & set(where.planes[5:])
    return where.planes if where.all_tokens and where.is_box and single else ""
