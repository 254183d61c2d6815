"""One study from its first request to its estimates, however it ends: what was measured is kept and judged.

Ctrl-C, a container that is told to stop, and a server that dies in the middle all leave rows; an unfinished block is
not judged, and nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import KVChaosError
from harness.overhead.accounts import Accounts
from harness.overhead.client import MonotonicClock, make_client
from harness.overhead.decomposition import Explanation
from harness.overhead.design import Cell, Design
from harness.overhead.routes import Route
from harness.overhead.rows import ROWS_FILE, Row, RowsFile
from harness.overhead.stats import Estimate, StatisticsError, cells_of, estimate, is_precise
from harness.overhead.study import Instruments, Study


@dataclass(frozen=True, slots=True)
class Setting:
    """Whom a study asks, and how.

    Attributes:
        routes: of each arm.
        engines: URLs of `producer` and `consumer`, whose counters say what checksums cost; None: unknown.
        model: the name that requests carry.
        timeout_s: for any single step of an answer; then the request has failed.
    """

    routes: Mapping[str, Route]
    engines: Mapping[str, str] | None = None
    model: str = "kvchaos"
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a study ended. `failure` is what ended it early, if something did."""

    rows: tuple[Row, ...]
    capacity: Mapping[str, float]
    stops: Mapping[str, str]
    accounts: Accounts | None
    interrupted: bool = False
    failure: KVChaosError | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """The estimates of all cells that have one, why others have none, and how far the engines explain them."""

    estimates: tuple[Estimate, ...]
    not_judged: Mapping[str, str]
    explanations: Mapping[str, Explanation]


def run_study(design: Design, setting: Setting, run_dir: Path, say: Callable[[str], None]) -> Outcome:
    """Run it and leave `rows.csv` in `run_dir`. Does not raise for what goes wrong once requests are sent.

    Raises:
        InputError: the rows cannot be written.
    """
    with RowsFile(run_dir / ROWS_FILE) as file:
        began: list[Study] = []
        interrupted, failure, accounts = False, None, None

        async def run() -> None:
            nonlocal accounts
            async with make_client(setting.timeout_s) as client:
                accounts = None if setting.engines is None else Accounts(client, setting.engines)
                enough = _enough(design)
                instruments = Instruments(client, MonotonicClock(), file.append, enough, accounts, say, setting.model)
                began.append(Study(design, setting.routes, instruments))
                await began[0].run()

        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            interrupted = True
        except KVChaosError as error:
            failure = error
    if not began:
        return Outcome((), {}, {}, accounts, interrupted, failure)
    study = began[0]
    stops = {cell: str(progress.stop) for cell, progress in study.progress.items()}
    return Outcome(tuple(study.rows), study.capacity, stops, accounts, interrupted, failure)


def judge_rows(
    rows: Sequence[Row], margin: float, accounts: Accounts | None = None, cells: Sequence[str] = ()
) -> Judged:
    """Estimate every cell of these rows, and of `cells`. One that cannot be judged says why, and the others are."""
    estimates: list[Estimate] = []
    not_judged: dict[str, str] = {}
    explanations: dict[str, Explanation] = {}
    counted = cells_of(rows)
    if counted:
        left = dict.fromkeys((*cells, *(row.cell for row in rows)))
        not_judged |= {cell: "no block beyond warm-up: it takes more time" for cell in left if cell not in counted}
    for cell in counted:
        try:
            found = estimate(rows, cell, margin)
        except StatisticsError as error:
            not_judged[cell] = str(error)
            continue
        estimates.append(found)
        explanation = accounts.explanation(found) if accounts is not None else None
        if explanation is not None:
            explanations[cell] = explanation
    return Judged(tuple(estimates), not_judged, explanations)


def _enough(design: Design) -> Callable[[Sequence[Row], Cell], bool]:
    def enough(rows: Sequence[Row], cell: Cell) -> bool:
        return is_precise(rows, cell.id, design.margin)

    return enough
