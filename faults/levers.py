"""What a target lets a fault do beside the seams. A target provides some of these; a fault says which it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

CLOCK = "lever.clock"
COMPETITORS = "lever.competitors"
PROCESS = "lever.process"
CHECKSUMS = "kv_checksums"
RANKS = "engine.ranks"  # engines of several ranks, and blocks that lie in several kernel blocks
PUSH = "transfer.push"
BIDIRECTIONAL = "workload.bidirectional"
CONNECTORS = "connectors"

Side = Literal["producer", "consumer"]


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


class Process(Protocol):
    """The engines' processes, from outside."""

    def kill(self, side: Side) -> bool:
        """SIGKILL: it has ended when this returns. False if it had ended before."""
        ...

    def pause(self, side: Side) -> None:
        """SIGSTOP: it does nothing until it is resumed, at the latest when the requests have been answered."""
        ...

    def resume(self, side: Side) -> None:
        """SIGCONT."""
        ...


@dataclass(frozen=True, slots=True)
class Levers:
    """The levers of one run; None where the target has none."""

    clock: Clock | None = None
    competitors: Competitors | None = None
    process: Process | None = None
