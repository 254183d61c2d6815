"""`kvchaos schema`: what a scenario file may say, for editors."""

from __future__ import annotations

import click

from faults.registry import FAULTS
from harness.commands.output import printing
from harness.plugins import usable
from scenarios.json_schema import schema_text


@click.command()
def schema() -> None:
    """Print the JSON Schema of a scenario file (draft 2020-12), for editors that check and complete YAML.

    It knows every kind of fault that is installed. An editor with yaml-language-server takes it from the first line of
    a scenario:

    \b
    # yaml-language-server: $schema=path/to/scenario.schema.json

    `kvchaos validate` sees more: an editor cannot know, say, whether the longest request fits.
    """
    kinds, problems = usable(FAULTS)
    for problem in problems:
        click.echo(f"kvchaos: left out: {problem}", err=True)
    with printing():
        click.echo(schema_text(kind.name for kind in kinds), nl=False)
