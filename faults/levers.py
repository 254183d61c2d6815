"""What a target lets a fault do beside the seams. A target provides some of these; a fault says which it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from engine.config import Layout
from engine.errors import KVChaosError

CLOCK = "lever.clock"
COMPETITORS = "lever.competitors"
PROCESS = "lever.process"
RESTART = "lever.restart"
NETWORK = "lever.network"
LOAD_TIMEOUT = "lever.load_timeout"  # a consumer that gives up a load after seconds: not moved, only there or not
CHECKSUMS = "kv_checksums"
RANKS = "engine.ranks"  # engines of several ranks, and blocks that lie in several kernel blocks
PUSH = "transfer.push"
BIDIRECTIONAL = "workload.bidirectional"
CONNECTORS = "connectors"

Side = Literal["producer", "consumer"]


class Clock(Protocol):
    """Time as the engines see it."""

    def end_lease(self, request_id: str) -> bool:
        """Let the producer's lease on a request's blocks run out now. False if it holds none.

        A producer that is stopped finds it run out as soon as it goes on: nobody can ask it before, and this is True.
        """
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
        """SIGSTOP: it does nothing until it is resumed, at the latest when the requests have been answered.

        It has stopped when this returns.
        """
        ...

    def resume(self, side: Side) -> None:
        """SIGCONT."""
        ...


class Restart(Protocol):
    """An engine that was killed is started again in the middle of a run, maybe in another shape."""

    def start(self, side: Side, block_size: int | None = None, layout: Layout | None = None) -> str:
        """Begin to start it; it is a new process, with an empty cache. None: as it was. Returns the new shape in words.

        Raises:
            LeverError: it runs, or is being started already.
        """
        ...

    def ready(self, side: Side) -> bool:
        """Whether it answers again. Raises LeverError if it never will."""
        ...


class Network(Protocol):
    """The link between the producer and the consumer. What others say to them goes on, and what they answer.

    One thing is done to it at a time, until `heal`, or until the requests have been answered. Each returns what does
    it, in words. Raises LeverError where it cannot be done.
    """

    def cut(self) -> str:
        """Packets vanish, both ways."""
        ...

    def reset(self) -> str:
        """TCP packets are answered with RST, both ways: connections end, and no new one comes."""
        ...

    def slow(self, kbit_s: int) -> str:
        """What the producer sends to the consumer takes its time."""
        ...

    def touched(self) -> int:
        """Packets that have vanished, were answered with RST, or had to wait, since the link was last changed."""
        ...

    def heal(self) -> None:
        """The link is as it was; no trouble where nothing was done to it."""
        ...


class LeverError(KVChaosError):
    """A lever that a target provides could not be moved."""


@dataclass(frozen=True, slots=True)
class Levers:
    """The levers of one run; None where the target has none."""

    clock: Clock | None = None
    competitors: Competitors | None = None
    process: Process | None = None
    restart: Restart | None = None
    network: Network | None = None
