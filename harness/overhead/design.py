"""The design of an overhead study, fixed before anything is sent: what is compared, on which prompts, in which order.

A block sends the same prompts four times, arms in the order A B B A (every second block: B A A B). Machines drift: what
gets slower at a steady pace adds as much to the outer two slots as to the inner two, and cancels. The mirrored blocks
give both arms the first slot equally often: it comes right after another cell's requests.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from engine.numerics import MAX_CONTEXT
from harness.errors import PlanError
from harness.overhead.rows import ARM_OFF, ARM_ON
from harness.seeds import derive

SLOTS = 4
# 8,000 rather than 8,192: the engine's context of 8,192 holds the output as well.
DEFAULT_LENGTHS = (1000, 8000)
_TOKENS = range(10, 250)  # Byte tokens, and no special token of any tokenizer that is known here.
_UNIQUE_TOKENS = 4
# Sent at once to measure a capacity.
CAPACITY_REQUESTS = 6


class Load(StrEnum):
    """Low: one request in flight, each finds the engines idle. High: arrivals at a share of the measured capacity."""

    LOW = "low"
    HIGH = "high"


class Kind(StrEnum):
    """What differs between the arms: the checksums; nothing; or the checksums and a delay of known size."""

    OVERHEAD = "overhead"
    AA = "aa"
    PLANTED = "planted"


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt length at one load."""

    prompt_tokens: int
    load: Load

    @property
    def id(self) -> str:
        """Its name in the rows."""
        return f"{self.prompt_tokens}tok-{self.load}"


@dataclass(frozen=True, slots=True)
class Design:
    """All that decides what a study sends.

    Attributes:
        margin: what counts as no difference, relative to the median TTFT without checksums (0.01 is 1%).
        high_requests: requests a slot at high load; a low slot has one.
        utilisation: arrival rate at high load, as a share of the capacity that the study measures first.
        warmup_blocks: blocks of each cell that no estimate uses.
        min_blocks, max_blocks: of each cell, without warm-up.
        time_limit_s: then no further block begins.
        pause_s: the engines are left alone between two slots for 1 to 2 times as long.
        unique_starts: the first tokens of a prompt differ from slot to slot, so that no prefix cache can hit.
    """

    kind: Kind = Kind.OVERHEAD
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    loads: tuple[Load, ...] = (Load.LOW, Load.HIGH)
    seed: int = 0
    margin: float = 0.01
    output_tokens: int = 4
    high_requests: int = 4
    utilisation: float = 0.8
    warmup_blocks: int = 1
    min_blocks: int = 8
    max_blocks: int = 400
    time_limit_s: float = 2400.0
    pause_s: float = 0.05
    unique_starts: bool = False

    def __post_init__(self) -> None:
        """Raises PlanError for what cannot be run."""
        longest = max(self.lengths, default=0) + self.output_tokens
        shortest = min(self.lengths, default=0)
        problems = (
            (not self.lengths or not self.loads, "no prompt length or no load level: name one of each or more"),
            (shortest < 2 * _UNIQUE_TOKENS, f"a prompt of {shortest} tokens: use {2 * _UNIQUE_TOKENS} or more"),
            (longest > MAX_CONTEXT, f"{longest} tokens of prompt and output: an engine holds {MAX_CONTEXT}"),
            (not 0 < self.margin < 1, f"a margin of {self.margin:.4g}: use more than 0% and less than 100%"),
            (not 0 < self.utilisation < 1, f"a utilisation of {self.utilisation:g}: from 1 on, queues grow for ever"),
            (self.min_blocks < 2, f"{self.min_blocks} blocks: an interval takes 2 or more"),
            (self.max_blocks < self.min_blocks, f"at most {self.max_blocks} blocks, but {self.min_blocks} or more"),
        )
        for wrong, what in problems:
            if wrong:
                raise PlanError(f"this study cannot be run: {what}")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The grid, short prompts first."""
        loads = sorted(set(self.loads), reverse=True)  # low first
        return tuple(Cell(length, load) for length in sorted(set(self.lengths)) for load in loads)

    @property
    def high_cells(self) -> tuple[Cell, ...]:
        """The cells whose rate needs a measured capacity."""
        return tuple(cell for cell in self.cells if cell.load is Load.HIGH)

    def count(self, cell: Cell) -> int:
        """Requests in one slot of the cell."""
        return 1 if cell.load is Load.LOW else self.high_requests

    def seed_of(self, *parts: Any) -> int:
        """The seed of one choice. It does not depend on what else the study holds."""
        return derive("overhead", self.seed, *parts)

    def to_plain(self) -> dict[str, Any]:
        """The design as JSON values."""
        return asdict(self)


def arms(block: int) -> tuple[str, str, str, str]:
    """The arms of a block's slots."""
    a, b = (ARM_OFF, ARM_ON) if block % 2 == 0 else (ARM_ON, ARM_OFF)
    return a, b, b, a


def prompt_id(cell: Cell, block: int, index: int) -> str:
    """The name of a prompt. Cells of one length do not share prompts."""
    return f"{cell.id}-b{block}-p{index}"


def prompt(design: Design, cell: Cell, block: int, slot: int, index: int) -> list[int]:
    """Token ids of a prompt. The same in all slots of its block, but for its first tokens if these are to be unique."""
    name = prompt_id(cell, block, index)
    tokens = random.Random(design.seed_of("prompt", name)).choices(_TOKENS, k=cell.prompt_tokens)
    if design.unique_starts:
        start = random.Random(design.seed_of("start", name, slot))
        tokens[:_UNIQUE_TOKENS] = start.choices(_TOKENS, k=_UNIQUE_TOKENS)
    return tokens
