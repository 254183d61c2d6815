"""report.html of an overhead study: one file, offline, without a script. Style and policy are those of a run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.overhead.axes import Drawing
from reports.overhead.curves import QUANTILES, ecdf, quantiles, timeline
from reports.overhead.forest import forest
from reports.overhead.results import CellReport, OverheadVerdict, StudyReport
from reports.overhead.waterfall import waterfall
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
from reports.page import environment, inlined
from reports.text import counted

STYLES = ("style.css", "overhead.css")


@dataclass(frozen=True, slots=True)
class _CellView:
    """A cell with its pictures. `number` makes its anchors; `rows` are the quantiles, B after A."""

    number: int
    report: CellReport
    ecdf: Drawing
    timeline: Drawing
    waterfall: Drawing | None
    rows: tuple[tuple[str, tuple[float, ...]], ...]


def overhead_html(study: StudyReport) -> str:
    """The whole page."""
    page = environment()
    page.globals.update(
        MARKS=VERDICT_MARKS,
        TONES={
            OverheadVerdict.EQUIVALENT: "pass",
            OverheadVerdict.OVERHEAD: "fail",
            OverheadVerdict.INCONCLUSIVE: "unknown",
        },
        amount=amount,
        between=between,
        counted=counted,
        left_out=left_out,
        percent=percent,
        rate=rate,
        relative_interval=relative_interval,
        seconds=seconds,
        share_interval=share_interval,
    )
    return page.get_template("overhead.html.j2").render(
        study=study,
        sentence=sentence_of([cell.estimate for cell in study.cells]),
        forest=forest([cell.estimate for cell in study.cells]) if study.cells else None,
        cells=_views(study.cells),
        quantile_names=[f"{share:.0%}" for share in QUANTILES],
        **inlined(STYLES),
    )


def _views(cells: Sequence[CellReport]) -> list[_CellView]:
    return [
        _CellView(
            number,
            cell,
            ecdf(cell.a, cell.b),
            timeline(cell.a, cell.b),
            waterfall(cell.stages, cell.estimate) if cell.stages else None,
            (("A", quantiles(cell.a)), ("B", quantiles(cell.b))),
        )
        for number, cell in enumerate(cells, 1)
    ]
