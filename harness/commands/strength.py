"""`kvchaos strength`: what the checksums miss, measured by fault, and what must come out of it."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from engine.errors import InputError
from harness.commands.options import json_output
from harness.commands.output import printing
from harness.strength.block import Block
from harness.strength.page import rate_text, samples_text, theory_text
from harness.strength.pairs import PairCount
from harness.strength.results import ModelResult, StrengthResult
from reports.records import to_json

WIDTH = 230


@click.command()
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Drives every draw.")
@click.option(
    "--samples",
    type=click.IntRange(1000, 100_000_000),
    default=1_000_000,
    show_default=True,
    help="Corruptions of each kind that changes few pieces; kinds that change more get fewer.",
)
@click.option("--cost", is_flag=True, help="Instead, measure what version 2 costs beside version 1 on this machine.")
@json_output
def strength(seed: int, samples: int, cost: bool, as_json: bool) -> int:
    """Measure what the checksums miss: fault models against both versions and four other checksums.

    A rate comes with its exact interval (Clopper-Pearson, 99.9%), and version 1's with what it must be.
    docs/strength.md explains what is seen. The default samples take about half a minute of one core.

    \b
    Exit codes: 0 version 1's rates are those that were counted and version 2 missed nothing; 1 something else came
    out. With another seed an interval fails to hold an exact rate in about one campaign in a hundred.
    """
    if cost:
        _print_costs(as_json)
        return 0
    result = _run(seed, samples)
    with printing() as out:
        if as_json:
            click.echo(json.dumps(to_json(result), indent=1))
        else:
            _print(result, out)
    return 1 if result.surprises else 0


def _run(seed: int, samples: int) -> StrengthResult:
    """The campaign, with a progress bar on a terminal's stderr.

    Raises:
        InputError: a library that is compared with is not installed.
    """
    try:
        from harness.strength.campaign import collect, steps
    except ImportError as error:
        raise InputError(
            f"kvchaos strength compares other checksums, and {error.name} is not here: pip install 'kvchaos[bench]'"
        ) from None
    block = Block()
    parts = list(steps(seed, samples, block))
    results: list[ModelResult | list[PairCount]] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(parts))
        for name, run in parts:
            bar.update(task, description=name)
            results.append(run())
            bar.advance(task)
    return collect(seed, samples, block, results)


def _print(result: StrengthResult, console: Console) -> None:
    if not console.is_terminal:
        console.width = WIDTH
    names = [rate.checksum for rate in result.models[0].rates]
    rates = _table("fault", "samples", "version 1, expected", *names)
    for model in result.models:
        cells = [rate_text(rate).replace("**", "") for rate in model.rates]
        rates.add_row(model.model, samples_text(model), theory_text(model), *cells)
    pairs = _table("changes", "how many", "pairs of them", "pairs that cancel")
    for count in result.pairs:
        pairs.add_row(count.what, f"{count.changes:,}", f"{count.pairs:.3g}", f"{count.cancelling:,}")
    for table in (rates, pairs):
        console.print(table)
        console.print()
    for surprise in result.surprises:
        console.print(Text(f"SURPRISE: {surprise}", "bold red"))
    missed = sum(model.rate("version 2").samples for model in result.models)
    if not result.surprises:
        console.print(Text(f"Version 1 misses what it must, version 2 none of {missed:,} corruptions.", "bold"))


def _print_costs(as_json: bool) -> None:
    try:
        from harness.strength.cost import measure  # compiles the paths that it measures
    except ImportError as error:
        raise InputError(f"--cost measures the compiled path, which needs {error.name}: pip install numba") from None
    costs = measure()
    with printing() as console:
        if as_json:
            click.echo(json.dumps(to_json(costs), indent=1))
            return
        table = _table("", "version 1", "version 2", "")
        for cost in costs:
            digits = 0 if cost.unit == "characters" else 2
            table.add_row(cost.what, f"{cost.version_1:,.{digits}f}", f"{cost.version_2:,.{digits}f}", cost.unit)
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
