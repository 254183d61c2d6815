"""The tables of a calibration in Markdown, for docs/overhead.md and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.errors import InputError
from harness.docgen.markdown import generated, table
from harness.overhead.calibrate import Case
from harness.overhead.calibration import Calibration, load, worst_rates
from harness.overhead.choices import Choice
from harness.overhead.error_rates import rate_interval
from reports.overhead.words import percent, rate, share_interval

BEGIN, END = "<!-- calibration: begin -->", "<!-- calibration: end -->"


def overhead_page(root: Path) -> str:
    """docs/overhead.md below `root` with the tables of the packaged calibration.

    Raises:
        InputError: the page has no place for them, or there is no calibration.
    """
    return in_page((root / "docs" / "overhead.md").read_text(encoding="utf-8"), load())


def in_page(page: str, calibration: Calibration) -> str:
    """`page` with what is between its two marks made anew.

    Raises:
        InputError: a mark is missing, or they are in the wrong order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"docs/overhead.md: no place for the tables: it needs the lines {BEGIN} and {END}")
    source = generated("harness/overhead/calibration.json", "docs")
    return f"{before}{BEGIN}\n{source}\n\n" + "\n".join(tables(calibration)) + f"\n\n{END}{after}"


def tables(calibration: Calibration) -> list[str]:
    """The lines of all tables."""
    lines = ["The recorded A/A studies:", "", *_recorded(calibration), ""]
    lines += ["The worst of all cases, which a report prints beside its verdicts:", "", *_worst(calibration), ""]
    lines += ["Every case, in % of the simulated studies:", "", *_cases(calibration.cases)]
    if calibration.choices:
        lines += [
            "",
            "Other estimators and intervals on such noise; the true cost is 0, and 5% are due:",
            "",
            *_choices(calibration.choices),
        ]
    return lines


def _recorded(calibration: Calibration) -> list[str]:
    head = ("cell", "blocks", "median TTFT", "spread of a block's difference", "difference, 90% interval", "verdict")
    return table(
        head,
        [
            [
                recorded.cell,
                str(recorded.blocks),
                f"{recorded.median_s * 1000:.1f} ms",
                f"{recorded.spread:.1%}",
                f"{percent(recorded.relative)} ({percent(recorded.low)} to {percent(recorded.high)})",
                recorded.verdict,
            ]
            for recorded in calibration.recorded
        ],
    )


def _worst(calibration: Calibration) -> list[str]:
    rows = [
        [
            found.what,
            rate(found.count, found.sets),
            share_interval(found.interval),
            found.case,
        ]
        for found in worst_rates(calibration)
    ]
    return table(("what would be wrong", "how often", "exact 95% interval", "where"), rows)


def _cases(cases: Sequence[Case]) -> list[str]:
    """A row a kind of study, a column a planted cost: EQUIVALENT / OVERHEAD / INCONCLUSIVE."""
    shifts = sorted({case.shift for case in cases})
    kinds: dict[tuple[str, float, int | None], dict[float, Case]] = {}
    for case in cases:
        kinds.setdefault((case.cell, case.noise, case.blocks), {})[case.shift] = case
    rows = []
    for (cell, noise, blocks), found in kinds.items():
        one = next(iter(found.values()))
        said = str(blocks) if blocks is not None else f"until precise ({one.stopped / one.sets:.0%} were)"
        median = str(one.median_blocks)
        rows.append([cell, f"x {noise:.3g}", said, median, *(_shares(found[shift]) for shift in shifts)])
    return table(("cell", "noise", "blocks", "median", *(percent(shift) for shift in shifts)), rows)


def _shares(case: Case) -> str:
    return " / ".join(f"{100 * n / case.sets:.1f}" for n in (case.equivalent, case.overhead, case.inconclusive))


def _choices(found: Sequence[Choice]) -> list[str]:
    """5% are due on either side; of two that keep to it, the narrower one is better."""
    rows = []
    for choice in found:
        sides = (
            f"{n / choice.sets:.1%} ({share_interval(bounds)})"
            for n in (choice.too_low, choice.too_high)
            for bounds in [rate_interval(n, choice.sets)]
        )
        rows.append([choice.cell, str(choice.blocks), choice.location, choice.method, *sides, f"{choice.width:.2%}"])
    return table(("cell", "blocks", "estimator", "interval", "all below 0", "all above 0", "median width"), rows)
