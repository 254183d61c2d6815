"""What a fault is: parameters from a scenario, handlers on the engine's seams, and evidence that it happened.

A fault acts only through the seams (`engine.seams`) and the levers that a target provides (`faults.levers`). One
that cannot prove that it changed something records no evidence, and its cell is `unknown`.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.seams import Seams
from faults.levers import Levers


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

    @model_validator(mode="after")
    def _two_loads(self) -> Self:
        """A kind that acts between two loads calls the second `other_load`."""
        if getattr(self, "other_load", None) == self.when.load:
            raise ValueError(f"other_load is {self.when.load}, the load itself: name another one")
        return self


@dataclass(frozen=True, slots=True)
class Evidence:
    """Proof that a fault happened: what was touched, before and after (digests, never KV bytes)."""

    fault: str
    seam: str
    request_id: str | None
    what: str
    before: str | None
    after: str | None


@dataclass(slots=True, eq=False)
class FaultContext:
    """What a fault gets of its cell: the request it acts on, its own random choices, levers, and a notebook.

    `notify` is told of each piece of evidence as it is written. `requests` has the id of every load, for faults that
    act between two of them.
    """

    request_id: str
    rng: random.Random
    levers: Levers
    evidence: list[Evidence] = field(default_factory=list)
    notify: Callable[[Evidence], None] = lambda _: None
    requests: Mapping[int, str] = field(default_factory=dict)


P_co = TypeVar("P_co", bound=FaultParams, covariant=True)


class Fault(ABC, Generic[P_co]):
    """One fault of one cell. Subclasses say their `kind`, their parameters, and what they need of a target."""

    kind: ClassVar[str]
    params_model: ClassVar[type[FaultParams]]

    def __init__(self, params: P_co, context: FaultContext) -> None:
        self.params = params
        self.context = context

    @classmethod
    @abstractmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        """Names of seams and levers without which the fault cannot act."""

    @abstractmethod
    def attach(self, seams: Seams) -> None:
        """Register the fault's handlers."""

    def record(self, seam: str, what: str, before: str | None = None, after: str | None = None) -> None:
        """Write evidence into the notebook of the cell."""
        evidence = Evidence(self.kind, seam, self.context.request_id, what, before, after)
        self.context.evidence.append(evidence)
        self.context.notify(evidence)


def digest(data: npt.NDArray[np.uint8] | bytes) -> str:
    """64-bit BLAKE2b of some bytes, in hex: enough to tell before from after, too little to hold KV."""
    raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
