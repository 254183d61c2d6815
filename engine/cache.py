"""The KV bytes of a whole engine, over all its ranks: what oracles, faults and transports see.

Layers and heads are those of the unsharded model. Where ranks hold replicas of a head, the memory shows replica 0 and
writes to all of them, unless it is asked for one (`replica`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.checksum.records import GroupBlocks
from engine.paged import PagedKVCache


class SlotChange(NamedTuple):
    """A slot that was changed from outside the engine."""

    replica: int
    layer: int
    head: int
    block_id: int
    slot: int


ChangeWatcher = Callable[[SlotChange], None]


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The KV memory of an engine in another process: its shape, and by `engine` who has it. It has one rank."""

    engine: str
    num_layers: int
    num_kv_heads: int
    num_blocks: int
    block_size: int
    bytes_per_token: int

    @property
    def kernel_block_size(self) -> int:
        return self.block_size

    @property
    def num_replicas(self) -> int:
        return 1


class KVMemory:
    """What a fault or an oracle may do with the KV bytes of an engine.

    A token's bytes of one layer and head are its K bytes and then its V bytes, whatever the layout.
    """

    def __init__(self, *caches: PagedKVCache) -> None:
        self._caches = caches
        self._watchers: list[ChangeWatcher] = []
        self._only: int | None = None
        self.num_ranks = len(caches)
        self.num_replicas = caches[0].shard.num_replicas
        self.num_layers = max(cache.shard.layers.stop for cache in caches)
        self.num_kv_heads = max(cache.shard.kv_heads.stop for cache in caches)
        self.num_blocks = caches[0].num_blocks
        self.block_size = caches[0].block_size
        self.kernel_block_size = caches[0].kernel_block_size
        self.bytes_per_token = caches[0].bytes_per_token

    def replica(self, number: int) -> KVMemory:
        """The same memory, of one replica of each head alone. Raises ValueError if there is none of that number."""
        if not 0 <= number < self.num_replicas:
            raise ValueError(f"replica {number}: each head has {self.num_replicas}, counted from 0")
        memory = KVMemory(*self._caches)
        memory._watchers = self._watchers
        memory._only = number
        return memory

    @property
    def replicas(self) -> list[KVMemory]:
        """A memory for each replica."""
        return [self.replica(number) for number in range(self.num_replicas)]

    def watch(self, watcher: ChangeWatcher) -> None:
        """Tell `watcher` of every slot that `write_slot` or `fill` changes."""
        self._watchers.append(watcher)

    def tokens(self, blocks: GroupBlocks) -> npt.NDArray[np.uint8]:
        """A copy of the valid tokens in `blocks`: uint8 [layers, kv_heads, tokens, bytes_per_token]."""
        first = blocks.start * blocks.block_size
        return self.slots(blocks.block_ids)[:, :, : blocks.num_tokens - first]

    def slots(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A copy of every slot of these blocks: uint8 [layers, kv_heads, slots, bytes_per_token]."""
        shape = (self.num_layers, self.num_kv_heads, len(block_ids) * self.block_size, self.bytes_per_token)
        found = np.empty(shape, dtype=np.uint8)
        for cache in self._of_replica(self._only or 0):
            shard = cache.shard
            layers, heads = (
                slice(shard.layers.start, shard.layers.stop),
                slice(shard.kv_heads.start, shard.kv_heads.stop),
            )
            found[layers, heads] = cache.slots(block_ids)
        return found

    def write_slot(self, layer: int, head: int, block_id: int, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite the bytes of one token: uint8 [bytes_per_token]."""
        for replica in self._written:
            self._holder(layer, head, replica).write_slot(layer, head, block_id, slot, data)
            self._changed(SlotChange(replica, layer, head, block_id, slot))

    def fill(self, block_ids: tuple[int, ...], pattern: bytes) -> None:
        """Repeat `pattern` (8 bytes, a poison) over every slot of these blocks."""
        for replica in self._written:
            for cache in self._of_replica(replica):
                cache.fill(block_ids, pattern)
                places = product(cache.shard.layers, cache.shard.kv_heads, block_ids, range(self.block_size))
                for layer, head, block_id, slot in places if self._watchers else ():
                    self._changed(SlotChange(replica, layer, head, block_id, slot))

    def layer_views(self) -> list[torch.Tensor]:
        """Per layer [block, K|V, slot, kv_head, element], for a transport that moves bytes by address.

        Raises:
            ValueError: the engine has several ranks, or blocks of several kernel blocks: it has no such views.
        """
        if self.num_ranks > 1 or self.kernel_block_size != self.block_size:
            raise ValueError("layers can be seen whole only with one rank and one kernel block a block")
        return list(self._caches[0].layers)

    def region(
        self, layer: int, block_id: int, part: int, head: int, first: int, count: int, replica: int = 0
    ) -> torch.Tensor:
        """A writable view [count, element] of `count` slots of one kernel block: what one copy operation moves."""
        return self._holder(layer, head, replica).region(layer, block_id, part, head, first, count)

    @property
    def _written(self) -> range:
        """The replicas that a write goes to."""
        return range(self.num_replicas) if self._only is None else range(self._only, self._only + 1)

    def _of_replica(self, replica: int) -> list[PagedKVCache]:
        return [cache for cache in self._caches if cache.shard.replica == replica]

    def _holder(self, layer: int, head: int, replica: int) -> PagedKVCache:
        for cache in self._of_replica(replica):
            if cache.holds(layer, head):
                return cache
        raise ValueError(
            f"no rank holds layer {layer}, head {head}, replica {replica}: there are {self.num_layers} layers, "
            f"{self.num_kv_heads} heads and {self.num_replicas} replicas"
        )

    def _changed(self, change: SlotChange) -> None:
        for watcher in self._watchers:
            watcher(change)
