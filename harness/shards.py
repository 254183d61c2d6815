"""Spreading a plan over machines, and running part of it twice. Neither changes what any cell does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from engine.errors import InputError
from harness.plan import Cell
from harness.seeds import derive
from scenarios.words import Role

REPEAT_SUFFIX = "--repeat"


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (from 1) of `count`."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `i/n`.

        Raises:
            InputError: it is not that.
        """
        index, _, count = text.partition("/")
        if not (index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
            raise InputError(f"--shard {text}: use i/n, such as 1/4")
        shard = cls(int(index), int(count))
        if not 1 <= shard.index <= shard.count:
            raise InputError(f"--shard {text}: i runs from 1 to n")
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, cell: Cell) -> bool:
        """Whether a cell is this shard's. A repeat goes with the cell that it repeats."""
        return self.holds_id(cell.id)

    def holds_id(self, cell_id: str) -> bool:
        """`holds`, of a cell that only its id is known of."""
        return derive("shard", cell_id.removesuffix(REPEAT_SUFFIX)) % self.count == self.index - 1


def with_repeats(cells: Sequence[Cell], percent: int, run_seed: int) -> list[Cell]:
    """The cells, and about `percent` of them once more, chosen by their names and the seed."""
    chosen = [cell for cell in cells if not cell.missing and derive("repeat", run_seed, cell.id) % 100 < percent]
    repeats = [replace(cell, id=cell.id + REPEAT_SUFFIX, role=Role.REPEAT, repeats=cell.id) for cell in chosen]
    return [*cells, *repeats]
