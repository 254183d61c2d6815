"""The pull connector over NIXL: D reads P's registered memory with one-sided READs, a handle a layer.

The scheduler's side is the simulated connector's. The worker moves the KV of all ranks of its engine. It registers all
their caches once, answers others who ask how to reach them (`describe`), and reads from peers that it was configured
with: a request names a producer, never an address.

A posted read cannot be taken back. Releasing its handle, or forgetting the peer, only makes it invisible: the bytes
land all the same (tried with UCX over TCP). So a load is reported as failed only when none of its handles moves, and
while a peer does not answer, its unfinished reads keep their blocks and no further load is begun.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from engine.cache import KVMemory
from engine.connectors.base import LoadSpec, TransferResults, WorkerConnector
from engine.connectors.nixl_memory import Peer, PeerError
from engine.connectors.nixl_peers import FetchPeer, NixlAgent, Peers
from engine.connectors.pull import copy_operations
from engine.seams import Completion, CopyOp, Hold, OpLanded, OpPosted, Seams

logger = logging.getLogger(__name__)
_DONE, _RUNNING = "DONE", "PROC"
_HEARTBEAT = b"\x01"  # before a request id, which is printable: the notice says that its read goes on


@dataclass(frozen=True, slots=True)
class NixlPatience:
    """How long is waited for a peer, in seconds by `now`.

    `meet_s`: to say how it is read. `read_s`: for a read to end before the peer counts as stuck (the read's blocks
    stay until it ends). `heartbeat_s`: between two signs of life of a read, which renew P's lease; 0: none are sent.
    """

    meet_s: float = 5.0
    read_s: float = 120.0
    heartbeat_s: float = 5.0
    now: Callable[[], float] = time.monotonic


@dataclass(slots=True, eq=False)
class _Read:
    """A load under way: operations not posted yet, and handles that move with the operations in them."""

    spec: LoadSpec
    peer: Peer
    source: KVMemory
    waiting: deque[CopyOp]
    num_ops: int
    last_posted: float = 0.0
    last_beat: float = 0.0
    holds: tuple[Hold, ...] = ()
    handles: list[tuple[Any, list[CopyOp]]] = field(default_factory=list)
    held_op: CopyOp | None = None
    failed: str | None = None

    @property
    def landed(self) -> bool:
        return not (self.handles or self.waiting or self.held_op is not None)


@dataclass(frozen=True, slots=True)
class _Notice:
    event: Completion
    holds: tuple[Hold, ...]
    peer: Peer


class NixlWorker(WorkerConnector):
    """A worker's side. `fetch_peer` asks an engine by id for its `describe`; it raises PeerError.

    `renew` is told of requests of this engine that a consumer still reads: P lengthens their leases.
    """

    def __init__(
        self,
        engine_id: str,
        memory: KVMemory,
        seams: Seams,
        fetch_peer: FetchPeer,
        agent: NixlAgent,
        patience: NixlPatience | None = None,
        renew: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine_id = engine_id
        self._memory = memory
        self._seams = seams
        self._agent = agent.api
        self._patience = patience or NixlPatience()
        self._renew = renew
        agent.register(memory)
        self._mine = Peer.of(engine_id, agent.name, memory)
        self._peers = Peers(agent, fetch_peer, self._mine, self._patience.meet_s, self._patience.now)
        self._meeting: list[LoadSpec] = []
        self._reads: dict[str, _Read] = {}
        self._notices: list[_Notice] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def describe(self) -> dict[str, Any]:
        """What a peer needs to read this engine's memory, as JSON values."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode("ascii")
        return {"engine_id": self._engine_id, "metadata": metadata} | self._mine.to_plain()

    @property
    def num_moving(self) -> int:
        """Handles whose bytes may still land, as NIXL says now. Until there are none, this memory must stay."""
        return sum(self._state(handle) == _RUNNING for read in self._reads.values() for handle, _ in read.handles)

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            self._start(load)

    def poll(self) -> TransferResults:
        sent = self._take_notes()
        meeting, self._meeting = self._meeting, []
        for load in meeting:
            self._start(load)
        for request_id, read in list(self._reads.items()):
            self._advance(read)
            if read.failed is not None and not read.handles:
                logger.warning("request %s: the transfer failed: %s", request_id, read.failed)
                self._peers.forget(read.peer)
                self._failed.add(request_id)
                del self._reads[request_id]
            elif read.failed is None and read.landed:
                del self._reads[request_id]
                self._complete(read)
        self._deliver_notices()
        reading = {read.peer.agent for read in self._reads.values()}
        self._peers.sweep(reading | {notice.peer.agent for notice in self._notices})
        received, self._received = frozenset(self._received), set()
        failed, self._failed = frozenset(self._failed), set()
        return TransferResults(frozenset(sent), received, failed)

    def _take_notes(self) -> set[str]:
        """Requests of this engine that were read. Whatever else a peer sends means nothing to the scheduler."""
        sent = set()
        for notes in self._agent.get_new_notifs().values():
            for note in notes:
                text = note.removeprefix(_HEARTBEAT).decode("utf-8", "replace")
                if note.startswith(_HEARTBEAT):
                    self._renew(text)
                else:
                    sent.add(text)
        return sent

    # ---- beginning a read

    def _start(self, load: LoadSpec) -> None:
        """Post a load's reads, or wait until its peer has said how."""
        try:
            peer = self._peers.find(load.remote_engine_id)
            if peer is None:
                self._meeting.append(load)
                return
            self._refuse_stuck(peer)
        except PeerError as error:
            self._refuse(load, str(error))
            return
        geometry = peer.geometry
        ops = copy_operations(load, self._memory, geometry)
        if ops is None:
            self._refuse(load, f"the blocks that it names are none of {load.remote_engine_id}'s, or do not fit")
            return
        now = self._patience.now()
        # P's memory is not in this process: whoever listens at a seam resolves it by its engine's name.
        source = cast(KVMemory, geometry)
        read = self._reads[load.request_id] = _Read(load, peer, source, deque(ops), len(ops), now, now)
        self._post(read)

    def _refuse(self, load: LoadSpec, why: str) -> None:
        logger.warning("request %s: its KV is not loaded: %s", load.request_id, why)
        self._failed.add(load.request_id)

    def _refuse_stuck(self, peer: Peer) -> None:
        """A peer that answers nothing would pin more blocks with every load."""
        since = self._patience.now() - self._patience.read_s
        if any(read.handles and read.peer is peer and read.last_posted < since for read in self._reads.values()):
            raise PeerError(f"engine {peer.engine!r} has left a read unanswered for {self._patience.read_s:.0f} s")

    def _post(self, read: _Read) -> None:
        """Post operations up to the next one that is held, a handle a layer."""
        ready: dict[tuple[int, int], list[CopyOp]] = {}
        if read.held_op is not None:
            ready[read.held_op.group, read.held_op.layer] = [read.held_op]
            read.held_op, read.holds = None, ()
        while read.waiting:
            op = read.waiting.popleft()
            event = OpPosted(self._engine_id, read.spec.request_id, op, read.num_ops, read.source, self._memory)
            outcome = self._seams.emit(event)
            if outcome.dropped:
                continue
            op = outcome.event.op
            if outcome.holds:
                read.held_op, read.holds = op, outcome.holds
                break
            ready.setdefault((op.group, op.layer), []).append(op)
        for (group_id, _), ops in ready.items():
            if read.failed is None:
                self._transfer(read, group_id, ops)

    def _transfer(self, read: _Read, group_id: int, ops: list[CopyOp]) -> None:
        """Post operations of one group as one handle."""
        read.last_posted = self._patience.now()
        try:
            mine, theirs = (peer.groups[group_id] for peer in (self._mine, read.peer))
            local: list[tuple[int, int, int]] = []
            remote: list[tuple[int, int, int]] = []
            for op in ops:
                at = op.layer, op.target_block, op.part, op.head, op.target_replica, op.target_slot, op.num_slots
                target = mine.runs(*at)
                at = op.layer, op.source_block, op.part, op.head, op.source_replica, op.source_slot, op.num_slots
                source = theirs.runs(*at)
                for (to, size), (origin, _) in zip(*_align(target, source, mine.row_bytes), strict=True):
                    local.append((to, size, mine.device))
                    remote.append((origin, size, theirs.device))
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, mine.kind),
                self._agent.get_xfer_descs(remote, theirs.kind),
                read.peer.agent,
            )
            read.handles.append((handle, ops))
            if self._agent.transfer(handle) not in (_DONE, _RUNNING):
                read.failed = "a read could not be posted"
        except Exception as error:  # noqa: BLE001 - NIXL raises many kinds, and each means that this read failed
            read.failed = f"{type(error).__name__}: {error}"

    # ---- while it goes on

    def _advance(self, read: _Read) -> None:
        for entry in list(read.handles):
            handle, ops = entry
            state = self._state(handle)
            if state == _RUNNING:
                continue
            read.handles.remove(entry)
            self._release(handle)
            if state != _DONE:
                read.failed = read.failed or f"a read ended as {state}"
                continue
            for op in ops if self._seams.listened("transfer.op_landed") else ():
                self._seams.emit(
                    OpLanded(self._engine_id, read.spec.request_id, op, read.num_ops, read.source, self._memory)
                )
        if read.failed is None and read.held_op is not None and all(hold.until() for hold in read.holds):
            self._post(read)
        self._beat(read)

    def _state(self, handle: Any) -> str:
        """`_DONE`, `_RUNNING`, or what went wrong: then its peer is lost, and with it what had not landed."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception as error:  # noqa: BLE001 - see _transfer
            return f"{type(error).__name__}: {error}"

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - it has ended; what NIXL keeps of it is freed with its agent
            logger.debug("a handle is not released: %s", error)

    def _beat(self, read: _Read) -> None:
        now = self._patience.now()
        if self._patience.heartbeat_s and now - read.last_beat >= self._patience.heartbeat_s:
            read.last_beat = now
            self._notify(read.peer, _HEARTBEAT + read.spec.remote_request_id.encode("utf-8", "replace"))

    # ---- when everything has landed

    def _complete(self, read: _Read) -> None:
        """Tell D's scheduler and P, unless the seam holds or drops a notice."""
        for to_producer, request_id in ((False, read.spec.request_id), (True, read.spec.remote_request_id)):
            outcome = self._seams.emit(Completion(self._engine_id, request_id, to_producer))
            if not outcome.dropped:
                self._notices.append(_Notice(outcome.event, outcome.holds, read.peer))

    def _deliver_notices(self) -> None:
        waiting = []
        for notice in self._notices:
            if not all(hold.until() for hold in notice.holds):
                waiting.append(notice)
            elif notice.event.to_producer:
                self._notify(notice.peer, notice.event.request_id.encode("utf-8", "replace"))
            else:
                self._received.add(notice.event.request_id)
        self._notices = waiting

    def _notify(self, peer: Peer, note: bytes) -> None:
        try:
            self._agent.send_notif(peer.agent, note)
        except Exception as error:  # noqa: BLE001 - P has gone; its lease does what the notice would have done
            logger.warning("engine %s could not be told: %s", peer.engine, error)


def _align(
    target: list[tuple[int, int]], source: list[tuple[int, int]], row_bytes: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Cut both sides into the same pieces: rows, where one side's slots lie apart and the other's together."""
    if len(target) == len(source):
        return target, source
    return _rows(target, row_bytes), _rows(source, row_bytes)


def _rows(runs: list[tuple[int, int]], row_bytes: int) -> list[tuple[int, int]]:
    return [(start + offset, row_bytes) for start, size in runs for offset in range(0, size, row_bytes)]
