"""A connector that reads through a staging block, as a transport does that cannot write into the KV cache itself.

What D reads of P lands in a staging block. When a load goes on to its next block, or is done, the staged bytes move
into D's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.clock import Clock
from engine.config import EngineConfig
from engine.connectors.base import Carrier, LoadSpec, SchedulerConnector, TransferResults, WorkerConnector
from engine.connectors.fabric import Fabric
from engine.connectors.pull import copy_operations
from engine.errors import RequestError
from engine.request import Request
from engine.seams import CopyOp


class StagedScheduler(SchedulerConnector):
    """Beside the scheduler of P, where it answers and holds blocks, and of D, where it plans loads."""

    def __init__(self, engine_id: str, lease_ticks: int, clock: Clock) -> None:
        self._engine_id = engine_id
        self._lease_ticks = lease_ticks
        self._clock = clock
        self._leases: dict[str, int] = {}

    def kv_checksum_carrier(self, request: Request, receiving: bool) -> Carrier | None:
        sends, loads = bool(request.param("do_remote_decode")), bool(request.param("do_remote_prefill"))
        carried = loads and not sends if receiving else sends
        return Carrier.KV_TRANSFER_PARAMS if carried else None

    # ---- P

    def request_finished(self, request: Request, block_ids: Mapping[int, Sequence[int]]) -> dict[str, Any] | None:
        if not request.wants_remote_decode:
            return None
        self._leases[request.request_id] = self._clock.now + self._lease_ticks
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [list(block_ids[group_id]) for group_id in sorted(block_ids)],
        }

    def sent(self, request_id: str) -> bool:
        return self._leases.pop(request_id, None) is not None

    def expired(self) -> list[str]:
        ended = [request_id for request_id, end in self._leases.items() if end <= self._clock.now]
        for request_id in ended:
            del self._leases[request_id]
        return ended

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def holds_lease(self, request_id: str) -> bool:
        return request_id in self._leases

    def end_lease(self, request_id: str) -> None:
        self._leases[request_id] = min(self._leases[request_id], self._clock.now)

    # ---- D

    def check_params(self, request: Request) -> None:
        kinds: dict[str, type] = {"do_remote_prefill": bool, "do_remote_decode": bool}
        if request.param("do_remote_prefill"):
            kinds |= {"remote_engine_id": str, "remote_request_id": str, "remote_block_ids": list}
        for name, kind in kinds.items():
            value = request.param(name)
            if type(value) is not kind and not (value is None and kind is bool):
                raise RequestError(f"request {request.request_id}: kv_transfer_params.{name} is no {kind.__name__}")
        for group in request.param("remote_block_ids") or []:
            if type(group) is not list or any(type(block_id) is not int for block_id in group):
                what = "kv_transfer_params.remote_block_ids is no list of lists of integers"
                raise RequestError(f"request {request.request_id}: {what}")

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        return request.num_prompt_tokens - num_local_tokens if request.wants_remote_prefill else 0

    def plan_load(self, request: Request, groups: Mapping[int, GroupBlocks]) -> LoadSpec:
        return LoadSpec(
            request_id=request.request_id,
            groups=groups,
            remote_engine_id=request.param("remote_engine_id"),
            remote_request_id=request.param("remote_request_id"),
            remote_block_ids=dict(enumerate(map(tuple, request.param("remote_block_ids")))),
        )


class StagingBlock:
    """Room for the bytes of one of D's blocks, and which copy operations have landed in it."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        parts = (memory.num_layers, 2, memory.num_kv_heads, memory.block_size, memory.bytes_per_token // 2)
        self._bytes = torch.zeros(parts, dtype=torch.uint8)
        self._landed: list[CopyOp] = []

    def move(self, op: CopyOp, source: KVMemory, target: KVMemory) -> None:
        """An operation lands: out of P's block, into the staging block."""
        if self._landed and self._landed[-1].target_block != op.target_block:
            self.flush()
        read = source.region(op.layer, op.source_block, op.part, op.head, op.source_slot, op.num_slots)
        self._staged(op).copy_(read.view(torch.uint8))
        self._landed.append(op)

    def flush(self) -> None:
        """Out of the staging block, into D's block."""
        for op in self._landed:
            written = self._memory.region(op.layer, op.target_block, op.part, op.head, op.target_slot, op.num_slots)
            written.view(torch.uint8).copy_(self._staged(op))
        self._landed.clear()

    def _staged(self, op: CopyOp) -> torch.Tensor:
        return self._bytes[op.layer, op.part, op.head, op.target_slot : op.target_slot + op.num_slots]


class StagedWorker(WorkerConnector):
    """Beside a worker: posts reads, and has a staging block for each load on its way."""

    def __init__(self, engine_id: str, memory: KVMemory, fabric: Fabric) -> None:
        self._engine_id = engine_id
        self._memory = memory
        self._fabric = fabric
        self._staging: dict[str, StagingBlock] = {}
        self._failed: set[str] = set()
        fabric.attach(engine_id, memory)

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            peer = self._fabric.peer(load.remote_engine_id)
            ops = None if peer is None else copy_operations(load, self._memory, peer)
            if ops is None:
                self._failed.add(load.request_id)
                continue
            staging = self._staging[load.request_id] = StagingBlock(self._memory)
            self._fabric.post(
                self._engine_id, load.remote_engine_id, load.request_id, load.remote_request_id, ops, staging.move
            )

    def poll(self) -> TransferResults:
        received = self._fabric.take_received(self._engine_id)
        for request_id in received:
            self._staging.pop(request_id).flush()
        failed, self._failed = frozenset(self._failed), set()
        return TransferResults(self._fabric.take_sent(self._engine_id), received, failed)


class StagedConnector:
    """Builds both sides."""

    API_VERSION = 1
    name = "staged"
    summary = "D reads P's blocks into a staging block, and moves them into its cache from there"

    def scheduler(self, config: EngineConfig, clock: Clock) -> StagedScheduler:
        return StagedScheduler(config.engine_id, config.lease_ticks, clock)

    def worker(self, config: EngineConfig, memory: KVMemory, fabric: Fabric) -> StagedWorker:
        return StagedWorker(config.engine_id, memory, fabric)


STAGED = StagedConnector()
