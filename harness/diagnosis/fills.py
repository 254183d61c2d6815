"""Zeros, or a short pattern over and over: nothing arrived, and what was written there before shows."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.diagnosis.compare import Comparison, Mask
from harness.diagnosis.finding import Finding, Place, place
from harness.diagnosis.words import numbered

_Words = tuple[npt.NDArray[Any], Mask]

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
    """Patterns among the differing rows, the most frequent first; then those that only whole tokens repeat."""
    period = gcd(cmp.half, PERIOD)
    fills = _by_pattern(cmp.wrong, _periodic(cmp, cmp.wrong, period), cmp.half)
    longer = gcd(cmp.half * 2, PERIOD)
    if period == longer:
        return fills
    tokens: Mask = np.any(cmp.wrong, axis=2, keepdims=True)
    whole = _by_pattern(tokens, _periodic(cmp, tokens, longer), cmp.half * 2)
    longer_ones = [fill for fill in whole if len(shortest(fill.pattern)) > period]
    return fills + [Fill(fill.pattern, np.repeat(fill.rows, 2, axis=2) & cmp.wrong) for fill in longer_ones]


def _periodic(cmp: Comparison, mask: Mask, period: int) -> _Words:
    """The first word of each of these rows (or tokens, where the mask has one part), and whether it repeats."""
    first, repeats = [], []
    for layer in range(len(mask)):  # as much as fits in the processor's cache
        data = cmp.consumer_layer(layer, mask[layer])
        words = np.ascontiguousarray(data).view(f"<u{period}")
        first.append(words[:, 0])
        repeats.append((words == words[:, :1]).all(axis=1))
    return np.concatenate(first), np.concatenate(repeats)


def _by_pattern(mask: Mask, words: _Words, size: int) -> list[Fill]:
    first, repeats = words
    periodic = np.flatnonzero(repeats)
    values, inverse, counts = np.unique(first[periodic], return_inverse=True, return_counts=True)
    fills = []
    for number in np.argsort(-counts, kind="stable")[:MOST_PATTERNS]:
        pattern = values[number].tobytes()
        alone = len(pattern) == size and len(shortest(pattern)) == size
        if alone and counts[number] < _ROWS_OF_ONE_WORD:
            continue
        where = np.zeros(len(first), bool)
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
        where = place(cmp, fill.rows)
        if not where.is_box:
            where = place(cmp, fill.rows, around=holds(cmp, fill, ~cmp.wrong))
        missing = not_copied(where, fill.text)
        if missing:
            findings.append(Finding("not_copied", missing, 1, fill.rows))
        else:
            kind = "pattern" if any(fill.pattern) else "zeros"
            findings.append(Finding(kind, _text(where, fill.text), 1.5 + where.cost, fill.rows))
    return findings


def _text(where: Place, what: str) -> str:
    tokens = "every token" if where.all_tokens else numbered("token", where.tokens.tolist())
    if where.is_box:
        verb = "holds" if where.all_tokens or len(where.tokens) == 1 else "hold"
        return f"{tokens} {verb} {what}{where.text(tokens=False)}"
    return f"parts of {tokens} hold {what}{' in ' * bool(where.planes)}{', '.join(where.planes)}"


def not_copied(where: Place, what: str) -> str:
    """That layers, heads or parts did not arrive, if the rows are all that these have; "" otherwise."""
    if not where.all_tokens or not where.is_box or len(where.planes) != 1:
        return ""
    (missing,) = where.planes
    several = missing.startswith(("layers", "heads"))
    return f"{missing} {'were' if several else 'was'} not copied and {'hold' if several else 'holds'} {what}"
