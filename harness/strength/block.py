"""The block that the strength campaign corrupts, and what a corruption is: a few pieces that change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kernels import definition_v2
from kernels.definition import MAX_KV_HEADS_PER_LAYER, PIECE_BYTES

Uint64s = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """One block of KV. Pieces are numbered as they lie in [layers, heads, tokens, pieces], flattened.

    The default is 64 KiB: two layers of eight heads of 64 elements of 2 bytes, K and V, at the start of a request,
    where factors of version 1 collide most (GAP-10).
    """

    layers: int = 2
    heads: int = 8
    tokens: int = 16
    pieces: int = 32
    first_token: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.layers, self.heads, self.tokens, self.pieces

    @property
    def size(self) -> int:
        """Pieces of the block."""
        return self.layers * self.heads * self.tokens * self.pieces

    @property
    def num_bytes(self) -> int:
        return self.size * PIECE_BYTES

    @cached_property
    def numbers(self) -> Indices:
        """int64 [layers, heads, tokens, pieces]: the number of each piece."""
        return np.arange(self.size).reshape(self.shape)

    @cached_property
    def factors(self) -> Uint64s:
        """uint64 [size]: version 1's factor of each piece, `m * (2*j + 1)` (DEF-3, DEF-4)."""
        layer, head, token, piece = np.indices(self.shape, dtype=np.uint64).reshape(4, -1)
        j = (token + np.uint64(self.first_token)) * np.uint64(self.pieces) + piece
        m = 2 * (layer * np.uint64(MAX_KV_HEADS_PER_LAYER) + head) + np.uint64(1)
        return m * (2 * j + 1)

    @cached_property
    def keys(self) -> Uint64s:
        """uint64 [size]: version 2's key of each piece."""
        layer, head, token, piece = np.indices(self.shape, dtype=np.uint64).reshape(4, -1)
        j = (token + np.uint64(self.first_token)) * np.uint64(self.pieces) + piece
        rows = definition_v2.mix(layer * np.uint64(MAX_KV_HEADS_PER_LAYER) + head + np.uint64(1))
        return rows + j * np.uint64(definition_v2.GAMMA)


@dataclass(frozen=True)
class Changes:
    """Corruptions of one block, one a row; all other pieces stay as they are.

    Attributes:
        index: int64 [samples, width]: which pieces change, each at most once a row unless it keeps its value.
        before, after: uint64 [samples, width]: their values.
    """

    index: Indices
    before: Uint64s
    after: Uint64s

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """bool [samples]: whether anything differs at all (a token may be swapped with its equal)."""
        return np.asarray((self.before != self.after).any(axis=1))

    def only(self, rows: npt.NDArray[np.bool_]) -> Changes:
        return self if rows.all() else Changes(self.index[rows], self.before[rows], self.after[rows])

    def first(self, samples: int) -> Changes:
        return Changes(self.index[:samples], self.before[:samples], self.after[:samples])


def flipped(index: Indices, before: Uint64s, masks: Uint64s) -> Changes:
    """Flip the bits of masks. A row that names a piece twice flips it once, at its first place, by both masks."""
    before, masks = before.copy(), masks.copy()
    for later in range(1, index.shape[1]):
        for earlier in range(later):
            same = index[:, later] == index[:, earlier]
            before[same, later] = before[same, earlier]
            masks[same, earlier] ^= masks[same, later]
            masks[same, later] = 0
    return Changes(index, before, before ^ masks)
