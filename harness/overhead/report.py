"""A study's rows and estimates as a report: results.json, summary.md and report.html beside rows.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.errors import InputError
from harness.overhead.calibration import load, worst_rates
from harness.overhead.decomposition import Explanation
from harness.overhead.rows import ARM_OFF, ARM_ON, Row
from reports.overhead.results import CalibratedRate, CellReport, Estimate, Sample, StageCost, StudyReport
from reports.overhead.write import write_overhead

ARM_LABELS = ("checksums off", "checksums on")


def write(
    run_dir: Path,
    study: str,
    rows: Sequence[Row],
    estimates: Sequence[Estimate],
    *,
    labels: tuple[str, str] = ARM_LABELS,
    facts: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    explanations: Mapping[str, Explanation] | None = None,
) -> None:
    """Write the report into `run_dir`, which must exist.

    Args:
        study: its name, for the page's head.
        labels: what arm A and arm B are.
        facts: label and value, shown as given. notes: sentences, such as which cells were not judged, and why.
        explanations: of each cell whose engines were read, what they say of their own costs.

    Raises:
        ReportError: a file cannot be written.
    """
    rates, missing = _calibrated()
    cells = tuple(_cell(found, rows, labels, (explanations or {}).get(found.cell)) for found in estimates)
    write_overhead(run_dir, StudyReport(study, tuple(facts), cells, rates, (*notes, *missing)))


def calibration_lines() -> tuple[str, ...]:
    """The calibrated rates for a terminal, a line each."""
    rates, missing = _calibrated()
    said = (
        f"{found.what}: {found.count} of {found.sets} simulated studies "
        f"({found.interval.low:.1%} to {found.interval.high:.1%}) in the worst case"
        for found in rates
    )
    return (*said, *missing)


def _calibrated() -> tuple[tuple[CalibratedRate, ...], tuple[str, ...]]:
    """What is known of wrong verdicts; a report without it says so, rather than not be written."""
    try:
        return worst_rates(load()), ()
    except InputError as error:
        return (), (f"How often these verdicts are wrong is not known: {error}",)


def _cell(found: Estimate, rows: Sequence[Row], labels: tuple[str, str], explanation: Explanation | None) -> CellReport:
    own = [row for row in rows if row.cell == found.cell and not row.warmup]
    a, b = (_sample(own, arm, label) for arm, label in zip((ARM_OFF, ARM_ON), labels, strict=True))
    if explanation is None:
        return CellReport(found, a, b)
    stages = tuple(StageCost(stage, seconds) for stage, seconds in explanation.seconds.items())
    payload = f" The payload is {explanation.payload_bytes:.0f} bytes a request."
    return CellReport(found, a, b, stages, explanation.sentence() + payload)


def _sample(rows: Sequence[Row], arm: str, label: str) -> Sample:
    own = [row for row in rows if row.arm == arm]
    answered = [(row.intended_s, row.ttft_s) for row in own if row.ok and row.ttft_s is not None]
    return Sample(
        label,
        tuple(at for at, _ in answered),
        tuple(ttft for _, ttft in answered),
        tuple(row.intended_s for row in own if not row.ok),
    )
