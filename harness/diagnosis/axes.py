"""Whole heads, layers, or K and V in each other's place: the same token's rows, at another head, layer or part."""

from __future__ import annotations

import numpy as np

from harness.diagnosis.compare import Comparison, Ids, Ints, Mask, Row
from harness.diagnosis.finding import Finding, Fit, RowSource, fit_cells, head_names, layer_names, place
from harness.diagnosis.patterns import Pattern, describe

_SAMPLE = 64
_NOUNS = ("layer", "head", "part")


def misplaced_planes(cmp: Comparison) -> list[Finding]:
    """A finding for each axis along which rows were moved."""
    some = np.flatnonzero(cmp.wrong.any(axis=(0, 1, 2)))
    some = some[:: -(-len(some) // _SAMPLE)]
    findings = []
    for axis in range(3):
        moves = _find_moves(cmp, axis, some)
        if moves:
            findings += _judge(cmp, axis, moves)
    return findings


def _find_moves(cmp: Comparison, axis: int, some: Ints) -> dict[int, int]:
    """The index along an axis whose rows are found at each index, by the votes of some tokens' rows."""
    size = cmp.wrong.shape[axis]
    ids, wrong, own = (np.moveaxis(array[..., some], axis, 0) for array in (cmp.ids, cmp.wrong, cmp.own_ids))
    moves = {}
    for index in range(size):
        if not wrong[index].any():
            continue
        votes = ((own == ids[index]) & wrong[index]).reshape(size, -1).sum(axis=1)
        if votes.any():
            moves[index] = int(votes.argmax())
    return moves


def _judge(cmp: Comparison, axis: int, moves: dict[int, int]) -> list[Finding]:
    order = np.arange(cmp.wrong.shape[axis])
    order[list(moves)] = list(moves.values())
    predicted: Ids = np.take(cmp.own_ids, order, axis=axis)
    other_axes = tuple(number for number in range(3) if number != axis)
    fits = [fit_cells(cmp, predicted, np.ones(1, bool), other_axes, grid) for grid in (cmp.grids[0], 1)]
    found = [fit for fit in fits if fit is not None]
    if not found:
        return []
    fit = max(found, key=lambda fit: cmp.bytes_of(fit.explained))
    pattern = _word(cmp, axis, moves)
    where = place(cmp, _along_all(fit, axis))
    text = pattern.text + ("" if fit.whole else where.text())
    cost = pattern.cost - (0.5 if axis == 2 else 0) + (0 if fit.whole else where.cost)
    kind = f"{'kv' if axis == 2 else _NOUNS[axis] + 's'}_{pattern.verb}"
    return [Finding(kind, text, cost, fit.explained, source=_source(cmp, axis, order, fit.affected))]


def _along_all(fit: Fit, axis: int) -> Mask:
    """The affected rows, without a word on the axis that the pattern speaks of."""
    return np.broadcast_to(fit.affected.any(axis=axis, keepdims=True), fit.affected.shape)


def _word(cmp: Comparison, axis: int, moves: dict[int, int]) -> Pattern:
    if axis < 2:
        return describe(moves, _NOUNS[axis], (layer_names(cmp), head_names(cmp))[axis])
    if len(moves) == 2:
        return Pattern("exchanged", "K and V are exchanged", 2)
    return Pattern("copied", "V holds a copy of K" if 1 in moves else "K holds a copy of V", 2)


def _source(cmp: Comparison, axis: int, order: Ints, affected: Mask) -> RowSource:
    start = cmp.first - cmp.producer.first_token

    def source(row: Row) -> tuple[int, int, int, int] | None:
        if not affected[row]:
            return None
        moved = [*row[:3]]
        moved[axis] = int(order[row[axis]])
        return moved[0], moved[1], moved[2], start + row[3]

    return source
