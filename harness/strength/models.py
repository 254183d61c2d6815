"""What can happen to a block: each model draws corruptions, with random contents where it does not say otherwise.

Contents are uniform random bits. Real KV has less of them to differ in, which makes no difference to a change that a
checksum sees whatever the contents, and favours none of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.strength.block import Block, Changes, Indices, Uint64s, flipped

Rng = np.random.Generator
Draw = Callable[[Rng, Block, int], Changes]

SIGNS_16 = (15, 31, 47, 63)
SIGNS_32 = (31, 63)
ALL_BITS = tuple(range(64))


@dataclass(frozen=True)
class FaultModel:
    """A kind of corruption.

    Attributes:
        name: as the table shows it.
        draw: corruptions, at most as many samples as asked for.
        width: of a block, how many pieces of it a corruption names.
        theory: the key of its expectation in `harness.strength.theory`, if there is one.
    """

    name: str
    draw: Draw
    width: Callable[[Block], int]
    theory: str | None = None


def contents(rng: Rng, *shape: int) -> Uint64s:
    return rng.integers(0, 2**64, shape, dtype=np.uint64)


def flips(count: int, lanes: Sequence[int] = ALL_BITS) -> Draw:
    """`count` different bits, each one of these of a piece."""

    def draw(rng: Rng, block: Block, samples: int) -> Changes:
        places = rng.integers(0, block.size * len(lanes), (samples, count))
        while True:
            ordered = np.sort(places, axis=1)
            again = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
            if not again.any():
                break
            places[again] = rng.integers(0, block.size * len(lanes), (int(again.sum()), count))
        lane = np.array(lanes, dtype=np.uint64)[places % len(lanes)]
        return flipped(places // len(lanes), contents(rng, samples, count), np.uint64(1) << lane)

    return draw


def burst(rng: Rng, block: Block, samples: int) -> Changes:
    """A run of 2 to 64 bits: its ends flip, what is between them at random. It may go on in the next piece."""
    length = rng.integers(2, 65, samples).astype(np.uint64)
    start = rng.integers(0, block.size * 64 - 63, samples)
    run = contents(rng, samples) >> (np.uint64(64) - length)
    run |= (np.uint64(1) << (length - np.uint64(1))) | np.uint64(1)
    shift = (start % 64).astype(np.uint64)
    # Shifting by 64 has no meaning: the rest of a run that ends within its piece is shifted out in two steps.
    rest = run >> np.uint64(1) >> (np.uint64(63) - shift)
    index = start // 64
    following = np.where(rest != 0, index + 1, index)
    return flipped(
        np.stack([index, following], axis=1), contents(rng, samples, 2), np.stack([run << shift, rest], axis=1)
    )


def stuck(lane: int | None, value: int) -> Draw:
    """One bit of every piece stuck at 0 or 1: this bit, or any."""

    def draw(rng: Rng, block: Block, samples: int) -> Changes:
        before = contents(rng, samples, block.size)
        lanes = rng.integers(0, 64, (samples, 1)).astype(np.uint64) if lane is None else np.uint64(lane)
        mask = np.uint64(1) << lanes
        after = before | mask if value else before & ~mask
        return Changes(_rows(block.numbers.ravel(), samples), before, after)

    return draw


def replaced(zero: bool) -> Draw:
    """The whole block is another's, or zero."""

    def draw(rng: Rng, block: Block, samples: int) -> Changes:
        before = contents(rng, samples, block.size)
        after = np.zeros_like(before) if zero else contents(rng, samples, block.size)
        return Changes(_rows(block.numbers.ravel(), samples), before, after)

    return draw


def one_piece(rng: Rng, block: Block, samples: int) -> Changes:
    """One piece becomes any other value."""
    index = rng.integers(0, block.size, (samples, 1))
    before = contents(rng, samples, 1)
    return Changes(index, before, before ^ rng.integers(1, 2**64, (samples, 1), dtype=np.uint64))


def zeroed_row(rng: Rng, block: Block, samples: int) -> Changes:
    """One token's pieces of one layer and head become zero."""
    rows = block.numbers.reshape(-1, block.pieces)
    index = rows[rng.integers(0, len(rows), samples)]
    before = contents(rng, *index.shape)
    return Changes(index, before, np.zeros_like(before))


def swapped(axis: int) -> Draw:
    """Two layers (axis 0), heads (1) or tokens (2) exchange their places, everywhere else alike."""

    def draw(rng: Rng, block: Block, samples: int) -> Changes:
        along = np.moveaxis(block.numbers, axis, 0).reshape(block.shape[axis], -1)
        first = rng.integers(0, len(along), samples)
        second = (first + rng.integers(1, len(along), samples)) % len(along)
        return _exchanged(rng, along[first], along[second])

    return draw


def k_and_v_swapped(rng: Rng, block: Block, samples: int) -> Changes:
    """K and V exchange their places in every token: the first half of its pieces and the second."""
    halves = block.numbers.reshape(-1, 2, block.pieces // 2)
    return _exchanged(rng, _rows(halves[:, 0].ravel(), samples), _rows(halves[:, 1].ravel(), samples))


def shifted(rng: Rng, block: Block, samples: int) -> Changes:
    """Every token holds what belongs to the one before it, the first what belongs to another block."""
    before = contents(rng, samples, *block.shape)
    after = np.roll(before, 1, axis=3)
    after[:, :, :, 0] = contents(rng, samples, *block.shape[:2], block.pieces)
    return Changes(_rows(block.numbers.ravel(), samples), before.reshape(samples, -1), after.reshape(samples, -1))


def pieces_exchanged(rng: Rng, block: Block, samples: int) -> Changes:
    """Two pieces, anywhere in the block, exchange their places."""
    first = rng.integers(0, block.size, (samples, 1))
    second = (first + rng.integers(1, block.size, (samples, 1))) % block.size
    return _exchanged(rng, first, second)


def equal_factors_exchanged(rng: Rng, block: Block, samples: int) -> Changes:
    """Two pieces to which version 1 gives one factor exchange their places (GAP-10)."""
    order = np.argsort(block.factors, kind="stable")
    equal = np.flatnonzero(block.factors[order][1:] == block.factors[order][:-1])
    chosen = equal[rng.integers(0, len(equal), samples)]
    return _exchanged(rng, order[chosen][:, None], order[chosen + 1][:, None])


def cancelling(rng: Rng, block: Block, samples: int) -> Changes:
    """+d, -2d, +d on three consecutive pieces of a layer and head (GAP-11)."""
    slices = block.numbers.reshape(block.layers * block.heads, -1)
    row = rng.integers(0, len(slices), samples)
    first = rng.integers(0, slices.shape[1] - 2, samples)
    index = slices[row[:, None], first[:, None] + np.arange(3)]
    before = contents(rng, samples, 3)
    change = rng.integers(1, 2**63, (samples, 1), dtype=np.uint64)
    return Changes(index, before, before + change * np.array([1, 2**64 - 2, 1], dtype=np.uint64))


def _exchanged(rng: Rng, first: Indices, second: Indices) -> Changes:
    before = contents(rng, first.shape[0], 2 * first.shape[1])
    after = np.roll(before, first.shape[1], axis=1)
    return Changes(np.concatenate([first, second], axis=1), before, after)


def _rows(index: Indices, samples: int) -> Indices:
    return np.broadcast_to(index, (samples, index.size))


def _of(width: int) -> Callable[[Block], int]:
    return lambda block: width


def _whole(block: Block) -> int:
    return block.size


MODELS = (
    FaultModel("1 bit flip", flips(1), _of(1), "one piece"),
    FaultModel("2 bit flips", flips(2), _of(2), "two flips"),
    FaultModel("3 bit flips", flips(3), _of(3)),
    FaultModel("4 bit flips", flips(4), _of(4)),
    FaultModel("2 flips of bit 63", flips(2, (63,)), _of(2), "two of bit 63"),
    FaultModel("2 sign flips, bf16 or fp16", flips(2, SIGNS_16), _of(2), "two signs of 16 bits"),
    FaultModel("2 sign flips, fp32", flips(2, SIGNS_32), _of(2), "two signs of 32 bits"),
    FaultModel("4 sign flips, bf16 or fp16", flips(4, SIGNS_16), _of(4)),
    FaultModel("burst of 2 to 64 bits", burst, _of(2)),
    FaultModel("one piece random", one_piece, _of(1), "one piece"),
    FaultModel("bit 63 stuck at 1", stuck(63, 1), _whole, "bit 63 stuck"),
    FaultModel("a bit stuck at 1", stuck(None, 1), _whole, "a bit stuck"),
    FaultModel("a bit stuck at 0", stuck(None, 0), _whole, "a bit stuck"),
    FaultModel("one token's row zeroed", zeroed_row, lambda block: block.pieces, "random"),
    FaultModel("block zeroed", replaced(zero=True), _whole, "random"),
    FaultModel("another request's block", replaced(zero=False), _whole, "random"),
    FaultModel("two tokens swapped", swapped(2), lambda block: 2 * block.size // block.tokens, "tokens"),
    FaultModel("two heads swapped", swapped(1), lambda block: 2 * block.size // block.heads, "heads"),
    FaultModel("two layers swapped", swapped(0), lambda block: 2 * block.size // block.layers, "layers"),
    FaultModel("K and V swapped", k_and_v_swapped, _whole),
    FaultModel("tokens shifted by one", shifted, _whole),
    FaultModel("two pieces exchanged", pieces_exchanged, _of(2), "exchange"),
    FaultModel("two pieces of equal factor exchanged", equal_factors_exchanged, _of(2), "equal factors"),
    FaultModel("+d, -2d, +d on three pieces", cancelling, _of(3), "cancelling"),
)
