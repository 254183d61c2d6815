"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

scenario_paths = click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs are kept, each in a folder of its own.",
)
