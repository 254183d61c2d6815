"""A few 8-byte pieces changed so that a sum over them need not: exchanged, or changed by d, -2d and d.

The pieces are those of a checksum (DEF-2); GAP-10 and GAP-11 of docs/spec.md are what these find.
"""

from __future__ import annotations

import numpy as np

from harness.diagnosis.compare import Comparison
from harness.diagnosis.finding import Finding, row_text
from harness.diagnosis.words import joined

PIECE_BYTES = 8
_MOST_PIECES = 3
_COST = 3  # a whole row or half that moved is the simpler explanation


def changed_pieces(cmp: Comparison) -> list[Finding]:
    """Two pieces that are exchanged, or three of which the changes cancel, if that is all that differs."""
    if cmp.half % PIECE_BYTES or cmp.total > _MOST_PIECES * PIECE_BYTES:
        return []
    rows = [(layer, head, part, token) for layer, head, part, token in np.argwhere(cmp.wrong).tolist()]
    before = np.ascontiguousarray(cmp.producer_rows(cmp.wrong)).view("<u8")
    after = np.ascontiguousarray(cmp.consumer_rows(cmp.wrong)).view("<u8")
    # In the order of a checksum: by token, then K before V.
    places = sorted(np.argwhere(before != after).tolist(), key=lambda at: (rows[at[0]][3], rows[at[0]][2], at[1]))
    was = [int(before[row, piece]) for row, piece in places]
    now = [int(after[row, piece]) for row, piece in places]
    names = joined([f"piece {piece} of {row_text(cmp, rows[row])}" for row, piece in places])
    if len(places) == 2 and was == now[::-1]:
        return [Finding("pieces_exchanged", f"two 8-byte pieces are exchanged: {names}", _COST, cmp.wrong)]
    deltas = [(new - old) % 2**64 for old, new in zip(was, now, strict=True)]
    if len(places) == 3 and deltas[0] == deltas[2] and (deltas[0] + deltas[1] + deltas[2]) % 2**64 == 0:
        text = f"three 8-byte pieces changed by d, -2d and d, which add up to nothing: {names}"
        return [Finding("pieces_cancel", text, _COST, cmp.wrong)]
    return []
