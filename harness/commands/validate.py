"""`kvchaos validate`: check scenarios without running them."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.commands.options import json_output, scenario_paths
from harness.commands.output import printing
from scenarios.loader import load_scenarios


@click.command()
@scenario_paths
@json_output
def validate(paths: tuple[Path, ...], as_json: bool) -> int:
    """Check the scenarios in PATHS (files or folders): every problem with its file, line and field."""
    scenarios = load_scenarios(paths)
    with printing():
        if as_json:
            click.echo(json.dumps([scenario.to_plain() for scenario in scenarios]))
            return 0
        for scenario in scenarios:
            click.echo(f"{scenario.name}: ok")
        click.echo(f"{len(scenarios)} scenario{'' if len(scenarios) == 1 else 's'} checked, all can be run")
    return 0
