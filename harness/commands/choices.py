"""Options whose values are names in a registry: where to run, and what moves the KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from engine.connectors import DEFAULT_CONNECTOR
from engine.connectors.registry import CONNECTORS
from engine.extensions import Registry
from harness.targets import TARGETS
from scenarios.problems import did_you_mean


def _known_to(registry: Registry[Any]) -> Callable[[click.Context, click.Parameter, str], str]:
    """Not `click.Choice`, which would want every name when the command is defined: an extension is imported here."""

    def check(ctx: click.Context, param: click.Parameter, value: str) -> str:
        try:
            registry.choose(value)
        except KeyError:
            names = registry.names
            raise click.BadParameter(
                f"{value!r} is not one of {', '.join(names)}{did_you_mean(value, names)}", ctx, param
            ) from None
        return value

    return check


target_option = click.option(
    "--target",
    metavar="NAME",
    default="sim",
    show_default=True,
    callback=_known_to(TARGETS),
    help="Where to run: see `kvchaos list targets`.",
)
connector_option = click.option(
    "--connector",
    metavar="NAME",
    default=DEFAULT_CONNECTOR,
    show_default=True,
    callback=_known_to(CONNECTORS),
    help="What moves the KV, where the target lets one choose: see `kvchaos list connectors`.",
)
