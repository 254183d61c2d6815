"""The end of a study: its files, a table for a person or JSON for a program, and the exit code."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.errors import HistoryError
from harness.overhead.design import Design, Kind
from harness.overhead.report import calibration_lines, write
from harness.overhead.rows import Row, read_rows
from harness.overhead.session import Judged, Outcome, judge_rows
from harness.rundir import circumstances
from reports.files import write_atomically
from reports.overhead.results import Estimate, OverheadVerdict, finite
from reports.text import counted
from reports.write import HTML_FILE

STUDY_FILE = "study.json"
EXIT_INTERRUPTED = 130
_STOPPED = {
    "precise": "precise enough",
    "blocks": "no more blocks allowed",
    "time": "the time was up",
    "interrupted": "cut off",
}
_LABELS = {
    Kind.OVERHEAD: ("checksums off", "checksums on"),
    Kind.AA: ("off, A", "off, B"),
    Kind.PLANTED: ("checksums off", "on, and delayed"),
}
_MEANING = {
    Kind.OVERHEAD: "checksums off (A) and on (B)",
    Kind.AA: "A/A: checksums off in both arms, so any difference is noise",
    Kind.PLANTED: "checksums off (A), and on with a planted delay (B)",
}


def keep_design(run_dir: Path, design: Design, command: Sequence[str], now: datetime) -> None:
    """Write what the study will do before it does anything. Raises ReportError."""
    _write(run_dir, {"design": design.to_plain(), "machine": _machine(), **circumstances(command, now)})


@dataclass(frozen=True, slots=True)
class Told:
    """A judged study, and all that is told of it. `facts` are label and value; `stops` says why each cell ended."""

    kind: Kind
    rows: tuple[Row, ...]
    judged: Judged
    facts: tuple[tuple[str, str], ...]
    stops: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        return EXIT_INTERRUPTED if self.interrupted else exit_code(self.kind, self.judged)


def finished(run_dir: Path, design: Design, outcome: Outcome) -> Told:
    """Judge what a study measured, and add to `study.json` how it went."""
    cells = [cell.id for cell in design.cells]
    judged = judge_rows(outcome.rows, design.margin, outcome.accounts, cells)
    study = json.loads((run_dir / STUDY_FILE).read_text(encoding="utf-8"))
    study |= {"capacity": outcome.capacity, "stopped": outcome.stops, "interrupted": outcome.interrupted}
    _write(run_dir, study | {"costs": {cell: asdict(found) for cell, found in judged.explanations.items()}})
    facts = [("command", study["command"]), ("began", study["created"]), ("machine", study["machine"])]
    facts += [
        ("margin", f"{design.margin:.3g} of the median TTFT of arm A"),
        ("time limit", f"{design.time_limit_s:g} s"),
    ]
    facts += [
        (f"capacity, {cell}", f"{rate:.3g} requests/s without checksums") for cell, rate in outcome.capacity.items()
    ]
    return Told(design.kind, outcome.rows, judged, tuple(facts), outcome.stops, outcome.interrupted)


def judged_again(rows_file: Path, margin: float) -> Told:
    """Judge the rows of an earlier study, or of a locust run.

    Raises:
        InputError: they cannot be read, or are of several studies.
    """
    rows = read_rows(rows_file)
    kinds = {row.study for row in rows}
    if len(kinds) != 1 or not kinds <= set(Kind):
        raise HistoryError(f"{rows_file}: rows of {len(kinds)} studies ({', '.join(sorted(kinds))}): give those of one")
    facts = (("rows", str(rows_file)), ("margin", f"{margin:.3g} of the median TTFT of arm A"))
    return Told(Kind(kinds.pop()), rows, judge_rows(rows, margin), facts)


def write_report(run_dir: Path, told: Told) -> None:
    """The page, the summary and the JSON. Raises ReportError."""
    notes = [f"{cell} is not judged: {why}" for cell, why in told.judged.not_judged.items()]
    notes += [f"{cell} ended because: {_STOPPED[stop]}." for cell, stop in told.stops.items()]
    # Only where the arms differ by checksums and nothing else do the stages have to add up to the difference.
    explanations = told.judged.explanations if told.kind is Kind.OVERHEAD else None
    estimates = told.judged.estimates
    labels = _LABELS[told.kind]
    name = f"overhead: {_MEANING[told.kind]}"
    write(run_dir, name, told.rows, estimates, labels=labels, facts=told.facts, notes=notes, explanations=explanations)


def exit_code(kind: Kind, judged: Judged) -> int:
    """0, 1 or 2, as the command's help says."""
    verdicts = {found.verdict for found in judged.estimates}
    good, bad = OverheadVerdict.EQUIVALENT, OverheadVerdict.OVERHEAD
    if kind is Kind.PLANTED:
        good, bad = bad, good
    if bad in verdicts:
        return 1
    return 0 if verdicts == {good} and not judged.not_judged else 2


def _machine() -> str:
    return f"{sys.platform} {platform.machine()}, {counted(os.cpu_count() or 0, 'core')}"


def _write(run_dir: Path, study: Mapping[str, Any]) -> None:
    write_atomically(run_dir / STUDY_FILE, json.dumps(finite(study), indent=2) + "\n")


def print_study(run_dir: Path, told: Told, console: Console) -> None:
    """A table, each verdict in words, and how often such verdicts are wrong."""
    judged = told.judged
    console.print(f"Time to first token, {_MEANING[told.kind]}")
    if judged.estimates:
        console.print(_table(judged.estimates))
    for found in judged.estimates:
        for line in _details(found, told):
            console.print(line, soft_wrap=True)
    for cell, why in judged.not_judged.items():
        console.print(f"{cell}: not judged: {why}", soft_wrap=True)
    if not judged.estimates and not judged.not_judged:
        console.print("No block beyond warm-up: there is nothing to judge.")
    for line in calibration_lines():
        console.print(line, soft_wrap=True)
    console.print(f"\nReport: {run_dir / HTML_FILE}", soft_wrap=True)


def study_json(run_dir: Path, told: Told) -> str:
    """The verdicts as JSON; a figure that is unbounded or unknown is null."""
    plain = {
        "run_dir": str(run_dir),
        "exit_code": told.exit_code,
        "kind": str(told.kind),
        "cells": [asdict(found) for found in told.judged.estimates],
        "not_judged": dict(told.judged.not_judged),
        "stopped": dict(told.stops),
    }
    return json.dumps(finite(plain), allow_nan=False)


def _table(estimates: Sequence[Estimate]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("cell")
    for name in ("blocks", "median A", "B - A (90% interval)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for found in estimates:
        table.add_row(
            found.cell,
            str(found.blocks),
            f"{found.median_a_s * 1000:.1f} ms",
            f"{found.relative:+.2%} [{found.relative_low:+.2%}, {found.relative_high:+.2%}]",
            str(found.verdict),
        )
    return table


def _details(found: Estimate, told: Told) -> Iterator[str]:
    """The verdict in words, and what it stands on."""
    stop = told.stops.get(found.cell, "")
    yield f"{found.cell}: {found.verdict}. {found.why}"
    low, high = found.ci_low_s, found.ci_high_s
    said = f"  {found.diff_s * 1000:+.2f} ms [{low * 1000:+.2f}, {high * 1000:+.2f}]"
    said += f"; A: {counted(found.requests_a, 'request')}, {found.errors_a} failed"
    said += f"; B: {counted(found.requests_b, 'request')}, {found.errors_b} failed"
    yield said + (f"; {_STOPPED[stop]}" if stop else "")
    explanation = told.judged.explanations.get(found.cell)
    if explanation is not None and told.kind is Kind.OVERHEAD:
        yield f"  {explanation.sentence()}"
