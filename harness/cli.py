"""The command line: `kvchaos`. Errors that a person can act on are one line each; the exit codes are documented."""

from __future__ import annotations

import sys
from importlib.metadata import version

import click

from engine.errors import EXIT_USAGE, KVChaosError
from harness.commands.analyze import analyze
from harness.commands.checksum import checksum
from harness.commands.listing import list_group
from harness.commands.merge import merge
from harness.commands.payload import payload
from harness.commands.run import run
from harness.commands.validate import validate

EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kvchaos"), prog_name="kvchaos")
def cli() -> None:
    """Chaos and fault injection for KV-cache transfer in prefill/decode disaggregated LLM serving.

    \b
    Exit codes: 0 every cell passed, is a known gap or not applicable; 1 a cell failed; 2 something is unknown;
    64 bad arguments or scenario; 70 the harness itself failed; 130 interrupted, finished cells kept.
    """


for command in (run, validate, list_group, analyze, merge, checksum, payload):
    cli.add_command(command)


def main() -> None:
    """Entry point of the `kvchaos` command."""
    try:
        code = cli.main(standalone_mode=False)
    except click.UsageError as error:
        error.show()
        code = EXIT_USAGE
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except KVChaosError as error:
        for line in str(error).splitlines():
            click.echo(f"kvchaos: {line}", err=True)
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)
