"""The pull connector over NIXL: D reads P's registered memory with one-sided READs, a handle a layer.

The scheduler's side is the simulated connector's. A worker registers its caches once, answers others who ask how to
reach them (`describe`), and reads from peers that it was configured with: a request names a producer, never an address.
A posted read cannot be cancelled, so a load is reported as failed only when none of its handles moves any more.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from engine.cache import KVMemory, PeerMemory
from engine.connectors.base import LoadSpec, TransferResults, WorkerConnector
from engine.connectors.pull import copy_operations
from engine.errors import KVChaosError, StartupError
from engine.seams import Completion, CopyOp, Hold, OpLanded, OpPosted, Seams

logger = logging.getLogger(__name__)
_MEMORY = "DRAM"
_DONE, _RUNNING = "DONE", "PROC"
FetchPeer = Callable[[str], Mapping[str, Any]]


class PeerError(KVChaosError):
    """A peer cannot be reached, or is not what this engine can read from."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How to read another engine's memory: byte strides of [block, K|V, slot, head] in each layer's region."""

    agent: str
    geometry: PeerMemory
    bases: tuple[int, ...]
    strides: tuple[int, int, int, int]
    row_bytes: int

    def rows(self, layer: int, block: int, part: int, head: int, slot: int, count: int) -> list[tuple[int, int]]:
        """(address, bytes) of `count` slots: one run where they lie together, else one a slot."""
        block_stride, part_stride, slot_stride, head_stride = self.strides
        first = self.bases[layer] + block * block_stride + part * part_stride + head * head_stride
        if slot_stride == self.row_bytes:
            return [(first + slot * slot_stride, count * self.row_bytes)]
        return [(first + (slot + n) * slot_stride, self.row_bytes) for n in range(count)]


@dataclass(slots=True, eq=False)
class _Read:
    """A load under way: operations not posted yet, handles that move, and what has landed."""

    spec: LoadSpec
    peer: Peer
    waiting: deque[CopyOp]
    num_ops: int
    holds: tuple[Hold, ...] = ()
    handles: list[tuple[Any, list[CopyOp]]] = field(default_factory=list)
    held_op: CopyOp | None = None
    failed: str | None = None
    completion: tuple[Hold, ...] | None = None

    @property
    def source(self) -> KVMemory:
        """P's memory, for seams. It is not in this process: whoever listens resolves it by its engine's name."""
        return cast(KVMemory, self.peer.geometry)


class NixlAgent:
    """A process's NIXL agent. It outlives the engines that use it, and makes sure that nothing of one is left."""

    def __init__(self, engine_id: str) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-untyped]
        except ImportError as error:
            raise StartupError(f"NIXL cannot be imported ({error}): install kvchaos[nixl]") from None
        # An agent's name must be new: a peer that knew an earlier process of this id would mix the two up.
        self.name = f"{engine_id}-{time.time_ns():x}"
        self.api = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
        self._registered: Any = None
        self._met: set[str] = set()

    def register(self, memory: KVMemory) -> None:
        """Register an engine's caches in the place of an earlier engine's, and forget the peers of that one."""
        if self._registered is not None:
            self.api.deregister_memory(self._registered)
        for agent in list(self._met):
            self.forget(agent)
        self.api.get_new_notifs()
        views = memory.layer_views()
        regions = [(view.data_ptr(), view.numel() * view.element_size(), 0, "") for view in views]
        self._registered = self.api.register_memory(regions, _MEMORY)

    def meet(self, metadata: bytes) -> str:
        """Take in a peer's metadata. Returns its agent's name."""
        found = self.api.add_remote_agent(metadata)
        name = found.decode() if isinstance(found, bytes) else str(found)
        self._met.add(name)
        return name

    def forget(self, name: str) -> None:
        """Drop a peer; one that has gone already is no trouble."""
        self._met.discard(name)
        try:
            self.api.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - NIXL raises many kinds; the peer is gone anyway
            logger.debug("peer %s: %s", name, error)


class NixlWorker(WorkerConnector):
    """A worker's side. `fetch_peer` asks an engine by id for its `describe`; it raises PeerError."""

    def __init__(self, engine_id: str, memory: KVMemory, seams: Seams, fetch_peer: FetchPeer, agent: NixlAgent) -> None:
        self._engine_id = engine_id
        self._memory = memory
        self._seams = seams
        self._fetch_peer = fetch_peer
        self._owner = agent
        self._agent = agent.api
        agent.register(memory)
        self._peers: dict[str, Peer] = {}
        self._reads: dict[str, _Read] = {}
        self._failed: set[str] = set()
        self._mine = self._describe_layout(agent.name)

    def describe(self) -> dict[str, Any]:
        """What a peer needs to read this engine's memory, as JSON values."""
        geometry = self._mine.geometry
        return {
            "engine_id": self._engine_id,
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode("ascii"),
            "num_layers": geometry.num_layers,
            "num_kv_heads": geometry.num_kv_heads,
            "num_blocks": geometry.num_blocks,
            "block_size": geometry.block_size,
            "bytes_per_token": geometry.bytes_per_token,
            "bases": list(self._mine.bases),
            "strides": list(self._mine.strides),
            "row_bytes": self._mine.row_bytes,
        }

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            try:
                peer = self._peer(load.remote_engine_id)
            except PeerError as error:
                logger.warning("request %s: %s", load.request_id, error)
                self._failed.add(load.request_id)
                continue
            ops = copy_operations(load, self._memory, peer.geometry)
            if ops is None:
                self._failed.add(load.request_id)
                continue
            read = _Read(load, peer, deque(ops), len(ops))
            self._reads[load.request_id] = read
            self._post(read)

    def poll(self) -> TransferResults:
        sent = {note.decode("utf-8", "replace") for notes in self._agent.get_new_notifs().values() for note in notes}
        received = set()
        for request_id, read in list(self._reads.items()):
            self._advance(read)
            if read.handles or (read.failed is None and (read.waiting or read.held_op is not None)):
                continue
            if read.failed is not None:
                logger.warning("request %s: the transfer failed: %s", request_id, read.failed)
                self._forget_peer(read)
                self._failed.add(request_id)
                del self._reads[request_id]
            elif self._complete(read):
                received.add(request_id)
                del self._reads[request_id]
        failed, self._failed = frozenset(self._failed), set()
        return TransferResults(frozenset(sent), frozenset(received), failed)

    def _post(self, read: _Read) -> None:
        """Post operations up to the next one that is held, a handle a layer."""
        ready: dict[int, list[CopyOp]] = {}
        if read.held_op is not None:
            ready[read.held_op.layer] = [read.held_op]
            read.held_op, read.holds = None, ()
        while read.waiting:
            op = read.waiting.popleft()
            event = OpPosted(self._engine_id, read.spec.request_id, op, read.num_ops, read.source, self._memory)
            outcome = self._seams.emit(event)
            if outcome.dropped:
                continue
            if outcome.holds:
                read.held_op, read.holds = outcome.event.op, outcome.holds
                break
            ready.setdefault(outcome.event.op.layer, []).append(outcome.event.op)
        for ops in ready.values():
            self._transfer(read, ops)

    def _transfer(self, read: _Read, ops: list[CopyOp]) -> None:
        local: list[tuple[int, int, int]] = []
        remote: list[tuple[int, int, int]] = []
        for op in ops:
            target = self._mine.rows(op.layer, op.target_block, op.part, op.head, op.target_slot, op.num_slots)
            source = read.peer.rows(op.layer, op.source_block, op.part, op.head, op.source_slot, op.num_slots)
            for (to, size), (origin, _) in zip(*_align(target, source, self._mine.row_bytes), strict=True):
                local.append((to, size, 0))
                remote.append((origin, size, 0))
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, _MEMORY),
                self._agent.get_xfer_descs(remote, _MEMORY),
                read.peer.agent,
            )
            read.handles.append((handle, ops))
            if self._agent.transfer(handle) not in (_DONE, _RUNNING):
                read.failed = "a read could not be posted"
        except Exception as error:  # noqa: BLE001 - NIXL raises many kinds, and each means that this read failed
            read.failed = f"{type(error).__name__}: {error}"

    def _advance(self, read: _Read) -> None:
        for entry in list(read.handles):
            handle, ops = entry
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:  # noqa: BLE001 - see _transfer
                state, read.failed = "ERR", f"{type(error).__name__}: {error}"
            if state == _RUNNING:
                continue
            read.handles.remove(entry)
            self._agent.release_xfer_handle(handle)
            if state != _DONE:
                read.failed = read.failed or f"a read ended as {state}"
                continue
            for op in ops if self._seams.listened("transfer.op_landed") else ():
                self._seams.emit(
                    OpLanded(self._engine_id, read.spec.request_id, op, read.num_ops, read.source, self._memory)
                )
        if read.failed is None and read.held_op is not None and all(hold.until() for hold in read.holds):
            self._post(read)

    def _complete(self, read: _Read) -> bool:
        """Everything has landed: tell P, unless the seam holds or drops the notice. True once D may know."""
        if read.completion is None:
            event = Completion(self._engine_id, read.spec.request_id, to_producer=False)
            outcome = self._seams.emit(event)
            if outcome.dropped:
                return False
            read.completion = outcome.holds
        if not all(hold.until() for hold in read.completion):
            return False
        notice = self._seams.emit(Completion(self._engine_id, read.spec.remote_request_id, to_producer=True))
        if not notice.dropped:
            try:
                self._agent.send_notif(read.peer.agent, read.spec.remote_request_id.encode("utf-8"))
            except Exception as error:  # noqa: BLE001 - P has gone; its lease does what the notice would have done
                logger.warning("request %s: P could not be told: %s", read.spec.request_id, error)
        return True

    def _peer(self, engine_id: str) -> Peer:
        known = self._peers.get(engine_id)
        if known is None:
            known = self._peers[engine_id] = self._meet(engine_id)
        return known

    def _meet(self, engine_id: str) -> Peer:
        found = self._fetch_peer(engine_id)
        try:
            name = self._owner.meet(base64.b64decode(found["metadata"]))
            geometry = PeerMemory(
                engine_id,
                *(int(found[n]) for n in ("num_layers", "num_kv_heads", "num_blocks", "block_size", "bytes_per_token")),
            )
            strides = tuple(int(stride) for stride in found["strides"])
            bases = tuple(int(base) for base in found["bases"])
            row_bytes = int(found["row_bytes"])
        except Exception as error:  # noqa: BLE001 - whatever a peer sends must not end this engine
            raise PeerError(f"engine {engine_id} describes itself in a way that cannot be used: {error}") from None
        if len(strides) != 4 or len(bases) != geometry.num_layers or row_bytes != self._mine.row_bytes:
            raise PeerError(f"engine {engine_id} has another KV geometry")
        return Peer(name, geometry, bases, (strides[0], strides[1], strides[2], strides[3]), row_bytes)

    def _forget_peer(self, read: _Read) -> None:
        """After a failure the peer may be a new process behind the same id: ask it again next time."""
        known = self._peers.pop(read.spec.remote_engine_id, None)
        if known is None or any(other.peer is known for other in self._reads.values() if other is not read):
            return
        self._owner.forget(known.agent)

    def _describe_layout(self, agent: str) -> Peer:
        views = self._memory.layer_views()
        size = views[0].element_size()
        block, part, slot, head, _ = (stride * size for stride in views[0].stride())
        geometry = PeerMemory(
            self._engine_id,
            self._memory.num_layers,
            self._memory.num_kv_heads,
            self._memory.num_blocks,
            self._memory.block_size,
            self._memory.bytes_per_token,
        )
        bases = tuple(view.data_ptr() for view in views)
        return Peer(agent, geometry, bases, (block, part, slot, head), views[0].shape[-1] * size)


def _align(
    target: list[tuple[int, int]], source: list[tuple[int, int]], row_bytes: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Cut both sides into the same pieces: rows, where one side's slots lie apart and the other's together."""
    if len(target) == len(source):
        return target, source
    return _rows(target, row_bytes), _rows(source, row_bytes)


def _rows(runs: list[tuple[int, int]], row_bytes: int) -> list[tuple[int, int]]:
    return [(start + offset, row_bytes) for start, size in runs for offset in range(0, size, row_bytes)]
