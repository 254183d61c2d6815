"""A hypothesis before it is ranked: which rows it predicts, and how much it has to assume for that.

Finders return findings that contradict no equal byte; `harness/diagnosis/search.py` ranks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.diagnosis.compare import PARTS, Comparison, Ids, Ints, Mask, Row
from harness.diagnosis.words import numbered

# What a row is said to hold: (layer, head, K or V, index in the table), or None.
RowSource = Callable[[Row], "tuple[int, int, int, int] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """A candidate.

    Attributes:
        kind, text: as in `Hypothesis`; the text without its capital and full stop.
        cost: how many things it assumes; the smaller of two that explain the same is the better.
        explained: bool [L, H, 2, T]: differing rows that it predicts. None: it says only where the damage is.
        excused: differing rows that it says come from where no dump reaches.
        source: what it says that a row holds, where that is another row; with it, a bit flipped after a move is found.
    """

    kind: str
    text: str
    cost: float
    explained: Mask | None
    excused: Mask | None = None
    source: RowSource | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Where a prediction of rows came true. `affected` are the rows of the places that it is about, `whole` whether
    that is every place in which it would change anything."""

    explained: Mask
    excused: Mask
    affected: Mask
    whole: bool


def fit_region(cmp: Comparison, planes: Mask, tokens: Ints, index: Ints) -> Fit | None:
    """Judge "the planes [L, H, 2] of these compared tokens [n] hold the tokens `index` [n] of the table, -1: unknown".

    None: it contradicts an equal row, explains nothing, or excuses more than it explains.
    """
    layer, head, part = np.nonzero(planes)
    rows = (layer[:, None], head[:, None], part[:, None])
    wrong = cmp.wrong[(*rows, tokens)]
    known = index >= 0
    right = cmp.ids[(*rows, tokens)] == cmp.table[(*rows, index)]
    if (~wrong & ~right & known).any():
        return None
    explained, excused, affected = (np.zeros_like(cmp.wrong) for _ in range(3))
    explained[(*rows, tokens)] = wrong & right & known
    excused[(*rows, tokens)] = wrong & ~known
    affected[(*rows, tokens)] = True
    if not explained.any() or cmp.bytes_of(excused) > cmp.bytes_of(explained):
        return None
    return Fit(explained, excused, affected, whole=True)


def fit_cells(cmp: Comparison, predicted: Ids, known: Mask, axes: tuple[int, ...], grid: int) -> Fit | None:
    """Judge a prediction of every row, cell by cell: it may hold in some layers or blocks and not in others.

    Args:
        predicted: uint64 [L, H, 2, T], hashes; where `known` (broadcastable to it) is False, anything.
        axes: which of layer 0, head 1 and part 2 tell cells apart; blocks always do.
        grid: tokens a block of cells.

    Returns:
        What holds in the cells without a contradiction and with at least half of what differs explained; None where
        there is no such cell.
    """
    starts = np.flatnonzero(np.diff(cmp.tokens // grid, prepend=-1))
    lengths = np.diff(np.append(starts, cmp.num_tokens))
    merged = tuple(axis for axis in (0, 1, 2) if axis not in axes)

    def cells(mask: Mask) -> Ints:
        counted: Ints = np.add.reduceat(mask, starts, axis=3, dtype=np.int64)
        return counted.sum(axis=merged, keepdims=True) if merged else counted

    known = np.broadcast_to(known, cmp.wrong.shape)
    right = (predicted == cmp.ids) & known
    hits = cells(right & cmp.wrong)
    good = (cells(~right & known & ~cmp.wrong) == 0) & (hits > 0) & (2 * hits >= cells(cmp.wrong & known))
    if good.any():  # where nothing is known it may be as well
        good |= (cells(cmp.wrong) > 0) & (cells(known) == 0)
    idle = cells((predicted != cmp.own_ids) & known) == 0
    affected = np.broadcast_to(np.repeat(good, lengths, axis=3), cmp.wrong.shape)
    explained, excused = right & cmp.wrong & affected, cmp.wrong & ~known & affected
    if not explained.any() or cmp.bytes_of(excused) > cmp.bytes_of(explained):
        return None
    return Fit(explained, excused, affected, whole=bool((good | idle).all()))


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows are, in words.

    Attributes:
        planes: of which layers, heads and parts, an item for each of the three that is not there whole.
        tokens: positions in the request.
        all_tokens: they are all of the compared tokens.
        is_box: the rows are all of those planes in all of those tokens.
    """

    planes: tuple[str, ...]
    tokens: Ints
    all_tokens: bool
    is_box: bool

    def text(self, tokens: bool = True) -> str:
        """As in " in layer 0, tokens 16 to 31"; "" for everywhere."""
        parts = list(self.planes)
        if tokens and not self.all_tokens:
            parts.append(numbered("token", self.tokens.tolist()))
        if not parts:
            return "" if self.is_box else " in places"
        return f" in {'' if self.is_box else 'parts of '}{', '.join(parts)}"

    @property
    def cost(self) -> float:
        return (0.5 if self.planes else 0) + (0 if self.all_tokens else 0.5) + (0 if self.is_box else 2)


def place(cmp: Comparison, rows: Mask, around: Mask | None = None) -> Place:
    """Where these rows are. `around`: rows that may be counted to them, so that they fill a box."""
    tokens = rows.any(axis=(0, 1, 2))
    planes: Mask = np.any(rows, axis=3)
    filled = rows if around is None else rows | around
    return Place(
        planes=planes_texts(cmp, planes),
        tokens=cmp.tokens[tokens],
        all_tokens=bool(tokens.all()),
        is_box=bool(filled[np.ix_(*axes_of(planes))][..., tokens].all()),
    )


def axes_of(planes: Mask) -> tuple[Ints, Ints, Ints]:
    """The layers, heads and parts that bool [L, H, 2] touches."""
    return (
        np.flatnonzero(planes.any(axis=(1, 2))),
        np.flatnonzero(planes.any(axis=(0, 2))),
        np.flatnonzero(planes.any(axis=(0, 1))),
    )


def planes_texts(cmp: Comparison, planes: Mask) -> tuple[str, ...]:
    """As in ("layer 0", "head 1", "V"); () for all layers, heads and parts."""
    layers, heads, parts = axes_of(planes)
    texts = []
    for noun, names, indexes in (("layer", layer_names(cmp), layers), ("head", head_names(cmp), heads)):
        if len(indexes) < len(names):
            texts.append(numbered(noun, (names[index] for index in indexes)))
    if len(parts) < len(PARTS):
        texts.append(PARTS[parts[0]])
    return tuple(texts)


def layer_names(cmp: Comparison) -> tuple[int, ...]:
    return cmp.consumer.layer_names


def head_names(cmp: Comparison) -> tuple[int, ...]:
    first = cmp.consumer.first_head
    return tuple(range(first, first + cmp.consumer.kv.shape[1]))


def row_text(cmp: Comparison, row: Row) -> str:
    """V of token 24 (layer 0, head 1)."""
    layer, head, part, token = row
    where = f"layer {layer_names(cmp)[layer]}, head {head_names(cmp)[head]}"
    return f"{PARTS[part]} of token {cmp.first + token} ({where})"
