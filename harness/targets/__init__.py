"""Where scenarios run, by name: kvchaos' own targets, and those of other distributions (docs/extending.md)."""

from __future__ import annotations

from typing import Any

from engine.extensions import Registry, lacks
from harness.targets.base import Target
from harness.targets.processes import DOCKER, LOCAL
from harness.targets.sim import SimTarget
from harness.targets.vllm.target import VLLM

GROUP = "kvchaos.targets"
API_VERSION = 1

_OWN: dict[str, Target] = {target.name: target for target in (SimTarget(), LOCAL, DOCKER, VLLM)}


def _check(extension: Any) -> str | None:
    wrong = lacks(extension, texts=("name", "summary"), methods=("run",))
    provides = getattr(extension, "provides", None)
    if wrong is None and not (isinstance(provides, frozenset) and all(isinstance(name, str) for name in provides)):
        return "has no provides, a frozenset of the names of seams and levers"
    return wrong


def takes_connector(target: Target) -> bool:
    """Whether `--connector` can say what moves the KV on this target."""
    return bool(getattr(target, "takes_connector", False))


TARGETS: Registry[Target] = Registry(GROUP, "target", API_VERSION, _OWN, _check)

__all__ = ["API_VERSION", "GROUP", "TARGETS", "Target", "takes_connector"]
