"""A copy that stopped part-way: right up to a byte, in the order in which a transfer moves regions, then not.

The order is that of `engine/connectors/pull.py`: by block position, layer, K or V, head, and within these by slot;
a block is the smaller of the two sides' blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from harness.diagnosis.compare import Bytes, Comparison, Ints, Mask, Row
from harness.diagnosis.fills import Fill, holds, not_copied
from harness.diagnosis.finding import Finding, axes_of, place, row_text
from harness.diagnosis.sources import Sources
from harness.diagnosis.words import count, numbered

_MOST_DISPLACEMENTS = 8
_NEARLY_ALL = 0.95
_BY_CHANCE = 2  # bytes that noise has right now and then
UNKNOWN = "bytes that nothing here explains"


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """The compared rows in copy order. `rows`: int64 [n], each an index into a raveled [L, H, 2, T]."""

    rows: Ints
    grid: int

    @classmethod
    def of(cls, cmp: Comparison) -> _Stream:
        grid = min(cmp.grids)
        numbers = np.arange(cmp.wrong.size).reshape(cmp.wrong.shape)
        before = cmp.first % grid
        after = -(before + cmp.num_tokens) % grid
        padded = np.pad(numbers, ((0, 0), (0, 0), (0, 0), (before, after)), constant_values=-1)
        layers, heads, parts, slots = padded.shape
        blocks = padded.reshape(layers, heads, parts, slots // grid, grid).transpose(3, 0, 2, 1, 4).reshape(-1)
        return cls(blocks[blocks >= 0], grid)

    def block_start(self, number: int, cmp: Comparison) -> int:
        """The first row of the stream in the same block as the number-th."""
        blocks = (self.rows % cmp.num_tokens + cmp.first) // self.grid
        return int(np.argmax(blocks == blocks[number]))

    def first_wrong(self, cmp: Comparison) -> _Tear:
        at = int(np.argmax(cmp.wrong.reshape(-1)[self.rows]))
        one, rest = (np.zeros(cmp.wrong.size, bool) for _ in range(2))
        one[self.rows[at]] = True
        rest[self.rows[at + 1 :]] = True
        row, after = one.reshape(cmp.wrong.shape), rest.reshape(cmp.wrong.shape)
        before, data = cmp.producer_rows(row)[0], cmp.consumer_rows(row)[0]
        layer, head, part, token = (int(number) for number in np.argwhere(row)[0])
        return _Tear(at, (layer, head, part, token), row, after, int(np.argmax(before != data)), data)


@dataclass(frozen=True, slots=True, eq=False)
class _Tear:
    """The first row that differs. `number`: rows before it; `rest`: the rows after it; `byte`: of `data`, D's bytes of
    the row, the first that differs."""

    number: int
    row: Row
    mask: Mask
    rest: Mask
    byte: int
    data: Bytes


def torn(cmp: Comparison, fills: list[Fill], sources: Sources) -> list[Finding]:
    """A finding for each content that everything after some byte has."""
    stream = _Stream.of(cmp)
    tear = stream.first_wrong(cmp)
    if not tear.rest.any():
        return []
    contents: list[tuple[_Content, str, float]] = [(_FillContent(cmp, fill), fill.text, 1.4) for fill in fills]
    for number, offset in sources.displacements[:_MOST_DISPLACEMENTS]:
        foreign = _ForeignContent(cmp, number, offset)
        if number and foreign.reaches(tear.rest | tear.mask):
            there = cmp.tokens[(tear.rest | tear.mask).any(axis=(0, 1, 2))] + offset
            text = f"request {cmp.source_names[number]}'s {numbered('token', there.tolist())}"
            contents.append((foreign, text, 2.4))
    findings = []
    for content, text, cost in contents:
        if content.is_in(tear.rest) and (content.row(tear.row)[tear.byte :] == tear.data[tear.byte :]).all():
            start = _earliest(cmp, stream, tear, content)
            if start.number + start.byte:
                findings.append(Finding("torn", _text(cmp, stream, start, text), cost, cmp.wrong))
    return findings


class _Content(Protocol):
    """What may stand after a tear."""

    def is_in(self, rows: Mask) -> bool:
        """Whether all of these rows of D are so."""

    def row(self, row: Row) -> Bytes:
        """What a row would be."""


@dataclass(frozen=True, slots=True, eq=False)
class _FillContent:
    cmp: Comparison
    fill: Fill

    def is_in(self, rows: Mask) -> bool:
        if (rows & self.cmp.wrong & ~self.fill.rows).any():
            return False
        equal = rows & ~self.cmp.wrong
        return bool((holds(self.cmp, self.fill, equal) == equal).all())

    def row(self, row: Row) -> Bytes:
        places = row[2] * self.cmp.half + np.arange(self.cmp.half)
        return np.frombuffer(self.fill.pattern, np.uint8)[places % len(self.fill.pattern)]


@dataclass(frozen=True, slots=True, eq=False)
class _ForeignContent:
    """Another request's tokens, at a displacement. To be asked only about rows that it `reaches`."""

    cmp: Comparison
    number: int
    offset: int

    def _index(self, tokens: Ints) -> Ints:
        """Where they stand in the table, if the other request has them; -1 otherwise."""
        source = self.cmp.sources[self.number]
        index = self.cmp.tokens[tokens] + self.offset - source.first_token
        start = int(np.argmax(self.cmp.source_of == self.number))
        return np.where((index >= 0) & (index < source.kv.shape[2]), index + start, -1)

    def reaches(self, rows: Mask) -> bool:
        return bool((self._index(np.flatnonzero(rows.any(axis=(0, 1, 2)))) >= 0).all())

    def is_in(self, rows: Mask) -> bool:
        tokens = np.flatnonzero(rows.any(axis=(0, 1, 2)))
        index = self._index(tokens)
        right = (self.cmp.ids[..., tokens] == self.cmp.table[..., index]) & (index >= 0)
        return bool((right | ~rows[..., tokens]).all())

    def row(self, row: Row) -> Bytes:
        layer, head, part, token = row
        return self.cmp.source_row(layer, head, part, int(self._index(np.array([token]))[0]))


def _earliest(cmp: Comparison, stream: _Stream, tear: _Tear, content: _Content) -> _Tear:
    """The tear at the start of its block or row, if what is right from there on may as well be the content."""
    if (content.row(tear.row)[: tear.byte] != tear.data[: tear.byte]).any():
        return tear
    first = stream.block_start(tear.number, cmp)
    between = np.zeros(cmp.wrong.size, bool)
    between[stream.rows[first : tear.number]] = True
    if not content.is_in(between.reshape(cmp.wrong.shape)):
        return replace(tear, byte=0)
    layer, head, part, token = (int(number) for number in np.unravel_index(stream.rows[first], cmp.wrong.shape))
    return replace(tear, number=first, row=(layer, head, part, token), byte=0)


def _text(cmp: Comparison, stream: _Stream, tear: _Tear, content: str) -> str:
    layer, head, part, token = tear.row
    position, grid = cmp.first + token, stream.grid
    if tear.byte == layer == head == part == 0 and position % grid == 0:
        blocks = -(-(int(cmp.tokens[-1]) + 1) // grid) - cmp.first // grid
        arrived = position // grid - cmp.first // grid
        right = numbered("token", range(cmp.first, position))
        only = f"only the first {'block' if arrived == 1 else f'{arrived} blocks'} of {blocks} arrived"
        return f"{only} ({right}); the rest holds {content}"
    done = tear.number * cmp.half + tear.byte
    up_to = f"{f'byte {tear.byte} of ' if tear.byte else ''}{row_text(cmp, tear.row)}"
    return (
        f"the copy stopped after {done:,} of {count(cmp.wrong.size * cmp.half, 'byte')}: in the order block, layer, K "
        f"or V, head, all is right up to {up_to}; from there on it holds {content}"
    )


def unknown_content(cmp: Comparison) -> list[Finding]:
    """Where nothing says what D holds, but where it is wrong has a shape: a copy that stopped, or skipped a layer.

    Nearly all rows there have to differ, as another request's KV is the same in some; and as chance leaves a row right
    now and then, a whole region has to be right before a copy is said to have stopped.
    """
    findings = []
    box = np.zeros_like(cmp.wrong)
    box[np.ix_(*axes_of(np.any(cmp.wrong, axis=3)))] = True
    missing = not_copied(place(cmp, cmp.wrong, around=box), UNKNOWN)
    if missing and _mostly_wrong(cmp, box):
        findings.append(Finding("not_copied", missing, 1, None))
    stream = _Stream.of(cmp)
    tear = stream.first_wrong(cmp)
    if tear.byte <= _BY_CHANCE:
        tear = replace(tear, byte=0)
    if tear.number >= stream.grid and _mostly_wrong(cmp, tear.rest):
        findings.append(Finding("torn", _text(cmp, stream, tear, UNKNOWN), 1.5, None))
    return findings


def _mostly_wrong(cmp: Comparison, rows: Mask) -> bool:
    return bool(rows.any() and np.count_nonzero(cmp.wrong & rows) >= _NEARLY_ALL * np.count_nonzero(rows))
