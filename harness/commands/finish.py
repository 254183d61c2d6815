"""The end of every command that leaves a run: judge, write the reports, print, and say the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.commands.output import printing
from harness.rundir import Options, point_latest
from harness.runner import judge_run
from reports.results import to_json
from reports.terminal import print_run
from reports.write import write_reports


def finish(run_dir: Path, runs_dir: Path, options: Options, *, as_json: bool) -> int:
    """Judge the history in `run_dir` and report. Returns the exit code."""
    result = judge_run(run_dir, options)
    write_reports(run_dir, result)
    point_latest(runs_dir, run_dir)
    with printing() as console:
        if as_json:
            click.echo(json.dumps({"run_dir": str(run_dir), "exit_code": result.exit_code, **to_json(result)}))
        else:
            print_run(result, run_dir, console)
    return result.exit_code
