"""How often the statistics are wrong: simulated studies from recorded A/A rows, judged by the same rule.

A synthetic study draws blocks from a recorded A/A study, in runs of consecutive blocks, so that what one block shares
with the next stays. Within a block nothing is touched: drift, spikes and pairing are those of the recording.
Between the arms of an A/A study nothing differs, so a coin says of each run which arm is called A: the true cost is 0,
and a planted one is exactly what was planted. All planted costs are judged on the same studies.

What makes this quick is that a bootstrap of a trimmed mean is one matrix product: a resample of sorted values is a
count of each, and how much of each count is left after trimming does not depend on the values. It is scipy's interval
of `intervals.py`, to the last digits; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.overhead.blocks import Paired, StatisticsError, pair
from harness.overhead.intervals import ALPHA, RESAMPLES, STRICT_ALPHA, Array, Ints, cut_of, expanded_level
from harness.overhead.rows import Row
from harness.overhead.stats import MIN_BLOCKS
from reports.overhead.results import PRECISE_WIDTH

# Planted costs, in margins: 1 is the boundary, where EQUIVALENT and OVERHEAD are both wrong.
SHIFTS = (0.0, 0.5, 1.0, 2.0, 5.0)
FIXED = (8, 16, 32, 64, 128)
SETS = 1000
RUN_LENGTH = 4
# A study looks at its interval after every mirrored pair of blocks.
LOOK_EVERY = 2
# Noise at which an interval over this many blocks is about half the margin wide, so that the stopping rule stops.
STOPS_NEAR = 48


@dataclass(frozen=True, slots=True)
class Noise:
    """The blocks of a recorded A/A cell: differences and levels of arm A, relative to its median TTFT; in their order.

    `factor` is what the recorded spread of both was multiplied by: a quieter machine has less of the same shape.
    """

    cell: str
    differences: Array
    levels: Array
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """What a thousand studies of one kind came to. `blocks` is None for those that stop when they are precise.

    `stopped` counts the studies that became precise, and `median_blocks` is how many blocks the middle one had.
    """

    cell: str
    noise: float
    blocks: int | None
    shift: float
    sets: int
    equivalent: int
    overhead: int
    stopped: int
    median_blocks: int

    @property
    def inconclusive(self) -> int:
        return self.sets - self.equivalent - self.overhead


def noise_of(rows: Sequence[Row], cell: str) -> Noise:
    """The noise of a recorded A/A cell.

    Raises:
        StatisticsError: too few of its blocks have a difference to be drawn from.
    """
    paired: Paired = pair(rows, cell)
    known = [block for block in paired.judged if math.isfinite(block.difference_s)]
    if len(known) < 2 * MIN_BLOCKS:
        raise StatisticsError(f"cell {cell}: {len(known)} blocks to draw from: record {2 * MIN_BLOCKS} or more")
    levels = np.array([np.median([t for t in block.ttft_a_s if math.isfinite(t)]) for block in known])
    median = float(np.median(levels))
    return Noise(cell, np.array([block.difference_s for block in known]) / median, levels / median)


def stopping_noise(noise: Noise, margin: float) -> Noise:
    """The same noise, scaled so that a study becomes precise after some tens of blocks."""
    low, high, _ = intervals(np.sort(draw(noise, 200, STOPS_NEAR, np.random.default_rng(0))[0]))
    factor = PRECISE_WIDTH * margin / float(np.median(high - low))
    return Noise(noise.cell, noise.differences * factor, 1 + (noise.levels - 1) * factor, factor)


def fixed_cases(noise: Noise, margin: float, blocks: int, sets: int = SETS, seed: int = 0) -> list[Case]:
    """Studies with a number of blocks that was fixed beforehand, one case a planted cost."""
    differences, levels = draw(noise, sets, blocks, np.random.default_rng(seed))
    found = _Studies(sets)
    found.put(np.arange(sets), intervals(np.sort(differences)), _medians(levels), blocks, margin)
    return [found.case(noise, blocks, shift * margin, margin) for shift in SHIFTS]


def sequential_cases(noise: Noise, margin: float, most: int, sets: int = SETS, seed: int = 0) -> list[Case]:
    """Studies that look after every other block and stop when they are precise, or at `most` blocks."""
    differences, levels = draw(noise, sets, most, np.random.default_rng(seed))
    going, found = np.arange(sets), _Studies(sets)
    for blocks in range(MIN_BLOCKS, most + 1, LOOK_EVERY):
        bounds = intervals(np.sort(differences[going, :blocks]))
        found.put(going, bounds, _medians(levels[going, :blocks]), blocks, margin)
        going = going[~found.precise[going]]
        if not going.size:
            break
    return [found.case(noise, None, shift * margin, margin) for shift in SHIFTS]


class _Studies:
    """The interval at which each synthetic study stands, relative to the recorded median, without a planted cost."""

    def __init__(self, sets: int) -> None:
        self.low, self.high, self.strict_low, self.median = (np.zeros(sets) for _ in range(4))
        self.blocks = np.zeros(sets, np.int64)
        self.precise = np.zeros(sets, np.bool_)

    def put(self, which: Ints, bounds: tuple[Array, Array, Array], median: Array, blocks: int, margin: float) -> None:
        low, high, self.strict_low[which] = bounds
        self.low[which], self.high[which], self.median[which], self.blocks[which] = low, high, median, blocks
        self.precise[which] = (high - low) / median <= PRECISE_WIDTH * margin

    def case(self, noise: Noise, blocks: int | None, shift: float, margin: float) -> Case:
        """The planted cost moves every bound by as much; each study divides by its own median."""
        low, high, strict_low = ((bound + shift) / self.median for bound in (self.low, self.high, self.strict_low))
        return Case(
            cell=noise.cell,
            noise=noise.factor,
            blocks=blocks,
            shift=shift,
            sets=low.size,
            equivalent=int(np.sum((low > -margin) & (high < margin))),
            overhead=int(np.sum(strict_low > margin)),
            stopped=int(self.precise.sum()),
            median_blocks=int(np.median(self.blocks)),
        )


def intervals(ordered: Array, resamples: int = RESAMPLES, seed: int = 0) -> tuple[Array, Array, Array]:
    """What `intervals.location_bounds` gives (low, high, strict low), for many studies at once; finite values only.

    Args:
        ordered: differences, shape [studies, blocks], sorted along the blocks.
    """
    count = ordered.shape[1]
    weights = trimmed_weights(np.random.default_rng(seed).integers(0, count, (resamples, count)))
    tail, strict = ((1 - expanded_level(count, alpha)) / 2 for alpha in (ALPHA, STRICT_ALPHA))
    low, high, strict_low = np.quantile(weights @ ordered.T, [tail, 1 - tail, strict], axis=0)
    return low, high, strict_low


def trimmed_weights(picked: Ints) -> Array:
    """What the trimmed mean of each resample takes of each sorted value.

    Args:
        picked: int64 [resamples, blocks], which of the sorted values each resample holds.

    Returns:
        float64 [resamples, blocks]; each row sums to 1.
    """
    resamples, count = picked.shape
    flat = (picked + count * np.arange(resamples)[:, None]).ravel()
    upto = np.bincount(flat, minlength=resamples * count).reshape(resamples, count).cumsum(axis=1)
    cut = cut_of(count)
    kept = np.diff(np.clip(upto, cut, count - cut), axis=1, prepend=cut)
    found: Array = kept / (count - 2 * cut)
    return found


def _medians(levels: Array) -> Array:
    found: Array = np.median(levels, axis=1)
    return found


def draw(noise: Noise, sets: int, blocks: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Differences and levels of `sets` synthetic studies, float64 [sets, blocks] each."""
    runs = math.ceil(blocks / RUN_LENGTH)
    starts = rng.integers(0, noise.differences.size, (sets, runs, 1))
    picked = (starts + np.arange(RUN_LENGTH)) % noise.differences.size
    swapped = rng.choice([-1.0, 1.0], (sets, runs, 1))
    differences = (noise.differences[picked] * swapped).reshape(sets, -1)[:, :blocks]
    return differences, noise.levels[picked].reshape(sets, -1)[:, :blocks]


def all_cases(rows: Sequence[Row], cells: Sequence[str], margin: float, most: int, seed: int = 0) -> Iterator[Case]:
    """Every case of the table: of each cell the noise as it was recorded, and quiet enough for the stopping rule."""
    for cell in cells:
        recorded = noise_of(rows, cell)
        for noise in (recorded, stopping_noise(recorded, margin)):
            for blocks in FIXED:
                yield from fixed_cases(noise, margin, blocks, seed=seed)
            yield from sequential_cases(noise, margin, most, seed=seed)
