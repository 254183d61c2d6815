"""The fault kinds by name."""

from __future__ import annotations

from faults.base import FaultParams

PARAMS: dict[str, type[FaultParams]] = {}


def params_model(kind: str) -> type[FaultParams] | None:
    """The parameter model of a kind, or None if no such kind exists."""
    return PARAMS.get(kind)
