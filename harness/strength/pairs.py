"""Two changes that cancel, found among all pairs of many at once.

A pair of differences that sum to zero is a pair of equal differences, one of them negated. Sorting n of them shows
every such pair, so rates can be seen that are far below one in n: that is what tells a mix of three rounds from one of
two, and it makes all pairs of a block exhaustive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.strength.block import Block, Uint64s
from kernels.definition_v2 import GAMMA, MULTIPLIERS, mix

SIGNS = 0x8000_8000_8000_8000
_TWO_ROUNDS = ((30, MULTIPLIERS[0]), (27, MULTIPLIERS[1]))
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PairCount:
    """How many of all pairs of changes cancel.

    Attributes:
        what: which changes, and of which checksum.
        changes: how many; pairs are `changes * (changes - 1) / 2`.
        cancelling: pairs that do.
    """

    what: str
    changes: int
    cancelling: int

    @property
    def pairs(self) -> int:
        return self.changes * (self.changes - 1) // 2


def mix_two_rounds(y: Uint64s) -> Uint64s:
    """Stafford's Mix13, the finaliser of SplitMix64: what version 2 would use if two rounds were enough."""
    for shift, multiplier in _TWO_ROUNDS:
        y = (y ^ (y >> np.uint64(shift))) * np.uint64(multiplier)
    return y ^ (y >> np.uint64(31))


def all_pairs_of_bit_63(block: Block, seed: int) -> list[PairCount]:
    """Every pair of flips of bit 63 in one block of random contents, by both versions."""
    rng = np.random.Generator(np.random.PCG64(seed))
    x = rng.integers(0, 2**64, block.size, dtype=np.uint64)
    flipped = x ^ np.uint64(1 << 63)
    by_version = {
        "version 1": (flipped - x) * block.factors,
        "version 2": mix(flipped ^ block.keys) - mix(x ^ block.keys),
    }
    return [
        PairCount(f"bit 63, all pairs of a block, {name}", block.size, count_cancelling(differences))
        for name, differences in by_version.items()
    ]


def many_pairs(changes: int, seed: int) -> list[PairCount]:
    """All pairs of many changes of pieces of random contents and consecutive keys."""
    counts = []
    for name, finaliser in (("version 2", mix), ("with two rounds", mix_two_rounds)):
        for what, flip in (("bit 63", 1 << 63), ("all four signs", SIGNS)):
            differences = _differences(finaliser, flip, changes, seed)
            counts.append(PairCount(f"{what}, {name}", changes, count_cancelling(differences)))
    return counts


def count_cancelling(differences: Uint64s) -> int:
    """Pairs of these differences that sum to 0 modulo 2**64."""
    magnitude = _magnitude(differences)
    magnitude.sort()
    alike = np.unique(magnitude[1:][magnitude[1:] == magnitude[:-1]])
    if not alike.size:
        return 0
    candidates = differences[np.isin(_magnitude(differences), alike)]
    values, found = np.unique(candidates, return_counts=True)
    counts = dict(zip(values.tolist(), found.tolist(), strict=True))
    # 2**63 and 0 are their own opposites; a change that changes nothing cannot cancel another, but none is 0.
    ordered = sum(
        count * (count - 1 if value == -value % 2**64 else counts.get(-value % 2**64, 0))
        for value, count in counts.items()
    )
    return int(ordered) // 2


def _magnitude(differences: Uint64s) -> Uint64s:
    """The smaller of d and -d: alike for differences that cancel or are equal."""
    return np.asarray(np.minimum(differences, np.uint64(0) - differences))


def _differences(finaliser: Callable[[Uint64s], Uint64s], flip: int, changes: int, seed: int) -> Uint64s:
    rng = np.random.Generator(np.random.PCG64(seed))
    differences = np.empty(changes, dtype=np.uint64)
    for start in range(0, changes, _CHUNK):
        stop = min(start + _CHUNK, changes)
        keys = np.arange(start, stop, dtype=np.uint64) * np.uint64(GAMMA)
        y = rng.integers(0, 2**64, stop - start, dtype=np.uint64) ^ keys
        differences[start:stop] = finaliser(y ^ np.uint64(flip)) - finaliser(y)
    return differences
