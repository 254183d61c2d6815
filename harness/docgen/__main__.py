"""`python -m harness.docgen faults schema`: write generated pages anew, from the root of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from engine.errors import KVChaosError
from harness.docgen.pages import PAGES
from reports.files import write_atomically


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(sorted(PAGES)))
def main(names: tuple[str, ...]) -> None:
    """Write the pages NAMES anew."""
    root = Path.cwd()
    if not (root / "docs").is_dir():
        raise click.ClickException(f"{root} has no folder docs: run this in the root of the repository")
    for name in names:
        page = PAGES[name]
        try:
            write_atomically(root / page.path, page.text(root))
        except KVChaosError as error:
            raise click.ClickException(f"{page.path}: {error}") from None
        click.echo(page.path)


if __name__ == "__main__":
    sys.exit(main())
