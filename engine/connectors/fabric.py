"""A simulated one-sided transport: reads of another engine's memory, one copy operation at a time.

Nothing happens by itself. `ready` lists what can happen next (an operation lands, a notice arrives); the owner of
the run chooses. The operations of one load land in order, those of different loads interleave freely. As with
RDMA, a read takes whatever bytes are at the source when it lands, and neither side's scheduler is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.cache import KVMemory
from engine.seams import Completion, CopyOp, Hold, OpLanded, OpPosted, Seams

Move = Callable[[CopyOp, KVMemory, KVMemory], None]
"""Takes the bytes of an operation out of the source's memory (first) and brings them to the target's."""


def copy_bytes(op: CopyOp, source: KVMemory, target: KVMemory) -> None:
    """Straight from block to block. Bytes are moved, whatever the two sides call their element type."""
    source_region, target_region = (
        memory.region(op.layer, block_id, op.part, op.head, slot, op.num_slots, replica)
        for memory, block_id, slot, replica in (
            (source, op.source_block, op.source_slot, op.source_replica),
            (target, op.target_block, op.target_slot, op.target_replica),
        )
    )
    target_region.view(torch.uint8).copy_(source_region.view(torch.uint8))


@dataclass(slots=True, eq=False)
class _Read:
    engine: str
    source_engine: str
    request_id: str
    remote_request_id: str
    num_ops: int
    waiting: deque[CopyOp]
    move: Move
    head: CopyOp | None = None
    holds: tuple[Hold, ...] = ()


@dataclass(slots=True, eq=False)
class _Notice:
    event: Completion
    mailbox: set[str]
    holds: tuple[Hold, ...]


@dataclass(slots=True, eq=False)
class _Peer:
    """An engine: its memory, and mailboxes of each of its ranks."""

    memory: KVMemory
    received: tuple[set[str], ...]
    sent: tuple[set[str], ...]


def _released(holds: tuple[Hold, ...]) -> bool:
    return all(hold.until() for hold in holds)


class Fabric:
    """The transport between the engines of one run."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[tuple[str, str], _Read] = {}
        self._notices: list[_Notice] = []

    def attach(self, engine_id: str, memory: KVMemory) -> None:
        """Register an engine's KV memory for reads."""
        received, sent = (tuple(set[str]() for _ in range(memory.num_ranks)) for _ in range(2))
        self._peers[engine_id] = _Peer(memory, received, sent)

    def peer(self, engine_id: str) -> KVMemory | None:
        peer = self._peers.get(engine_id)
        return peer.memory if peer else None

    @property
    def num_pending(self) -> int:
        """Loads that are being read, and notices on their way."""
        return len(self._reads) + len(self._notices)

    def has_mail(self, engine_id: str) -> bool:
        """Whether notices have arrived that the engine has not taken."""
        peer = self._peers[engine_id]
        return any(peer.received) or any(peer.sent)

    def post(
        self,
        engine: str,
        source_engine: str,
        request_id: str,
        remote_request_id: str,
        ops: list[CopyOp],
        move: Move = copy_bytes,
    ) -> None:
        """Start the read of one load into `engine`'s memory. `move` is called when an operation lands.

        Raises:
            ValueError: the engine is reading a load of that id already.
        """
        if (engine, request_id) in self._reads:
            raise ValueError(f"engine {engine} is reading a load {request_id} already")
        read = _Read(engine, source_engine, request_id, remote_request_id, len(ops), deque(ops), move)
        self._reads[engine, request_id] = read
        self._next(read)

    def take_received(self, engine_id: str, rank: int | None = None) -> frozenset[str]:
        """Loads of this engine whose completion notice has arrived at a rank (None: at all), once each."""
        return self._take(self._peers[engine_id].received, rank)

    def take_sent(self, engine_id: str, rank: int | None = None) -> frozenset[str]:
        """Requests of this engine that a consumer says it has read, to a rank (None: to all), once each."""
        return self._take(self._peers[engine_id].sent, rank)

    def ready(self) -> list[Callable[[], None]]:
        """What can happen next, in a fixed order."""
        reads = [read for read in self._reads.values() if read.head is not None and _released(read.holds)]
        notices = [notice for notice in self._notices if _released(notice.holds)]
        landings: list[Callable[[], None]] = [partial(self._land, read) for read in reads]
        return landings + [partial(self._deliver, notice) for notice in notices]

    def held(self) -> list[str]:
        """Why things wait that wait for a hold."""
        waiting = [read.holds for read in self._reads.values()] + [notice.holds for notice in self._notices]
        return [hold.why for holds in waiting for hold in holds if not hold.until()]

    @staticmethod
    def _take(mailboxes: tuple[set[str], ...], rank: int | None) -> frozenset[str]:
        opened = mailboxes if rank is None else (mailboxes[rank],)
        taken = frozenset(set.intersection(*opened))
        for mailbox in opened:
            mailbox -= taken
        return taken

    def _next(self, read: _Read) -> None:
        """Bring the next operation that is not dropped to the head of the read."""
        source, target = self._peers[read.source_engine].memory, self._peers[read.engine].memory
        read.head = None
        while read.waiting:
            op = read.waiting.popleft()
            outcome = self._seams.emit(OpPosted(read.engine, read.request_id, op, read.num_ops, source, target))
            if not outcome.dropped:
                read.head, read.holds = outcome.event.op, outcome.holds
                return
        del self._reads[read.engine, read.request_id]
        for to_producer, mailboxes, request_id in (
            (False, self._peers[read.engine].received, read.request_id),
            (True, self._peers[read.source_engine].sent, read.remote_request_id),
        ):
            completion = Completion(read.engine, request_id, to_producer)
            completed = self._seams.emit(completion)
            if not completed.dropped:
                # Each rank hears of it by itself, one sooner than another.
                self._notices += [_Notice(completed.event, mailbox, completed.holds) for mailbox in mailboxes]

    def _land(self, read: _Read) -> None:
        op = read.head
        if op is None:
            raise ValueError(f"no operation of {read.request_id} is on the wire")
        source, target = self._peers[read.source_engine].memory, self._peers[read.engine].memory
        read.move(op, source, target)
        self._seams.emit(OpLanded(read.engine, read.request_id, op, read.num_ops, source, target))
        self._next(read)

    def _deliver(self, notice: _Notice) -> None:
        self._notices.remove(notice)
        notice.mailbox.add(notice.event.request_id)
