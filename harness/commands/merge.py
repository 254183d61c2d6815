"""`kvchaos merge`: put the shards of a run together."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from harness.commands.finish import finish
from harness.commands.options import json_output, runs_dir_option
from harness.merging import merge_runs
from harness.rundir import create


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@runs_dir_option
@json_output
def merge(run_dirs: tuple[Path, ...], runs_dir: Path, as_json: bool) -> int:
    """Put the shards in RUN_DIRS together into a run of its own, and judge it.

    The shards must come from one plan (same scenarios, seed, options, version) and hold every cell of it. The merged
    history is byte for byte that of an unsharded run.
    """
    merged = merge_runs(run_dirs)
    run_dir = create(runs_dir, merged.options, merged.plan, None, ["kvchaos", *sys.argv[1:]], datetime.now(UTC))
    merged.write(run_dir)
    return finish(run_dir, runs_dir, merged.options, as_json=as_json)
