"""The calibrated rates as data: `calibration.json` beside this module, what a report prints of it, and a page's tables.

The file is written by `kvchaos overhead-calibrate --save` from recorded A/A rows and committed, so that each report can
say how often its verdicts are wrong without simulating anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import InputError
from harness.overhead.blocks import StatisticsError
from harness.overhead.calibrate import Case, all_cases, noise_of, stopping_noise
from harness.overhead.choices import Choice, choices
from harness.overhead.design import Kind
from harness.overhead.error_rates import rate_interval
from harness.overhead.rows import Row
from harness.overhead.stats import cells_of, estimate
from reports.files import write_atomically
from reports.overhead.results import CalibratedRate
from reports.overhead.words import percent

PACKAGED = Path(__file__).parent / "calibration.json"
DEFAULT_MOST = 400


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recorded A/A study itself says of a cell; `low` and `high` are the interval of the relative difference.

    `spread` is the standard deviation of the blocks' differences, relative to the median TTFT.
    """

    cell: str
    blocks: int
    median_s: float
    spread: float
    relative: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that a calibration found. `margin` is relative; `most` is the largest number of blocks of a study."""

    margin: float
    most: int
    recorded: tuple[Recorded, ...]
    cases: tuple[Case, ...]
    choices: tuple[Choice, ...]


def calibrate(rows: Sequence[Row], margin: float, most: int, compare: bool = True) -> Calibration:
    """Simulate studies from every cell of recorded A/A rows: half a minute a cell. `compare` adds the other estimators.

    Raises:
        StatisticsError: a cell has too few blocks, or the rows are no A/A study.
    """
    if others := {row.study for row in rows} - {str(Kind.AA)}:
        raise StatisticsError(f"rows of a study {min(others)!r}: record A/A rows, with `kvchaos overhead --aa`")
    cells = cells_of(rows)
    found = choices(stopping_noise(noise_of(rows, cells[0]), margin)) if compare and cells else []
    return Calibration(
        margin,
        most,
        tuple(_recorded(rows, cell, margin) for cell in cells),
        tuple(all_cases(rows, cells, margin, most)),
        tuple(found),
    )


def _recorded(rows: Sequence[Row], cell: str, margin: float) -> Recorded:
    own = estimate(rows, cell, margin)
    spread = float(noise_of(rows, cell).differences.std())
    bounds = own.relative_low, own.relative_high
    return Recorded(cell, own.blocks, own.median_a_s, spread, own.relative, *bounds, str(own.verdict))


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration, a case a line.

    Raises:
        ReportError: the file cannot be written.
    """
    parts = {name: value for name, value in asdict(calibration).items() if not isinstance(value, tuple | list)}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in parts.items()]
    for name in ("recorded", "cases", "choices"):
        items = ",\n".join(f"  {json.dumps(asdict(item))}" for item in getattr(calibration, name))
        lines.append(f" {json.dumps(name)}: [\n{items}\n ]")
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path = PACKAGED) -> Calibration:
    """Read what `save` wrote.

    Raises:
        InputError: it is missing, or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Calibration(
            found["margin"],
            found["most"],
            tuple(Recorded(**item) for item in found["recorded"]),
            tuple(Case(**item) for item in found["cases"]),
            tuple(Choice(**item) for item in found["choices"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: no calibration ({error}): write it with `kvchaos overhead-calibrate --save FILE`"
        ) from None


def worst_rates(calibration: Calibration) -> tuple[CalibratedRate, ...]:
    """Of each way to be wrong, the case in which it happened most often."""
    margin = calibration.margin
    large = max(case.shift for case in calibration.cases)
    ways: tuple[tuple[str, float, Callable[[Case], int]], ...] = (
        ("no cost at all, called OVERHEAD", 0.0, lambda case: case.overhead),
        (f"a cost of {percent(margin)} (the margin), called EQUIVALENT", margin, lambda case: case.equivalent),
        (f"a cost of {percent(margin)} (the margin), called OVERHEAD", margin, lambda case: case.overhead),
        (f"a cost of {percent(large)}, called EQUIVALENT", large, lambda case: case.equivalent),
    )
    return tuple(_worst(what, [c for c in calibration.cases if c.shift == shift], count) for what, shift, count in ways)


def _worst(what: str, cases: Sequence[Case], count: Callable[[Case], int]) -> CalibratedRate:
    case = max(cases, key=lambda case: count(case) / case.sets)
    return CalibratedRate(what, count(case), case.sets, rate_interval(count(case), case.sets), case_words(case))


def case_words(case: Case) -> str:
    """A case as a person reads it."""
    blocks = "blocks until precise" if case.blocks is None else f"{case.blocks} blocks"
    noise = "noise as recorded" if case.noise == 1 else f"noise times {case.noise:.2g}"
    return f"{case.cell}, {blocks}, {noise}"
