"""The fault kinds by name."""

from __future__ import annotations

from typing import Any

from faults.base import Fault, FaultParams
from faults.bit_flip import BitFlip
from faults.drop_checksums import DropChecksums
from faults.early_reuse import EarlyReuse
from faults.noop import Noop
from faults.short_transfer import ShortTransfer

FAULTS: dict[str, type[Fault[Any]]] = {
    fault.kind: fault for fault in (Noop, BitFlip, DropChecksums, EarlyReuse, ShortTransfer)
}
PARAMS: dict[str, type[FaultParams]] = {kind: fault.params_model for kind, fault in FAULTS.items()}


def params_model(kind: str) -> type[FaultParams] | None:
    """The parameter model of a kind, or None if no such kind exists."""
    return PARAMS.get(kind)
