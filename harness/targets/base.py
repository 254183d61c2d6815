"""What a target is: something that runs a cell and writes its history. docs/extending.md shows how to add one."""

from __future__ import annotations

from typing import Protocol

from harness.history import History
from harness.plan import Cell


class Target(Protocol):
    """Runs one cell at a time. One that runs cells with the connector that they name sets `takes_connector = True`."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for `kvchaos list targets`."""
        ...

    @property
    def provides(self) -> frozenset[str]:
        """Names of the seams and levers that faults can use here."""
        ...

    def run(self, cell: Cell, history: History) -> None:
        """Run the cell to its end or its deadline. Whatever goes wrong is in the history."""
        ...
