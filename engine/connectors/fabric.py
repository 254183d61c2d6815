"""A simulated one-sided transport: reads and writes of another engine's memory, one copy operation at a time.

Nothing happens by itself. `ready` lists what can happen next (an operation lands, a notice arrives); the owner of
the run chooses. The operations of one load land in order, those of different loads interleave freely. As with
RDMA, an operation takes whatever bytes are at the source when it lands, and neither side's scheduler is asked.

A load is either read by the engine that wants it, or written by another into a *window* that it has opened. Until the
first write is posted the window can be closed again: then nothing of that load is written any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.cache import KVMemory
from engine.seams import CarrierPass, Completion, CopyOp, Groups, Hold, OpLanded, OpPosted, Seams

Move = Callable[[CopyOp, KVMemory, KVMemory], None]
"""Takes the bytes of an operation out of the source's memory (first) and brings them to the target's."""


def copy_bytes(op: CopyOp, source: KVMemory, target: KVMemory) -> None:
    """Straight from block to block. Bytes are moved, whatever the two sides call their element type."""
    source_region, target_region = (
        memory.group(op.group).region(op.layer, block_id, op.part, op.head, slot, op.num_slots, replica)
        for memory, block_id, slot, replica in (
            (source, op.source_block, op.source_slot, op.source_replica),
            (target, op.target_block, op.target_slot, op.target_replica),
        )
    )
    target_region.view(torch.uint8).copy_(source_region.view(torch.uint8))


@dataclass(frozen=True, slots=True)
class Window:
    """What `engine` opens to `writer`: these blocks, for the KV of a request that the writer knows by another id."""

    engine: str
    request_id: str
    writer: str
    remote_request_id: str
    groups: Groups


@dataclass(slots=True, eq=False)
class _Read:
    engine: str
    source_engine: str
    request_id: str
    remote_request_id: str
    num_ops: int
    waiting: deque[CopyOp]
    move: Move
    checksums: str | None
    head: CopyOp | None = None
    holds: tuple[Hold, ...] = ()


@dataclass(slots=True, eq=False)
class _Notice:
    deliver: Callable[[], object]
    holds: tuple[Hold, ...] = ()


@dataclass(slots=True, eq=False)
class _Peer:
    """An engine: its memory, and mailboxes of each of its ranks."""

    memory: KVMemory
    received: tuple[set[str], ...]
    sent: tuple[set[str], ...]
    failed: set[str] = field(default_factory=set)
    checksums: dict[str, str] = field(default_factory=dict)
    opened: list[Window] = field(default_factory=list)

    @property
    def has_mail(self) -> bool:
        return any(self.received) or any(self.sent) or bool(self.failed or self.opened)


def _released(holds: tuple[Hold, ...]) -> bool:
    return all(hold.until() for hold in holds)


class Fabric:
    """The transport between the engines of one run."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[tuple[str, str], _Read] = {}
        self._windows: dict[tuple[str, str], Window] = {}
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
        return self._peers[engine_id].has_mail

    def post(
        self,
        engine: str,
        source_engine: str,
        request_id: str,
        remote_request_id: str,
        ops: list[CopyOp],
        move: Move = copy_bytes,
        checksums: str | None = None,
    ) -> None:
        """Start one load into `engine`'s memory. `move` is called when an operation lands.

        `checksums` come with the notice that the load is done, if the transport is to carry them.

        Raises:
            ValueError: the engine is reading a load of that id already.
        """
        if (engine, request_id) in self._reads:
            raise ValueError(f"engine {engine} is reading a load {request_id} already")
        read = _Read(engine, source_engine, request_id, remote_request_id, len(ops), deque(ops), move, checksums)
        self._reads[engine, request_id] = read
        self._next(read)

    def open_window(self, window: Window) -> None:
        """Let `window.writer` write a load; it hears of it by a notice.

        Raises:
            ValueError: the engine has a window of that request open already.
        """
        key = window.engine, window.request_id
        if key in self._windows:
            raise ValueError(f"engine {window.engine} has a window open for {window.request_id} already")
        self._windows[key] = window
        self._notices.append(_Notice(partial(self._peers[window.writer].opened.append, window)))

    def is_open(self, window: Window) -> bool:
        """Whether nothing was written through the window yet, and it was not closed."""
        return self._windows.get((window.engine, window.request_id)) is window

    def close_window(self, engine: str, request_id: str) -> bool:
        """Close a window that nothing was written through. False: none is open, or its writes have begun."""
        return self._windows.pop((engine, request_id), None) is not None

    def write(self, window: Window, ops: list[CopyOp] | None, checksums: str | None) -> bool:
        """Start to write a load through its window; `ops` None: tell the engine that it failed. False: it is closed."""
        if not self.is_open(window):
            return False
        self.close_window(window.engine, window.request_id)
        if ops is None:
            self._notices.append(_Notice(partial(self._peers[window.engine].failed.add, window.request_id)))
        else:
            ids = window.request_id, window.remote_request_id
            self.post(window.engine, window.writer, *ids, ops, checksums=checksums)
        return True

    def take_opened(self, engine_id: str) -> list[Window]:
        """Windows that others have opened to this engine, once each, in the order of their notices."""
        mailbox = self._peers[engine_id].opened
        taken = list(mailbox)
        mailbox.clear()
        return taken

    def take_failed(self, engine_id: str) -> frozenset[str]:
        """Loads of this engine that their writer gave up, once each."""
        return self._take((self._peers[engine_id].failed,), None)

    def take_checksums(self, engine_id: str) -> dict[str, str]:
        """Checksums that came with completion notices since the last call, by request id."""
        mailbox = self._peers[engine_id].checksums
        taken = dict(mailbox)
        mailbox.clear()
        return taken

    def take_received(
        self, engine_id: str, rank: int | None = None, of: AbstractSet[str] | None = None
    ) -> frozenset[str]:
        """Loads of this engine whose completion notice has arrived at a rank (None: at all), once each.

        `of` leaves all other loads for who asks for them.
        """
        return self._take(self._peers[engine_id].received, rank, of)

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
    def _take(mailboxes: tuple[set[str], ...], rank: int | None, of: AbstractSet[str] | None = None) -> frozenset[str]:
        opened = mailboxes if rank is None else (mailboxes[rank],)
        taken = frozenset(set.intersection(*opened))
        if of is not None:
            taken &= of
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
        checksums = read.checksums
        if checksums is not None:
            checksums = self._seams.emit(CarrierPass(read.engine, read.request_id, checksums)).event.checksums
        reader, sender = self._peers[read.engine], self._peers[read.source_engine]
        to_reader = [partial(self._receive, reader, box, read.request_id, checksums) for box in reader.received]
        to_sender = [partial(box.add, read.remote_request_id) for box in sender.sent]
        arrivals: list[tuple[bool, str, Sequence[Callable[[], object]]]] = [
            (False, read.request_id, to_reader),
            (True, read.remote_request_id, to_sender),
        ]
        for to_producer, request_id, each in arrivals:
            completed = self._seams.emit(Completion(read.engine, request_id, to_producer))
            if not completed.dropped:
                # Each rank hears of it by itself, one sooner than another.
                self._notices += [_Notice(deliver, completed.holds) for deliver in each]

    @staticmethod
    def _receive(peer: _Peer, mailbox: set[str], request_id: str, checksums: str | None) -> None:
        mailbox.add(request_id)
        if checksums is not None:
            peer.checksums[request_id] = checksums

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
        notice.deliver()
