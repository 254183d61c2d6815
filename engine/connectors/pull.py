"""The pull connector: D reads P's blocks, P holds them under a lease until D says it has read them.

Same shape as NIXL's: P answers with block ids and its engine id, D drives the read, a notice frees P's blocks, and
a lease frees them when no notice comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from engine.blocks import NULL_BLOCK
from engine.cache import GroupShape, KVMemory, PeerMemory
from engine.checksum.records import GroupBlocks
from engine.clock import Clock
from engine.config import EngineConfig
from engine.connectors import DEFAULT_CONNECTOR
from engine.connectors.base import Carrier, LoadSpec, SchedulerConnector, TransferResults, WorkerConnector
from engine.connectors.deadlines import Deadlines
from engine.connectors.fabric import Fabric
from engine.errors import RequestError
from engine.request import Request
from engine.seams import CopyOp


class PullScheduler(SchedulerConnector):
    """Scheduler side, for a producer and for a consumer."""

    def __init__(self, engine_id: str, lease_ticks: int, clock: Clock) -> None:
        self._engine_id = engine_id
        self._leases = Deadlines(lease_ticks, clock)

    def kv_checksum_carrier(self, request: Request, receiving: bool) -> Carrier | None:
        """`kv_transfer_params`, for producer requests and regular loads; a bidirectional load has none (CAR-4)."""
        producer = bool(request.param("do_remote_decode"))
        regular_load = bool(request.param("do_remote_prefill")) and not producer
        return Carrier.KV_TRANSFER_PARAMS if (regular_load if receiving else producer) else None

    def check_params(self, request: Request) -> None:
        check_names(request)
        if not request.param("do_remote_prefill"):
            return
        ids = request.param("remote_block_ids")
        if not isinstance(ids, list) or not all(isinstance(group, list) for group in ids):
            raise RequestError(f"request {request.request_id}: kv_transfer_params.remote_block_ids is no list of lists")
        if not all(type(block_id) is int for group in ids for block_id in group):
            raise RequestError(
                f"request {request.request_id}: kv_transfer_params.remote_block_ids holds something that is no integer"
            )

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        return request.num_prompt_tokens - num_local_tokens if request.wants_remote_prefill else 0

    def plan_load(self, request: Request, groups: Mapping[int, GroupBlocks]) -> LoadSpec:
        return LoadSpec(
            request_id=request.request_id,
            groups=groups,
            remote_engine_id=request.param("remote_engine_id"),
            remote_request_id=request.param("remote_request_id"),
            remote_block_ids=dict(enumerate(tuple(ids) for ids in request.param("remote_block_ids"))),
        )

    def request_finished(self, request: Request, block_ids: Mapping[int, Sequence[int]]) -> dict[str, Any] | None:
        if not request.wants_remote_decode:
            return None
        self._leases.start(request.request_id)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [list(block_ids[group_id]) for group_id in sorted(block_ids)],
        }

    def sent(self, request_id: str) -> bool:
        return self._leases.drop(request_id)

    def expired(self) -> list[str]:
        return self._leases.take_ended()

    def renew(self, request_id: str) -> None:
        """A consumer says that it still reads the request: its lease starts again, unless it has ended already."""
        self._leases.renew(request_id)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> list[str]:
        """Requests whose blocks are held."""
        return list(self._leases)

    def holds_lease(self, request_id: str) -> bool:
        return request_id in self._leases

    def end_lease(self, request_id: str) -> None:
        """Let the request's lease end now, as if its time had passed. Raises KeyError if it holds none."""
        self._leases.end(request_id)


def check_names(request: Request) -> None:
    """Refuse flags that are none, and a remote load whose producer or request has no name.

    Raises:
        RequestError: which parameter, and what it may be.
    """
    for name in ("do_remote_prefill", "do_remote_decode"):
        if not isinstance(request.param(name), bool | None):
            raise RequestError(
                f"request {request.request_id}: kv_transfer_params.{name} is {request.param(name)!r}: use true or false"
            )
    for name in ("remote_engine_id", "remote_request_id") if request.param("do_remote_prefill") else ():
        if not isinstance(request.param(name), str):
            raise RequestError(
                f"request {request.request_id}: kv_transfer_params.{name} is "
                f"{request.param(name)!r}: pass on the string that the producer sent"
            )


class PullWorker(WorkerConnector):
    """The ranks' side: posts reads on the fabric and collects notices, which reach each rank by itself."""

    def __init__(self, engine_id: str, memory: KVMemory, fabric: Fabric) -> None:
        self._engine_id = engine_id
        self._memory = memory
        self._fabric = fabric
        self._failed: set[str] = set()
        fabric.attach(engine_id, memory)

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            peer = self._fabric.peer(load.remote_engine_id)
            ops = None if peer is None else copy_operations(load, self._memory, peer)
            if ops is None:
                self._failed.add(load.request_id)
            else:
                self._fabric.post(self._engine_id, load.remote_engine_id, load.request_id, load.remote_request_id, ops)

    def poll(self) -> TransferResults:
        """What all ranks have learnt."""
        return self._learnt(None, self._take_failed())

    def poll_ranks(self, num_ranks: int) -> tuple[TransferResults, ...]:
        if type(self).poll is not PullWorker.poll:
            return super().poll_ranks(num_ranks)  # what a subclass has to say is not to be passed over
        failed = self._take_failed()
        return tuple(self._learnt(rank, failed) for rank in range(num_ranks))

    def _take_failed(self) -> frozenset[str]:
        failed, self._failed = frozenset(self._failed), set()
        return failed

    def _learnt(self, rank: int | None, failed: frozenset[str]) -> TransferResults:
        return TransferResults(
            finished_sending=self._fabric.take_sent(self._engine_id, rank),
            finished_receiving=self._fabric.take_received(self._engine_id, rank),
            failed_receiving=failed,
        )


class PullConnector:
    """Builds both sides."""

    API_VERSION = 1
    name = DEFAULT_CONNECTOR
    summary = "D reads P's blocks one copy operation at a time; P holds them under a lease"

    def scheduler(self, config: EngineConfig, clock: Clock) -> PullScheduler:
        return PullScheduler(config.engine_id, config.lease_ticks, clock)

    def worker(self, config: EngineConfig, memory: KVMemory, fabric: Fabric) -> PullWorker:
        return PullWorker(config.engine_id, memory, fabric)


PULL = PullConnector()


def copy_operations(load: LoadSpec, memory: KVMemory, peer: KVMemory | PeerMemory) -> list[CopyOp] | None:
    """The load's copy operations in order of group and position.

    None if it cannot work: other geometry, blocks that are not P's own, or that P does not name.
    """
    groups = range(memory.num_groups)
    if list(load.remote_block_ids) != list(groups) or peer.num_groups != memory.num_groups:
        return None
    ops: list[CopyOp] = []
    for group_id in groups:
        found = _group_operations(load, memory.group(group_id), peer.group(group_id), group_id)
        if found is None:
            return None
        ops += found
    return [replace(op, index=index) for index, op in enumerate(ops)]


def _group_operations(
    load: LoadSpec, memory: KVMemory, peer: KVMemory | GroupShape, group_id: int
) -> list[CopyOp] | None:
    """Those of one group. Each replica of a head on D is read from the one on P that is as far along (EXT-1)."""
    shapes = [(side.num_layers, side.num_kv_heads, side.num_parts, side.bytes_per_token) for side in (memory, peer)]
    remote, blocks = load.remote_block_ids[group_id], load.groups.get(group_id)
    if shapes[0] != shapes[1] or not all(0 <= block_id < peer.num_blocks for block_id in remote):
        return None
    if blocks is None:
        return []
    pieces = memory.kernel_block_size, peer.kernel_block_size
    segments = copy_segments(blocks, remote, peer.block_size, pieces)
    if segments is None or any(segment[1] == NULL_BLOCK for segment in segments):
        return None
    sources = [replica * peer.num_replicas // memory.num_replicas for replica in range(memory.num_replicas)]
    places = product(range(memory.num_layers), range(memory.num_parts), range(memory.num_kv_heads), enumerate(sources))
    return [
        CopyOp(0, segment[0], layer, part, head, *segment[1:], source, target, group_id)
        for segment, (layer, part, head, (target, source)) in product(segments, places)
    ]


def copy_segments(
    blocks: GroupBlocks,
    remote_block_ids: Sequence[int],
    remote_block_size: int,
    kernel_block_sizes: Sequence[int] = (),
) -> list[tuple[int, int, int, int, int, int]] | None:
    """Pair D's blocks with P's by token position, for equal or different block sizes.

    Whole blocks are moved where the sizes are equal, tail slots included; no more than a kernel block at once, where
    those are smaller. Returns (position on D, P block, P slot, D block, D slot, slots) in order of position, or None
    if P's blocks end before the tokens do.
    """
    # A step of a common divisor never crosses a border on either side.
    step = math.gcd(blocks.block_size, remote_block_size, *kernel_block_sizes)
    piece = blocks.block_size if blocks.block_size == remote_block_size else step
    end = -(-blocks.num_tokens // piece) * piece
    segments = []
    for token in range(blocks.start * blocks.block_size, end, step):
        remote = token // remote_block_size
        if remote >= len(remote_block_ids):
            return None
        position = token // blocks.block_size
        segments.append(
            (
                position,
                remote_block_ids[remote],
                token % remote_block_size,
                blocks.block_ids[position - blocks.start],
                token % blocks.block_size,
                step,
            )
        )
    return segments
