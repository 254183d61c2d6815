"""Several connectors in one (CAR-2): each load has one that loads it, each finished request one that holds its blocks.

For a load the carrier is that of the sub-connector chosen to load it: the first that would bring anything. A request
that P sends has the first carrier that any of them names for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, cast

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.clock import Clock
from engine.config import EngineConfig
from engine.connectors.base import Carrier, LoadSpec, SchedulerConnector, TransferResults, WorkerConnector
from engine.connectors.fabric import Fabric, Window
from engine.request import Request


class MultiScheduler(SchedulerConnector):
    """Scheduler side. `parts` are asked in order."""

    def __init__(self, parts: Sequence[SchedulerConnector]) -> None:
        self._parts = parts
        self._chosen: tuple[str, int | None] | None = None
        self._holders: dict[str, SchedulerConnector] = {}

    def has_carrier(self) -> bool:
        return any(part.has_carrier() for part in self._parts)

    def kv_checksum_carrier(self, request: Request, receiving: bool) -> Carrier | None:
        if not receiving:
            return next((carrier for _, carrier in self._carriers(request)), None)
        if self._chosen is None or self._chosen[0] != request.request_id:
            self.matched_tokens(request, 0)
        number = None if self._chosen is None else self._chosen[1]
        return None if number is None else self._parts[number].kv_checksum_carrier(request, receiving=True)

    def _carriers(self, request: Request) -> list[tuple[SchedulerConnector, Carrier]]:
        """The parts that carry the checksums of a request that P sends."""
        named = [(part, part.kv_checksum_carrier(request, receiving=False)) for part in self._parts]
        return [(part, carrier) for part, carrier in named if carrier is not None]

    def check_params(self, request: Request) -> None:
        for part in self._parts:
            part.check_params(request)

    @property
    def has_message(self) -> bool:
        return any(part.has_message for part in self._parts)

    def step_message(self) -> tuple[Any, ...]:
        return tuple(part.step_message() for part in self._parts)

    # ---- D

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        """Of the first that would bring anything; it is chosen, until another request is asked for."""
        self._chosen = request.request_id, None
        for number, part in enumerate(self._parts):
            found = part.matched_tokens(request, num_local_tokens)
            if found:
                self._chosen = request.request_id, number
                return found
        return 0

    def plan_load(self, request: Request, groups: Mapping[int, GroupBlocks]) -> LoadSpec:
        number = None if self._chosen is None else self._chosen[1]
        if number is None:
            raise ValueError(f"no sub-connector was chosen to load {request.request_id}")
        load = self._parts[number].plan_load(request, groups)
        return replace(load, part=(number, *load.part))

    def load_ended(self, request_id: str) -> None:
        for part in self._parts:
            part.load_ended(request_id)

    # ---- P

    def request_finished(self, request: Request, block_ids: Mapping[int, Sequence[int]]) -> dict[str, Any] | None:
        """Of the first that wants the blocks held, those with a carrier for the request before the others."""
        carrying = [part for part, _ in self._carriers(request)]
        for part in (*carrying, *(part for part in self._parts if part not in carrying)):
            params = part.request_finished(request, block_ids)
            if params is not None:
                self._holders[request.request_id] = part
                return params
        return None

    def carry_checksums(self, request: Request, text: str) -> None:
        self._holders[request.request_id].carry_checksums(request, text)

    def sent(self, request_id: str) -> bool:
        part = self._holders.pop(request_id, None)
        return part is not None and part.sent(request_id)

    def expired(self) -> list[str]:
        ended = [request_id for part in self._parts for request_id in part.expired()]
        for request_id in ended:
            self._holders.pop(request_id, None)
        return ended

    @property
    def num_leases(self) -> int:
        return sum(part.num_leases for part in self._parts)

    def holds_lease(self, request_id: str) -> bool:
        return any(part.holds_lease(request_id) for part in self._parts)

    def end_lease(self, request_id: str) -> None:
        self._holders[request_id].end_lease(request_id)


class MultiWorker(WorkerConnector):
    """The side that moves bytes: each load goes to the part that planned it."""

    def __init__(self, parts: Sequence[WorkerConnector]) -> None:
        self._parts = parts

    def take_message(self, message: tuple[Any, ...]) -> None:
        for part, own in zip(self._parts, message, strict=True):
            part.take_message(own)

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        for number, part in enumerate(self._parts):
            part.start_loads([replace(load, part=load.part[1:]) for load in loads if load.part[0] == number])

    def poll(self) -> TransferResults:
        return _together([part.poll() for part in self._parts])

    def poll_ranks(self, num_ranks: int) -> tuple[TransferResults, ...]:
        by_part = [part.poll_ranks(num_ranks) for part in self._parts]
        return tuple(_together(results) for results in zip(*by_part, strict=True))


def _together(results: Sequence[TransferResults]) -> TransferResults:
    checksums: dict[str, str] = {}
    for result in results:
        checksums |= result.checksums
    return TransferResults(
        finished_sending=frozenset().union(*(result.finished_sending for result in results)),
        finished_receiving=frozenset().union(*(result.finished_receiving for result in results)),
        failed_receiving=frozenset().union(*(result.failed_receiving for result in results)),
        checksums=checksums,
    )


class _OwnLoads:
    """The fabric as one of several connectors sees it: it hears of loads that it has begun, and of no other.

    A connector may have to do something when its load has arrived, and does not know another's.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._own: dict[str, set[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)

    def post(self, engine: str, source_engine: str, request_id: str, *what: Any, **more: Any) -> None:
        self._own.setdefault(engine, set()).add(request_id)
        self._fabric.post(engine, source_engine, request_id, *what, **more)

    def open_window(self, window: Window) -> None:
        self._own.setdefault(window.engine, set()).add(window.request_id)
        self._fabric.open_window(window)

    def take_received(
        self, engine_id: str, rank: int | None = None, of: AbstractSet[str] | None = None
    ) -> frozenset[str]:
        own = self._own.get(engine_id, set())
        return self._fabric.take_received(engine_id, rank, own if of is None else own & of)


class MultiConnector:
    """Builds both sides of several connectors. `parts` are factories; it moves KV as the one that transfers does."""

    API_VERSION = 1

    def __init__(self, name: str, summary: str, parts: Sequence[Any]) -> None:
        self.name = name
        self.summary = summary
        self._parts = tuple(parts)
        pushes = any(getattr(part, "transfer", "pull") == "push" for part in parts)
        self.transfer = "push" if pushes else "pull"

    def scheduler(self, config: EngineConfig, clock: Clock) -> MultiScheduler:
        return MultiScheduler([part.scheduler(config, clock) for part in self._parts])

    def worker(self, config: EngineConfig, memory: KVMemory, fabric: Fabric) -> MultiWorker:
        return MultiWorker([part.worker(config, memory, cast(Fabric, _OwnLoads(fabric))) for part in self._parts])
