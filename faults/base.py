"""What a fault is: parameters from a scenario, handlers on the engine's seams, and evidence that it happened.

A fault acts only through the seams (`engine.seams`) and the levers that a target provides (`faults.levers`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class When(BaseModel):
    """Which load a fault acts on (requests count from 1) and at which moment of its life."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load: Annotated[int, Field(ge=1)]
    at: str


class FaultParams(BaseModel):
    """The part of a scenario that describes one fault; each kind subclasses it and narrows `when.at`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    when: When
