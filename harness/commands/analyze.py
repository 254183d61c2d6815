"""`kvchaos analyze`: judge a stored history again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.commands.options import json_output
from harness.errors import HistoryError
from harness.rundir import read_options
from harness.runner import judge_run
from reports.results import read_results, to_json
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
    if not run_dir.is_dir():
        raise HistoryError(f"{run_dir}: no such folder: give the folder of a run, such as runs/latest")
    stored = read_results(run_dir / RESULTS_FILE) if (run_dir / RESULTS_FILE).exists() else None
    interrupted = stored.interrupted if stored is not None else False
    result = judge_run(run_dir, read_options(run_dir), interrupted)
    if write:
        write_reports(run_dir, result)
    if as_json:
        click.echo(json.dumps({"exit_code": result.exit_code, **to_json(result)}))
        return result.exit_code
    print_run(result, run_dir)
    if stored is not None and not write:
        before = {cell.id: cell for cell in stored.cells}
        changed = [cell.id for cell in result.cells if before.get(cell.id) != cell]
        click.echo(f"Judged differently from {RESULTS_FILE}: {', '.join(changed) or 'nothing'}.")
    return result.exit_code
