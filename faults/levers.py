"""What a target lets a fault do beside the seams. A target provides some of these; a fault says which it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

CLOCK = "lever.clock"
COMPETITORS = "lever.competitors"
CHECKSUMS = "kv_checksums"


class Clock(Protocol):
    """Time as the engines see it."""

    def end_lease(self, request_id: str) -> bool:
        """Let the producer's lease on a request's blocks run out now. False if it holds none."""
        ...


class Competitors(Protocol):
    """Prefills on the producer that want all of its blocks, declared by `workload.competitors`."""

    def release(self) -> str | None:
        """Let the next competitor arrive. Returns its request id, or None if all have arrived."""
        ...

    def has_finished(self, request_id: str) -> bool:
        """Whether the competitor has written all its KV and is done."""
        ...


@dataclass(frozen=True, slots=True)
class Levers:
    """The levers of one run; None where the target has none."""

    clock: Clock | None = None
    competitors: Competitors | None = None
