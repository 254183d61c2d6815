"""Everything that can be named, with the distribution that it comes from: what `kvchaos list` shows of extensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engine.connectors.registry import CONNECTORS
from engine.extensions import ExtensionError, Registry
from faults.registry import FAULTS
from harness.targets import TARGETS

T = TypeVar("T")

REGISTRIES: dict[str, Registry[Any]] = {registry.group: registry for registry in (CONNECTORS, FAULTS, TARGETS)}
"""By their group of entry points."""


@dataclass(frozen=True, slots=True)
class Named(Generic[T]):
    """A thing in a registry. `distribution` is such as `kvchaos-example 0.1.0`."""

    name: str
    distribution: str
    thing: T


def usable(registry: Registry[T]) -> tuple[list[Named[T]], list[str]]:
    """Import all that is installed. Returns what can be used, by name, and a line for each that cannot."""
    found, problems = [], []
    for name in registry.names:
        try:
            found.append(Named(name, registry.distribution(name), registry.choose(name)))
        except ExtensionError as error:
            problems.append(str(error))
    return found, problems


def refuse(problems: list[str]) -> None:
    """Raise ExtensionError with these lines, if there are any."""
    if problems:
        raise ExtensionError("\n".join(problems))
