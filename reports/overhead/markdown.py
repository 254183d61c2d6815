"""summary.md of an overhead study: verdicts first, then what they stand on, for the page of a CI job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reports.markdown import escape
from reports.overhead.results import CellReport, Estimate, StageCost, StudyReport
from reports.overhead.words import (
    VERDICT_MARKS,
    amount,
    between,
    left_out,
    percent,
    rate,
    relative_interval,
    seconds,
    sentence_of,
    share_interval,
)
from reports.text import counted


def overhead_markdown(study: StudyReport) -> str:
    """The whole page."""
    estimates = [cell.estimate for cell in study.cells]
    page = ["# kvchaos: what KV checksums cost in time to first token", "", f"**{escape(sentence_of(estimates))}**", ""]
    page += [f"- {escape(name)}: {escape(value)}" for name, value in study.facts]
    page += [f"- {escape(note)}" for note in study.notes]
    if estimates:
        page += ["", *_verdicts(estimates)]
    if study.calibration:
        page += ["", "## How often such verdicts are wrong", "", *_calibration(study)]
    for cell in study.cells:
        page += ["", *_cell(cell)]
    return "\n".join(page) + "\n"


def _verdicts(estimates: Sequence[Estimate]) -> list[str]:
    head = ("cell", "verdict", "B - A", "interval", "margin", "median A", "blocks")
    rows = [
        (
            found.cell,
            f"{VERDICT_MARKS[found.verdict]} {found.verdict}",
            percent(found.relative),
            relative_interval(found),
            percent(found.margin),
            seconds(found.median_a_s),
            str(found.blocks),
        )
        for found in estimates
    ]
    return _table(head, rows)


def _calibration(study: StudyReport) -> list[str]:
    rows = [
        (found.what, rate(found.count, found.sets), share_interval(found.interval), found.case)
        for found in study.calibration
    ]
    return _table(("what would be wrong", "how often", "exact 95% interval", "worst case"), rows)


def _cell(cell: CellReport) -> list[str]:
    found, rates = cell.estimate, cell.estimate.error_rates
    lines = [f"## {escape(found.cell)}: {found.verdict}", "", escape(found.why), ""]
    judged = (
        "TTFT",
        seconds(found.median_a_s),
        seconds(found.median_b_s),
        seconds(found.diff_s, signed=True),
        f"{seconds(found.ci_low_s, signed=True)} to {seconds(found.ci_high_s, signed=True)}",
    )
    others = [
        (
            item.name,
            amount(item.a, item.unit),
            amount(item.b, item.unit),
            amount(item.difference, item.unit, signed=True),
            between(item.interval, item.unit),
        )
        for item in (found.p95, *found.secondary)
    ]
    lines += [*_table(("figure", "A", "B", "B - A", f"{found.confidence:.0%} interval"), [judged, *others]), ""]
    failed = f"Failed: {rate(rates.errors_a, rates.requests_a)} in A, {rate(rates.errors_b, rates.requests_b)} in B"
    failed += f"; Fisher's exact one-sided p for more in B: {rates.more_in_b_p:.2g}."
    lines += [escape(f"{failed} {' '.join(left_out(found.left))}")]
    if found.blocks_needed is not None and not found.precise:
        needed = counted(found.blocks_needed, "block")
        lines += ["", f"With this noise, about {needed} would bring the interval to half the margin."]
    if cell.stages:
        lines += ["", *_stages(cell.stages), "", escape(cell.stages_said)]
    return lines


def _stages(stages: Sequence[StageCost]) -> list[str]:
    rows = [
        (stage.stage, seconds(stage.seconds, signed=True), between(stage.interval) if stage.interval else "")
        for stage in stages
    ]
    total = sum(stage.seconds for stage in stages)
    return _table(("stage", "a request", "interval"), [*rows, ("sum", seconds(total, signed=True), "")])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(escape, row))} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]
