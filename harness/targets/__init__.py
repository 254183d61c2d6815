"""Where scenarios run, by name."""

from harness.targets.base import Target
from harness.targets.sim import SimTarget

TARGETS: dict[str, Target] = {target.name: target for target in (SimTarget(),)}

__all__ = ["TARGETS", "Target"]
