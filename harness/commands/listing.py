"""`kvchaos list`: what there is to use."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from engine.connectors.registry import CONNECTORS
from engine.extensions import Registry
from faults.registry import FAULTS, moments_of
from harness.commands.options import json_output
from harness.commands.output import printing
from harness.plugins import refuse, usable
from harness.targets import TARGETS
from scenarios.loader import load_scenarios
from scenarios.words import Policy


@click.group("list")
def list_group() -> None:
    """List scenarios, faults, policies, targets or connectors."""


def _print(rows: list[dict[str, str]], as_json: bool) -> None:
    with printing() as console:
        if as_json:
            click.echo(json.dumps(rows))
            return
        table = Table(box=None, pad_edge=False)
        for name in rows[0]:
            table.add_column(name, no_wrap=name == "from")
        for row in rows:
            table.add_row(*row.values())
        if not console.is_terminal:
            console.width = 160
        console.print(table)


@list_group.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@json_output
def scenarios(paths: tuple[Path, ...], as_json: bool) -> None:
    """The scenarios in PATHS (default: the folder scenarios)."""
    found = load_scenarios(paths or (Path("scenarios"),))
    rows = [
        {"name": s.name, "faults": ", ".join(f.kind for f in s.faults) or "none", "summary": s.summary} for s in found
    ]
    _print(rows, as_json)


@list_group.command()
@json_output
def faults(as_json: bool) -> None:
    """The fault kinds, their parameters and the moments they can act at."""
    found, problems = usable(FAULTS)
    rows = []
    for fault in found:
        params = fault.thing.params_model
        rows.append(
            {
                "kind": fault.name,
                "at": ", ".join(moments_of(params)),
                "parameters": ", ".join(name for name in params.model_fields if name not in ("kind", "when")) or "none",
                "summary": (inspect.getdoc(fault.thing) or "").splitlines()[0],
                "from": fault.distribution,
            }
        )
    _print(rows, as_json)
    refuse(problems)


@list_group.command()
@json_output
def policies(as_json: bool) -> None:
    """The policies and the engine flags each stands for."""
    rows = []
    for policy in Policy:
        flags = policy.settings()
        rows.append(
            {
                "policy": str(policy),
                "kv_checksum_mode": str(flags.kv_checksum_mode),
                "kv_load_failure_policy": flags.kv_load_failure_policy,
            }
        )
    _print(rows, as_json)


@list_group.command()
@json_output
def targets(as_json: bool) -> None:
    """The targets that scenarios can run on."""
    _named("target", TARGETS, as_json)


@list_group.command()
@json_output
def connectors(as_json: bool) -> None:
    """The connectors that can move the KV of scenarios."""
    _named("connector", CONNECTORS, as_json)


def _named(column: str, registry: Registry[Any], as_json: bool) -> None:
    found, problems = usable(registry)
    _print([{column: item.name, "summary": item.thing.summary, "from": item.distribution} for item in found], as_json)
    refuse(problems)
