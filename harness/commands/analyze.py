"""`kvchaos analyze`: judge a stored history again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from harness.commands.options import json_output
from harness.commands.output import printing
from harness.errors import HistoryError
from harness.rundir import read_options
from harness.runner import judge_run
from reports.errors import BrokenResultsError
from reports.results import RunResult, read_results, to_json
from reports.terminal import print_run
from reports.write import RESULTS_FILE, write_reports


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option("--write", is_flag=True, help="Write results.json and the reports of RUN_DIR anew.")
@json_output
def analyze(run_dir: Path, write: bool, as_json: bool) -> int:
    """Judge the history in RUN_DIR again, with this version's judge, and exit with what it says.

    Nothing is run. Without --write nothing in RUN_DIR changes; what differs from its results.json is said.
    """
    if not os.path.isdir(run_dir):  # Path.is_dir raises where it may not look
        raise HistoryError(f"{run_dir}: no such folder: give the folder of a run, such as runs/latest")
    result = judge_run(run_dir, read_options(run_dir))
    if write:
        write_reports(run_dir, result)
    with printing() as console:
        if as_json:
            click.echo(json.dumps({"exit_code": result.exit_code, **to_json(result)}))
            return result.exit_code
        print_run(result, run_dir, console)
        if not write:
            click.echo(_compared(run_dir / RESULTS_FILE, result))
    return result.exit_code


def _compared(path: Path, result: RunResult) -> str:
    """What differs from the stored results. That they are missing or damaged says nothing about the history."""
    if not os.path.exists(path):
        return f"There is no {path.name} to compare with: --write makes it."
    try:
        stored = read_results(path)
    except BrokenResultsError as error:
        return f"Not compared with {error}"
    before, after = ({cell.id: cell for cell in cells} for cells in (stored.cells, result.cells))
    changed = [cell_id for cell_id in {**before, **after} if before.get(cell_id) != after.get(cell_id)]
    return f"Judged differently from {path.name}: {', '.join(changed) or 'nothing'}."
