"""The harness's half of the control channel: handlers are called here, and an engine's memory is reached from here.

Each engine has a thread that waits for its events. Handlers of all engines run one at a time, as they would in one
process; while one runs, it may read and write the memory of any engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cache import ChangeWatcher, GroupShape, SlotChange, checked_group
from engine.checksum.records import GroupBlocks
from engine.errors import KVChaosError
from engine.groups import KVGroup
from engine.seams import Hold, Seams
from harness.errors import CheckerError
from harness.remote.codec import MAX_MESSAGE_BYTES, WireError, pack, unpack


class RemoteCommandError(KVChaosError):
    """An engine could not do what it was told, or has gone."""


class EngineLink:
    """The control channel of one engine, or of the proxy, which has no memory."""

    def __init__(self, engine: str, address: tuple[str, int], token: bytes) -> None:
        self.engine = engine
        self._events: Connection = Client(address, authkey=token)
        self._commands: Connection = Client(address, authkey=token)
        self._command_lock = threading.Lock()
        self.memory: RemoteMemory | None = None

    def meet_memory(self) -> RemoteMemory:
        """The memory of the engine as it is configured now."""
        self.memory = RemoteMemory.of_engine(self)
        return self.memory

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a command in the engine and return what it gave.

        Raises:
            RemoteCommandError: it failed there, or the engine has gone.
        """
        try:
            with self._command_lock:
                self._commands.send_bytes(pack([name, *arguments], _engine_of))
                status, value = unpack(self._commands.recv_bytes(MAX_MESSAGE_BYTES), lambda engine: engine)
        except (OSError, EOFError) as error:
            raise RemoteCommandError(f"engine {self.engine} has gone ({error or 'connection closed'})") from None
        if status != "ok":
            raise RemoteCommandError(f"engine {self.engine}: {value}")
        return value

    def receive(self, memory_of: Callable[[str], Any]) -> Any:
        """The next message of the engine. Raises EOFError or OSError when it has gone."""
        return unpack(self._events.recv_bytes(MAX_MESSAGE_BYTES), memory_of)

    def reply(self, message: Any) -> None:
        self._events.send_bytes(pack(message, _engine_of))

    def close(self) -> None:
        self._events.close()
        self._commands.close()


class RemoteMemory:
    """The KV memory of an engine in another process: it has the methods of `engine.cache.KVMemory`, and asks for each.

    Like that, it is the memory of one KV cache group, and that of the first leads to the others.
    """

    def __init__(
        self, link: EngineLink, group_id: int, shape: GroupShape, spec: KVGroup, factors: tuple[tuple[int, int], ...]
    ) -> None:
        """Of one group. Use `of_engine`."""
        self._link = link
        self._shape = shape
        self._watchers: list[ChangeWatcher] = []
        self._only: int | None = None
        self.groups: Sequence[RemoteMemory] = (self,)
        self.group_id = group_id
        self.spec = spec
        self.factors = factors
        self.num_layers = shape.num_layers
        self.num_kv_heads = shape.num_kv_heads
        self.num_parts = shape.num_parts
        self.num_replicas = shape.num_replicas
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self.kernel_block_size = shape.kernel_block_size
        self.bytes_per_token = shape.bytes_per_token

    @classmethod
    def of_engine(cls, link: EngineLink) -> RemoteMemory:
        """That of the first group of the engine as it is configured now."""
        groups = [cls(link, number, *told) for number, told in enumerate(link.call("memory.shape"))]
        for group in groups:
            group.groups = groups
        return groups[0]

    @property
    def engine(self) -> str:
        return self._link.engine

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def replicas(self) -> list[RemoteMemory]:
        return [self.replica(number) for number in range(self.num_replicas)]

    def group(self, group_id: int) -> RemoteMemory:
        return self.groups[checked_group(group_id, self.num_groups)]

    def replica(self, number: int) -> RemoteMemory:
        if not 0 <= number < self.num_replicas:
            raise ValueError(f"replica {number}: each head has {self.num_replicas}, counted from 0")
        memory = RemoteMemory(self._link, self.group_id, self._shape, self.spec, self.factors)
        memory._watchers, memory.groups, memory._only = self._watchers, self.groups, number
        return memory

    def watch(self, watcher: ChangeWatcher) -> None:
        for memory in self.groups:
            memory._watchers.append(watcher)

    def tokens(self, blocks: GroupBlocks) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self._call("tokens", blocks)
        return found

    def slots(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self._call("slots", tuple(block_ids))
        return found

    def write_slot(self, layer: int, head: int, block_id: int, slot: int, data: npt.NDArray[np.uint8]) -> None:
        self._call("write_slot", layer, head, block_id, slot, data)
        self._tell(range(layer, layer + 1), range(head, head + 1), (block_id,), range(slot, slot + 1))

    def fill(self, block_ids: tuple[int, ...], pattern: bytes) -> None:
        self._call("fill", tuple(block_ids), pattern)
        self._tell(range(self.num_layers), range(self.num_kv_heads), block_ids, range(self.block_size))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._link.call(f"memory.{method}", self.group_id, self._only, *arguments)

    def _tell(self, layers: range, heads: range, block_ids: Iterable[int], slots: range) -> None:
        replicas = range(self.num_replicas) if self._only is None else range(self._only, self._only + 1)
        places = product(replicas, layers, heads, block_ids, slots)
        for replica, layer, head, block_id, slot in places if self._watchers else ():
            for watcher in self._watchers:
                watcher(SlotChange(replica, layer, head, block_id, slot, self.group_id))


class Dispatcher:
    """Calls the handlers of a cell's seams for the events of every linked engine, one at a time."""

    def __init__(self, links: Mapping[str, EngineLink]) -> None:
        self._links = links
        self._lock = threading.RLock()
        self._seams = Seams()
        self._holds: list[Hold] = []
        self._count = 0
        self.error: CheckerError | None = None
        for link in links.values():
            self.listen_to(link)

    def listen_to(self, link: EngineLink) -> None:
        """Answer the events that come over this link, until its other end goes."""
        threading.Thread(target=self._serve, args=(link,), name=f"events-{link.engine}", daemon=True).start()

    @property
    def now(self) -> int:
        """Logical time: the events that have been handled."""
        return self._count

    def begin(self, seams: Seams, gone: Collection[str] = ()) -> None:
        """Answer with the handlers of `seams` from now on, and ask the engines for what they listen to.

        Those that are known to have `gone` are not told.
        """
        with self._lock:
            self._seams, self._holds, self._count, self.error = seams, [], 0, None
        for name in self._links:
            if name not in gone:
                self.subscribe(name)

    def subscribe(self, engine: str) -> None:
        """Ask an engine for what is listened to: also one that has come back in the middle of a run."""
        self._links[engine].call("subscribe", self._seams.names)

    def _serve(self, link: EngineLink) -> None:
        while True:
            try:
                kind, body = link.receive(self._memory_of)
                link.reply(self._answer(kind, body))
            except (OSError, EOFError):
                return
            except WireError as error:
                # It would wait for an answer for ever; what is asked of it now fails.
                self.error = self.error or CheckerError(f"the {link.engine} says something unknown: {error}")
                link.close()
                return

    def _answer(self, kind: str, body: Any) -> list[Any]:
        with self._lock:
            self._count += kind == "event"
            try:
                if self.error is None:
                    return self._decide(body) if kind == "event" else [self._holds[body].until()]
            except CheckerError as error:
                self.error = error
            return ["go", body] if kind == "event" else [True]

    def _decide(self, event: Any) -> list[Any]:
        outcome = self._seams.emit(event)
        if outcome.dropped:
            return ["drop"]
        if outcome.holds:
            first = len(self._holds)
            self._holds += outcome.holds
            return ["hold", [[first + offset, hold.why] for offset, hold in enumerate(outcome.holds)]]
        return ["go", outcome.event]

    def _memory_of(self, engine: str) -> Any:
        return self._links[engine].memory


def _engine_of(value: Any) -> str | None:
    return value.engine if isinstance(value, RemoteMemory) else None
