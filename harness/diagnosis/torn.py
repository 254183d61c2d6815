"""A copy that stopped part-way: right up to a byte, in the order in which a transfer moves regions, then not.

The order is that of `engine/connectors/pull.py`: by block position, layer, K or V, head, and within these by slot;
a block is the smaller of the two sides' blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.diagnosis.compare import Bytes, Comparison, Ints, Mask
from harness.diagnosis.fills import Fill, holds, not_copied
from harness.diagnosis.finding import Finding, axes_of, place, row_text
from harness.diagnosis.sources import Sources
from harness.diagnosis.words import count, numbered

_MOST_DISPLACEMENTS = 8
_NEARLY_ALL = 0.95
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
    row: tuple[int, int, int, int]
    mask: Mask
    rest: Mask
    byte: int
    data: Bytes


def torn(cmp: Comparison, fills: list[Fill], sources: Sources) -> list[Finding]:
    """A finding for each content that everything after some byte has."""
    stream = _Stream.of(cmp)
    tear = stream.first_wrong(cmp)
    if tear.number + tear.byte == 0 or not tear.rest.any():
        return []
    found = [(fill.text, 1.4) for fill in fills if _is_filled(cmp, tear, fill)]
    for number, offset in sources.displacements[:_MOST_DISPLACEMENTS]:
        if number and _is_foreign(cmp, tear, number, offset):
            there = cmp.tokens[(tear.rest | tear.mask).any(axis=(0, 1, 2))] + offset
            found.append((f"request {cmp.source_names[number]}'s {numbered('token', there.tolist())}", 2.4))
    return [Finding("torn", _text(cmp, stream, tear, content), cost, cmp.wrong) for content, cost in found]


def _is_filled(cmp: Comparison, tear: _Tear, fill: Fill) -> bool:
    """Whether from the first byte that differs everything holds the pattern."""
    places = tear.row[2] * cmp.half + np.arange(cmp.half)
    wanted = np.frombuffer(fill.pattern, np.uint8)[places % len(fill.pattern)]
    if (wanted[tear.byte :] != tear.data[tear.byte :]).any() or (tear.rest & cmp.wrong & ~fill.rows).any():
        return False
    equal = tear.rest & ~cmp.wrong
    return bool((holds(cmp, fill, equal) == equal).all())


def _is_foreign(cmp: Comparison, tear: _Tear, number: int, offset: int) -> bool:
    """Whether from the first byte that differs everything is as in another request, so far displaced."""
    source, start = cmp.sources[number], int(np.argmax(cmp.source_of == number))
    tokens = np.flatnonzero((tear.rest | tear.mask).any(axis=(0, 1, 2)))
    there = cmp.tokens[tokens] + offset - source.first_token
    if there[0] < 0 or there[-1] >= source.kv.shape[2]:
        return False
    right = cmp.ids[..., tokens] == cmp.table[..., there + start]
    layer, head, part, token = tear.row
    index = start + int(cmp.tokens[token]) + offset - source.first_token
    wanted = cmp.source_row(layer, head, part, index)
    return bool((right | ~tear.rest[..., tokens]).all() and (wanted[tear.byte :] == tear.data[tear.byte :]).all())


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
    if tear.number >= stream.grid and _mostly_wrong(cmp, tear.rest):
        findings.append(Finding("torn", _text(cmp, stream, tear, UNKNOWN), 1.5, None))
    return findings


def _mostly_wrong(cmp: Comparison, rows: Mask) -> bool:
    return bool(rows.any() and np.count_nonzero(cmp.wrong & rows) >= _NEARLY_ALL * np.count_nonzero(rows))
