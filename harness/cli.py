"""The command line: `kvchaos`. Errors that a person can act on are one line each; the exit codes are documented."""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from importlib.metadata import version

import click

from engine.errors import EXIT_SOFTWARE, EXIT_USAGE, KVChaosError

EXIT_INTERRUPTED = 130

# Command -> module and name in it.
COMMANDS = {
    "run": ("run", "run"),
    "validate": ("validate", "validate"),
    "diff": ("diff", "diff"),
    "doctor": ("doctor", "doctor"),
    "list": ("listing", "list_group"),
    "analyze": ("analyze", "analyze"),
    "merge": ("merge", "merge"),
    "bench": ("bench", "bench"),
    "checksum": ("checksum", "checksum"),
    "overhead": ("overhead", "overhead"),
    "overhead-calibrate": ("overhead_calibrate", "overhead_calibrate"),
    "payload": ("payload", "payload"),
    "schema": ("schema", "schema"),
    "selftest": ("selftest", "selftest"),
    "serve": ("serve", "serve"),
    "soak": ("soak", "soak"),
    "strength": ("strength", "strength"),
}


class _Commands(click.Group):
    """Imports a command when it is wanted: torch takes its second, and Ctrl-C in it must not show a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"harness.commands.{module}"), name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kvchaos"), prog_name="kvchaos")
def cli() -> None:
    """Chaos and fault injection for KV-cache transfer in prefill/decode disaggregated LLM serving.

    \b
    Exit codes: 0 every cell passed, is a known gap or not applicable; 1 a cell failed; 2 something is unknown;
    64 bad arguments or scenario; 70 the harness itself failed; 130 interrupted, finished cells kept.
    """


def main() -> None:
    """Entry point of the `kvchaos` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and summaries are anyone's: what the terminal's encoding lacks is escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name="kvchaos", standalone_mode=False)
    except SystemExit:  # click's, when the reader of a pipe has left while it printed help
        code = 0
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
    except Exception:  # noqa: BLE001 - whatever it is, 1 would say that a cell failed
        traceback.print_exc()
        click.echo("kvchaos: this is a bug of kvchaos, not of what it tests: please report it", err=True)
        code = EXIT_SOFTWARE
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
