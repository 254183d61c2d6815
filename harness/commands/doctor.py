"""`kvchaos doctor`: what this machine has of what kvchaos uses, and what to install."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from engine.errors import EXIT_SOFTWARE
from harness.commands.options import json_output
from harness.commands.output import printing
from harness.doctor import Check, examine


@click.command()
@json_output
def doctor(as_json: bool) -> int:
    """Say what is here of what kvchaos uses, and what to install.

    Exits with 0 unless something is broken that nothing works without.
    """
    checks = []
    with printing() as console:
        for check in examine():
            checks.append(check)
            if not as_json:
                console.print(_line(check), soft_wrap=True)
        if as_json:
            click.echo(json.dumps([asdict(check) | {"advice": "" if check.ok else check.advice} for check in checks]))
    return EXIT_SOFTWARE if any(check.required and not check.ok for check in checks) else 0


def _line(check: Check) -> str:
    state = "ok" if check.ok else "BROKEN" if check.required else "missing"
    line = f"{check.name:<13} {state:<8} {check.found}"
    return line if check.ok else f"{line}\n{'':<23}-> {check.advice}"
