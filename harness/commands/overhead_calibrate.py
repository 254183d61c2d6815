"""`kvchaos overhead-calibrate`: how often the verdicts of an overhead study are wrong, from recorded A/A rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from harness.commands.options import json_output
from harness.commands.output import printing


@click.command("overhead-calibrate")
@click.argument("rows", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--margin", type=click.FloatRange(0, min_open=True), default=1, show_default=True, help="In percent.")
@click.option(
    "--max-blocks", type=click.IntRange(8), default=400, show_default=True, help="Of a study that stops itself."
)
@click.option("--compare/--no-compare", default=True, show_default=True, help="Other estimators and intervals, too.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Also write what was found to this file.")
@json_output
def overhead_calibrate(
    rows: tuple[Path, ...], margin: float, max_blocks: int, compare: bool, save: Path | None, as_json: bool
) -> int:
    """Simulate 1000 studies a case from the rows.csv of A/A studies (`kvchaos overhead --aa`), and judge them.

    Studies are made of recorded blocks, with no cost and with planted ones. Says how often each comes out EQUIVALENT,
    OVERHEAD and INCONCLUSIVE, for several numbers of blocks and for studies that stop when they are precise. With
    --save harness/overhead/calibration.json, reports print the worst rates, and `make docs` the tables.
    """
    from harness.overhead import calibration  # scipy takes its second, and --help must not wait for it
    from harness.overhead.calibration_page import tables
    from harness.overhead.rows import read_rows

    found = calibration.calibrate([row for path in rows for row in read_rows(path)], margin / 100, max_blocks, compare)
    if save is not None:
        calibration.save(found, save)
    with printing():
        click.echo(json.dumps(asdict(found)) if as_json else "\n".join(tables(found)))
    return 0
