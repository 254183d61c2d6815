"""Rows become one paired difference a block: the unit that the statistics resample.

The four slots of a block send the same prompts, arms A B B A or B A A B, so that the difference of the arms' means does
not see a drift that is steady over the block, nor how hard a prompt is. Requests of one slot share its queue, and two
slots of one block share a state of the machine: only blocks are taken as independent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from engine.errors import InputError
from harness.overhead.rows import ARM_OFF, ARM_ON, Row
from reports.overhead.results import Left

SLOTS = (0, 1, 2, 3)
# Of the prompts of a block and of the blocks of a cell, this share is cut off at either end before the mean is taken.
TRIM = 0.2


class StatisticsError(InputError):
    """These rows cannot be judged."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a cell. Times in seconds.

    Attributes:
        difference_s: B - A; infinite if more requests failed in one arm than the trimmed mean can cut, nan if no
            prompt says anything.
        ttft_a_s, ttft_b_s: of every request; infinite for one that failed.
    """

    number: int
    difference_s: float
    ttft_a_s: tuple[float, ...]
    ttft_b_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Paired:
    """The blocks of one cell, and what is in the rows and not in them. `rows` are all but warm-up."""

    cell: str
    rows: tuple[Row, ...]
    blocks: tuple[Block, ...]
    left: Left

    @property
    def judged(self) -> tuple[Block, ...]:
        """The blocks that have a difference."""
        return tuple(block for block in self.blocks if not math.isnan(block.difference_s))


def pair(rows: Iterable[Row], cell: str) -> Paired:
    """The blocks of a cell, in the order of their numbers. The order of the rows does not matter.

    Raises:
        StatisticsError: there is no row of this cell, or the rows are no blocks of A and B.
    """
    # Sums of floats depend on their order, so it is always the same one.
    own = sorted((row for row in rows if row.cell == cell), key=lambda row: (row.block, row.slot, row.prompt_id))
    if not own:
        raise StatisticsError(f"no row of cell {cell!r}: name a cell that these rows have")
    kept = tuple(row for row in own if not row.warmup)
    by_block: dict[int, list[Row]] = defaultdict(list)
    for row in kept:
        by_block[row.block].append(row)
    counts = _Counts(warmup=len(own) - len(kept))
    blocks = tuple(_block(number, by_block[number], counts) for number in sorted(by_block))
    return Paired(cell, kept, blocks, counts.left(sum(math.isnan(block.difference_s) for block in blocks)))


def ttft_of(row: Row) -> float | None:
    """Seconds from the intended start to the first token; None after an error."""
    return row.ttft_s if row.ok else None


def differences(rows: Iterable[Row], value: Callable[[Row], float | None]) -> list[tuple[float, float]]:
    """(A, B - A) of each block, in which each prompt has `value` in all four slots. For figures without a verdict."""
    found = []
    for prompts in _by_block_and_prompt(rows):
        pairs = []
        for prompt in prompts:
            values = {row.slot: (row.arm, value(row)) for row in prompt}
            a = [v for arm, v in values.values() if arm == ARM_OFF and v is not None]
            b = [v for arm, v in values.values() if arm == ARM_ON and v is not None]
            if len(a) == len(b) == 2:
                pairs.append((sum(a) / 2, sum(b) / 2 - sum(a) / 2))
        if pairs:
            means = [float(stats.trim_mean(column, TRIM)) for column in np.array(pairs).T]
            found.append((means[0], means[1]))
    return found


def _by_block_and_prompt(rows: Iterable[Row]) -> list[list[list[Row]]]:
    grouped: dict[int, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        grouped[row.block][row.prompt_id].append(row)
    return [list(grouped[number].values()) for number in sorted(grouped)]


@dataclass(slots=True)
class _Counts:
    warmup: int
    unfinished: int = 0
    failed: int = 0
    one_sided: int = 0

    def left(self, empty: int) -> Left:
        return Left(self.warmup, self.unfinished, self.failed, self.one_sided, empty)


def _block(number: int, rows: Sequence[Row], counts: _Counts) -> Block:
    (prompts,) = _by_block_and_prompt(rows)
    found = [_difference(number, prompt, counts) for prompt in prompts]
    known = [difference for difference in found if difference is not None]
    times = {
        arm: tuple(math.inf if (ttft := ttft_of(row)) is None else ttft for row in rows if row.arm == arm)
        for arm in (ARM_OFF, ARM_ON)
    }
    return Block(number, trimmed_mean(known) if known else math.nan, times[ARM_OFF], times[ARM_ON])


def _difference(number: int, prompt: Sequence[Row], counts: _Counts) -> float | None:
    """B - A of one prompt; None if it does not say."""
    if not {row.arm for row in prompt} <= {ARM_OFF, ARM_ON} or not {row.slot for row in prompt} <= set(SLOTS):
        raise StatisticsError(f"block {number}: a row is not of arm A or B, or not in slot 0 to 3: is this a study?")
    if len({row.slot for row in prompt}) < len(prompt):
        raise StatisticsError(f"block {number}: prompt {prompt[0].prompt_id!r} twice in one slot: rows of two studies?")
    a = [ttft_of(row) for row in prompt if row.arm == ARM_OFF]
    b = [ttft_of(row) for row in prompt if row.arm == ARM_ON]
    if len(prompt) < len(SLOTS):
        counts.unfinished += 1
        return None
    if sum(row.slot for row in prompt if row.arm == ARM_OFF) != sum(SLOTS) // 2 or len(a) != 2:
        raise StatisticsError(f"block {number}: its arms are not A B B A or B A A B: a drift would not cancel")
    failed_a, failed_b = a.count(None), b.count(None)
    if failed_a or failed_b:
        counts.one_sided += failed_a != failed_b
        counts.failed += failed_a == failed_b
        # A request that failed never got its first token: later than any that did.
        return None if failed_a == failed_b else math.inf if failed_b > failed_a else -math.inf
    return (sum(filter(None, b)) - sum(filter(None, a))) / 2


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the `TRIM` largest and smallest. Infinite values that are left decide; both signs give nan."""
    ordered = sorted(values)
    cut = int(TRIM * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    if math.isinf(kept[0]) and math.isinf(kept[-1]) and kept[0] != kept[-1]:
        return math.nan
    return kept[0] if math.isinf(kept[0]) else kept[-1] if math.isinf(kept[-1]) else sum(kept) / len(kept)
