"""The simulated push connector, in the shape of NIXL's: D opens its blocks to P, who writes them when its KV is final.

D may ask while P still prefills, or before. The checksums do not travel with the parameters, which exist before there
are any: P's notice that all is written brings them (EXT-3, `Carrier.CONNECTOR`). P holds a request's blocks under a
lease until it has written them. A load that nobody begins to write in time fails on D; one that is being written is
waited for, because its bytes land whatever D thinks of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.clock import Clock
from engine.config import EngineConfig
from engine.connectors.base import Carrier, LoadSpec, SchedulerConnector, TransferResults, WorkerConnector
from engine.connectors.deadlines import Deadlines
from engine.connectors.fabric import Fabric, Window
from engine.connectors.pull import check_names, copy_operations
from engine.request import Request


@dataclass(frozen=True, slots=True)
class PushSend:
    """P, to its workers: this request may be written to whoever opens a window for it."""

    request_id: str
    block_ids: Mapping[int, tuple[int, ...]]
    checksums: str | None = None


@dataclass(frozen=True, slots=True)
class PushMessage:
    """What is new since the last step. `forget`: P holds these requests no more. `give_up`: D waits no more."""

    sends: tuple[PushSend, ...] = ()
    forget: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()


class PushScheduler(SchedulerConnector):
    """Scheduler side, for a producer and for a consumer. `load_ticks`: how long a load may wait for its first write."""

    def __init__(self, engine_id: str, lease_ticks: int, load_ticks: int, clock: Clock) -> None:
        self._engine_id = engine_id
        self._leases = Deadlines(lease_ticks, clock)
        self._loads = Deadlines(load_ticks, clock)
        self._sends: dict[str, PushSend] = {}
        self._forget: list[str] = []

    def kv_checksum_carrier(self, request: Request, receiving: bool) -> Carrier | None:
        """Its own, for producer requests and regular loads; a bidirectional load has none (CAR-4)."""
        producer = bool(request.param("do_remote_decode"))
        regular_load = bool(request.param("do_remote_prefill")) and not producer
        return Carrier.CONNECTOR if (regular_load if receiving else producer) else None

    def check_params(self, request: Request) -> None:
        check_names(request)

    @property
    def has_message(self) -> bool:
        return bool(self._sends or self._forget)

    def step_message(self) -> PushMessage:
        sends, self._sends = tuple(self._sends.values()), {}
        forget, self._forget = tuple(self._forget), []
        return PushMessage(sends, forget, tuple(self._loads.take_ended()))

    # ---- D

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        return request.num_prompt_tokens - num_local_tokens if request.wants_remote_prefill else 0

    def plan_load(self, request: Request, groups: Mapping[int, GroupBlocks]) -> LoadSpec:
        self._loads.start(request.request_id)
        producer, remote_id = request.param("remote_engine_id"), request.param("remote_request_id")
        return LoadSpec(request.request_id, groups, producer, remote_id, {})

    def load_ended(self, request_id: str) -> None:
        self._loads.drop(request_id)

    # ---- P

    def request_finished(self, request: Request, block_ids: Mapping[int, Sequence[int]]) -> dict[str, Any] | None:
        if not request.wants_remote_decode:
            return None
        blocks = {group_id: tuple(ids) for group_id, ids in block_ids.items()}
        self._leases.start(request.request_id)
        self._sends[request.request_id] = PushSend(request.request_id, blocks)
        return push_params(self._engine_id, request.request_id)

    def carry_checksums(self, request: Request, text: str) -> None:
        self._sends[request.request_id] = replace(self._sends[request.request_id], checksums=text)

    def sent(self, request_id: str) -> bool:
        held = self._leases.drop(request_id)
        self._let_go([request_id] if held else [])
        return held

    def expired(self) -> list[str]:
        ended = self._leases.take_ended()
        self._let_go(ended)
        return ended

    def _let_go(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._sends.pop(request_id, None)
        self._forget += request_ids

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def holds_lease(self, request_id: str) -> bool:
        return request_id in self._leases

    def end_lease(self, request_id: str) -> None:
        self._leases.end(request_id)


def push_params(producer: str, request_id: str) -> dict[str, Any]:
    """What D needs to ask for a push. Known before P has begun: a proxy may send it to both sides at once."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": producer,
        "remote_request_id": request_id,
    }


class PushWorker(WorkerConnector):
    """The ranks' side: D opens windows, P writes through them what it may send, each request once."""

    def __init__(self, engine_id: str, memory: KVMemory, fabric: Fabric) -> None:
        self._engine_id = engine_id
        self._memory = memory
        self._fabric = fabric
        self._sends: dict[str, PushSend] = {}
        self._windows: list[Window] = []
        self._failed: set[str] = set()
        fabric.attach(engine_id, memory)

    def take_message(self, message: PushMessage) -> None:
        for request_id in message.forget:
            self._sends.pop(request_id, None)
        self._sends |= {send.request_id: send for send in message.sends}
        self._failed |= {r for r in message.give_up if self._fabric.close_window(self._engine_id, r)}

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            if self._fabric.peer(load.remote_engine_id) is None:
                self._failed.add(load.request_id)
                continue
            names = self._engine_id, load.request_id, load.remote_engine_id, load.remote_request_id
            self._fabric.open_window(Window(*names, load.groups))

    def poll(self) -> TransferResults:
        """What all ranks have learnt."""
        return self._learnt(None, *self._written())

    def poll_ranks(self, num_ranks: int) -> tuple[TransferResults, ...]:
        failed, checksums = self._written()
        return tuple(self._learnt(rank, failed, checksums) for rank in range(num_ranks))

    def _written(self) -> tuple[frozenset[str], dict[str, str]]:
        """Write what can be written. Returns the loads that failed, and checksums that arrived."""
        self._windows += self._fabric.take_opened(self._engine_id)
        self._windows = [window for window in self._windows if self._fabric.is_open(window)]
        for window in self._windows:
            send = self._sends.get(window.remote_request_id)
            if send is not None:
                self._write(send, window)
        failed, self._failed = self._failed | self._fabric.take_failed(self._engine_id), set()
        return frozenset(failed), self._fabric.take_checksums(self._engine_id)

    def _learnt(self, rank: int | None, failed: frozenset[str], checksums: dict[str, str]) -> TransferResults:
        return TransferResults(
            finished_sending=self._fabric.take_sent(self._engine_id, rank),
            finished_receiving=self._fabric.take_received(self._engine_id, rank),
            failed_receiving=failed,
            checksums=checksums,
        )

    def _write(self, send: PushSend, window: Window) -> None:
        """Write through an open window. Whoever else asks for this request waits in vain, until its time is up."""
        target = self._fabric.peer(window.engine)
        ids = window.request_id, self._engine_id, window.remote_request_id
        load = LoadSpec(ids[0], window.groups, ids[1], ids[2], send.block_ids)
        ops = None if target is None else copy_operations(load, target, self._memory)
        self._fabric.write(window, ops, send.checksums)
        if ops is not None:
            del self._sends[send.request_id]


class PushConnector:
    """Builds both sides."""

    API_VERSION = 1
    name = "push"
    transfer = "push"
    summary = "P writes into D's blocks once its KV is final, and brings the checksums with its last notice"

    def scheduler(self, config: EngineConfig, clock: Clock) -> PushScheduler:
        return PushScheduler(config.engine_id, config.lease_ticks, config.load_ticks, clock)

    def worker(self, config: EngineConfig, memory: KVMemory, fabric: Fabric) -> PushWorker:
        return PushWorker(config.engine_id, memory, fabric)


PUSH = PushConnector()
