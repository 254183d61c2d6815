"""An offloading connector: full blocks of finished requests are kept in host memory, and loaded from there by others.

It is not on the way from P to D, so it has no carrier (CAR-1): what it loads is not checked (GAP-7), by itself or as a
part of a MultiConnector under fail-closed (GAP-13). Copies to the host and back go over the fabric, in the background;
a load waits in the worker for the copies to the host that it depends on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.blocks import NULL_BLOCK, block_hashes, held_prefix
from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.clock import Clock
from engine.config import EngineConfig
from engine.connectors.base import LoadSpec, SchedulerConnector, TransferResults, WorkerConnector
from engine.connectors.fabric import Fabric
from engine.connectors.pull import copy_operations
from engine.kv_manager import GROUP
from engine.paged import PagedKVCache
from engine.request import Request

HOST_BLOCKS = 64


def host_of(engine_id: str) -> str:
    """The name of an engine's host memory on the fabric."""
    return f"{engine_id}.host"


def store_of(request_id: str) -> str:
    """The name of the copy of a request's blocks to the host, which is not the request's load."""
    return f"{request_id}@store"


@dataclass(frozen=True, slots=True)
class Store:
    """To the workers: copy these blocks (of the request, from position 0 on) into `target`, which are host blocks."""

    request_id: str
    block_ids: tuple[int, ...]
    target: GroupBlocks


class HostBlocks:
    """Which host block holds which prefix. Blocks that are pinned are not given to another prefix."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, 0, -1))
        self._block_of_hash: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[int] = Counter()

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is held."""
        return held_prefix(hashes, self._block_of_hash)

    def add(self, hashes: Sequence[bytes]) -> list[int]:
        """Pinned blocks for as many of these prefixes as there is room for, in order; what was used last stays."""
        added: list[int] = []
        for block_hash in hashes:
            block_id = self._take()
            if block_id is None:
                break
            self._block_of_hash[block_hash] = block_id
            self.pin([block_id])
            added.append(block_id)
        return added

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pins.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self._pins.subtract(block_ids)
        self._pins += Counter()

    def use(self, hashes: Sequence[bytes]) -> None:
        """The prefixes are used: the end of a chain is forgotten before its beginning."""
        for block_hash in reversed(hashes):
            self._block_of_hash.move_to_end(block_hash)

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        for block_hash, block_id in self._block_of_hash.items():
            if not self._pins[block_id]:
                del self._block_of_hash[block_hash]
                return block_id
        return None


class OffloadScheduler(SchedulerConnector):
    """Scheduler side. Only engines with one KV cache group, that keeps every block, offload anything."""

    def __init__(self, engine_id: str, block_size: int, host_blocks: int = HOST_BLOCKS) -> None:
        self._host = host_of(engine_id)
        self._block_size = block_size
        self._blocks = HostBlocks(host_blocks)
        self._storing: dict[str, list[int]] = {}
        self._loading: dict[str, list[int]] = {}
        self._stores: list[Store] = []

    def check_params(self, request: Request) -> None:
        """It reads none."""

    @property
    def has_message(self) -> bool:
        return bool(self._stores)

    def step_message(self) -> tuple[Store, ...]:
        stores, self._stores = tuple(self._stores), []
        return stores

    # ---- loads

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        held = len(self._blocks.lookup(self._hashes(request.prompt_token_ids)))
        return max(0, held * self._block_size - num_local_tokens)

    def plan_load(self, request: Request, groups: Mapping[int, GroupBlocks]) -> LoadSpec:
        hashes = self._hashes(request.prompt_token_ids)[: groups[GROUP].positions.stop]
        block_ids = self._blocks.lookup(hashes)
        self._blocks.use(hashes)
        self._blocks.pin(block_ids)
        self._loading[request.request_id] = block_ids
        return LoadSpec(request.request_id, groups, self._host, request.request_id, {GROUP: tuple(block_ids)})

    def load_ended(self, request_id: str) -> None:
        self._blocks.unpin(self._loading.pop(request_id, []))

    def _hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of full blocks; the last token is left to compute or has no KV yet."""
        return block_hashes(token_ids[:-1], self._block_size)

    # ---- stores

    def request_finished(self, request: Request, block_ids: Mapping[int, Sequence[int]]) -> dict[str, Any] | None:
        """Empty parameters where blocks are held until they have been copied to the host."""
        if request.wants_remote_decode or len(block_ids) != 1 or NULL_BLOCK in block_ids[GROUP]:
            return None
        hashes = self._hashes(request.all_token_ids)
        first = len(self._blocks.lookup(hashes))
        added = self._blocks.add(self._missing(hashes[first:]))
        if not added:
            return None
        positions = first + len(added)
        target = GroupBlocks(GROUP, self._block_size, first, tuple(added), positions * self._block_size)
        self._stores.append(Store(request.request_id, tuple(block_ids[GROUP])[:positions], target))
        self._storing[request.request_id] = added
        return {}

    def _missing(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Up to the first that is held."""
        held = [bool(self._blocks.lookup([block_hash])) for block_hash in hashes]
        return list(hashes[: held.index(True) if True in held else len(held)])

    def sent(self, request_id: str) -> bool:
        added = self._storing.pop(request_id, None)
        self._blocks.unpin(added or [])
        return added is not None

    def expired(self) -> list[str]:
        return []

    @property
    def num_leases(self) -> int:
        return 0


class OffloadWorker(WorkerConnector):
    """The side that moves bytes. `host` has the shape of the engine's memory, and other blocks."""

    def __init__(self, engine_id: str, memory: KVMemory, host: KVMemory, fabric: Fabric) -> None:
        self._engine_id = engine_id
        self._memory = memory
        self._host = host
        self._fabric = fabric
        self._storing: dict[str, frozenset[int]] = {}
        self._waiting: list[LoadSpec] = []
        self._failed: set[str] = set()
        fabric.attach(engine_id, memory)
        fabric.attach(host_of(engine_id), host)

    def take_message(self, message: tuple[Store, ...]) -> None:
        for store in message:
            self._store(store)

    def _store(self, store: Store) -> None:
        name, host = store_of(store.request_id), host_of(self._engine_id)
        spec = LoadSpec(name, {GROUP: store.target}, self._engine_id, store.request_id, {GROUP: store.block_ids})
        ops = copy_operations(spec, self._host, self._memory)
        if ops is None:
            raise ValueError(f"{store} does not fit between {self._engine_id} and its host memory")
        self._storing[name] = frozenset(store.target.block_ids)
        self._fabric.post(host, self._engine_id, name, store.request_id, ops)

    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        self._waiting += loads

    def poll(self) -> TransferResults:
        host = host_of(self._engine_id)
        for name in self._fabric.take_received(host):
            del self._storing[name]
        self._fabric.take_sent(host)
        self._waiting = [load for load in self._waiting if not self._start(load)]
        failed, self._failed = frozenset(self._failed), set()
        return TransferResults(
            finished_sending=self._fabric.take_sent(self._engine_id),
            finished_receiving=self._fabric.take_received(self._engine_id),
            failed_receiving=failed,
        )

    def _start(self, load: LoadSpec) -> bool:
        """False: some of its blocks are still on their way to the host."""
        wanted = frozenset(load.remote_block_ids[GROUP])
        if any(wanted & target for target in self._storing.values()):
            return False
        ops = copy_operations(load, self._memory, self._host)
        if ops is None:
            self._failed.add(load.request_id)
        else:
            self._fabric.post(self._engine_id, load.remote_engine_id, load.request_id, load.remote_request_id, ops)
        return True


class OffloadConnector:
    """Builds both sides."""

    API_VERSION = 1
    name = "offload"
    summary = "an engine keeps blocks of finished requests in host memory and loads them from there, unchecked"

    def scheduler(self, config: EngineConfig, clock: Clock) -> OffloadScheduler:
        return OffloadScheduler(config.engine_id, config.block_size)

    def worker(self, config: EngineConfig, memory: KVMemory, fabric: Fabric) -> OffloadWorker:
        in_host = replace(config, num_blocks=HOST_BLOCKS, device="cpu", max_model_len=None, tp_size=1, pp_size=1)
        host = KVMemory(PagedKVCache(in_host))
        return OffloadWorker(config.engine_id, memory, host, fabric)


OFFLOAD = OffloadConnector()
