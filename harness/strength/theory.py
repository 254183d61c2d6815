"""What version 1 must miss, counted rather than sampled, so that the measurement has something to be compared with.

A flip of bit b changes the sum by `+w * 2**b` or `-w * 2**b`, with w the odd factor of its piece and the sign that of
a random bit. Two flips cancel only at one bit b of two pieces: where the signs differ, if their factors are equal
modulo `2**(64-b)`; where they agree, if one is minus the other. Both can be counted from the factors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from harness.strength.block import Block, Uint64s
from harness.strength.models import ALL_BITS, SIGNS_16, SIGNS_32


def two_flips(block: Block, lanes: Sequence[int]) -> float:
    """Probability that two different bits, each one of these lanes of any piece, cancel in version 1."""
    cancelling = sum(_cancelling_pairs(block.factors, lane) for lane in lanes)
    bits = block.size * len(lanes)
    return cancelling / (bits * (bits - 1) / 2)


def _cancelling_pairs(factors: Uint64s, lane: int) -> float:
    """Expected number of pairs of pieces whose flips at this lane cancel, over the signs."""
    mask = np.uint64(2 ** (64 - lane) - 1)
    equal = _equal_pairs(factors & mask)
    opposite = _opposite_pairs(factors & mask, (np.uint64(0) - factors) & mask)
    return (equal + opposite) / 2


def _equal_pairs(values: Uint64s) -> int:
    counts = np.unique(values, return_counts=True)[1].astype(object)
    return int((counts * (counts - 1) // 2).sum())


def _opposite_pairs(values: Uint64s, negated: Uint64s) -> int:
    """Pairs of different pieces with `v1 = -v2`. A piece can only be its own opposite modulo 2."""
    unique, counts = np.unique(values, return_counts=True)
    at = np.searchsorted(unique, negated)
    found = (at < unique.size) & (unique[np.minimum(at, unique.size - 1)] == negated)
    ordered = int(counts[at[found]].astype(object).sum())
    return (ordered - int((values == negated).sum())) // 2


def _exchange(block: Block) -> float:
    """Exchanging two pieces of random contents cancels as far as their factors agree: `2**-(64 - v(w1 - w2))`."""
    pairs = block.size * (block.size - 1) / 2
    missed, of_more = 0.0, 0
    for shared in range(64, 0, -1):
        alike = _equal_pairs(block.factors & np.uint64(2**shared - 1))
        missed += (alike - of_more) * 2.0 ** (shared - 64)
        of_more = alike
    return missed / pairs


def _swap(size: int, scale: int, most: int) -> float:
    """Two of `size` rows swapped, a and b: the mean of `2**-(most - v(scale * (a - b)))` (DEF-5)."""
    differences = [scale * (b - a) for b in range(size) for a in range(b)]
    return sum(2.0 ** ((d & -d).bit_length() - 1 - most) for d in differences) / len(differences)


def _stuck(block: Block) -> float:
    """Bit b of a random half of the pieces changes: the sum of their factors is 0 modulo 2**(64-b) by chance."""
    return sum(2.0 ** (lane - 64) for lane in ALL_BITS) / len(ALL_BITS)


VERSION_1: Mapping[str, Callable[[Block], float]] = {
    "one piece": lambda block: 0.0,
    "two flips": lambda block: two_flips(block, ALL_BITS),
    "two of bit 63": lambda block: 1.0,
    "two signs of 16 bits": lambda block: two_flips(block, SIGNS_16),
    "two signs of 32 bits": lambda block: two_flips(block, SIGNS_32),
    "bit 63 stuck": lambda block: 0.5,
    "a bit stuck": _stuck,
    "random": lambda block: 2.0**-64,
    "tokens": lambda block: _swap(block.tokens, block.pieces, 63),
    "heads": lambda block: _swap(block.heads, 1, 63),
    "layers": lambda block: _swap(block.layers, 1, 47),
    "exchange": _exchange,
    "equal factors": lambda block: 1.0,
    "cancelling": lambda block: 1.0,
}
"""By the key of a fault model: the probability that version 1 misses it."""
EXACT = (
    "one piece",
    "two flips",
    "two of bit 63",
    "two signs of 16 bits",
    "two signs of 32 bits",
    "bit 63 stuck",
    "exchange",
    "equal factors",
    "cancelling",
)
"""Of these, those that are counted exactly; the others hold on the average over contents, or up to 2**-60."""
