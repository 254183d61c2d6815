"""The KV bytes of a whole engine, over all its ranks: what oracles, faults and transports see.

There is a memory for each KV cache group, with the caches (rows) and heads of the unsharded model; events hold that of
the first group, which leads to the others. Where ranks hold replicas of a head, a memory shows replica 0 and writes to
all of them, unless it is asked for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from engine.checksum.layers import factors
from engine.checksum.records import GroupBlocks
from engine.paged import PagedKVCache


class SlotChange(NamedTuple):
    """A slot that was changed from outside the engine."""

    replica: int
    layer: int
    head: int
    block_id: int
    slot: int
    group: int = 0


ChangeWatcher = Callable[[SlotChange], None]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The KV cache group of an engine that may be in another process, over all its ranks. Sizes as in `KVMemory`."""

    num_layers: int
    num_kv_heads: int
    num_parts: int
    num_replicas: int
    num_blocks: int
    block_size: int
    kernel_block_size: int
    bytes_per_token: int

    @classmethod
    def of(cls, memory: KVMemory) -> Self:
        """That of one group of an engine of this process."""
        return cls(*(getattr(memory, field.name) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The KV memory of an engine in another process: the shape of its groups, and by `engine` who has it."""

    engine: str
    groups: tuple[GroupShape, ...]

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def group(self, group_id: int) -> GroupShape:
        """Raises ValueError if there is none of that number."""
        return self.groups[checked_group(group_id, self.num_groups)]


def checked_group(group_id: int, num_groups: int) -> int:
    """The number of a KV cache group, if an engine of so many has it. Raises ValueError otherwise."""
    if not 0 <= group_id < num_groups:
        raise ValueError(f"group {group_id}: the engine has {num_groups}, counted from 0")
    return group_id


class KVMemory:
    """What a fault or an oracle may do with the bytes of one KV cache group of an engine.

    `num_layers` counts the group's caches. A token's bytes of one cache and head are those of its parts, such as its K
    bytes and then its V bytes, whatever the layout. `factors` names each cache as its checksum does: the number of its
    layer, and of its first head (DEF-4, EXT-9).
    """

    def __init__(self, *caches: PagedKVCache) -> None:
        """Of one group, over all ranks."""
        self._caches = [cache for cache in caches if cache.rows]
        first, group = caches[0], caches[0].group
        self._watchers: list[ChangeWatcher] = []
        self._only: int | None = None
        self._groups: Sequence[KVMemory] = (self,)
        self.group_id = group.group_id
        self.spec = group
        self.num_ranks = len(caches)
        self.num_replicas = first.num_replicas
        self.num_layers = len(group.rows)
        self.num_kv_heads = group.num_heads
        self.num_parts = group.num_parts
        self.num_blocks = first.num_blocks
        self.block_size = first.block_size
        self.kernel_block_size = first.kernel_block_size
        self.bytes_per_token = first.bytes_per_token
        self.factors = factors(group)

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[PagedKVCache]]) -> KVMemory:
        """That of the first group; each item has the caches of one group, a rank each."""
        memories = [cls(*caches) for caches in groups]
        for memory in memories:
            memory._groups = memories
        return memories[0]

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> Sequence[KVMemory]:
        """The memory of each group."""
        return self._groups

    def group(self, group_id: int) -> KVMemory:
        """The memory of a group. Raises ValueError if there is none of that number."""
        return self._groups[checked_group(group_id, len(self._groups))]

    def replica(self, number: int) -> KVMemory:
        """The same memory, of one replica of each head alone. Raises ValueError if there is none of that number."""
        if not 0 <= number < self.num_replicas:
            raise ValueError(f"replica {number}: each head has {self.num_replicas}, counted from 0")
        memory = KVMemory(*self._caches)
        memory._watchers, memory._groups, memory._only = self._watchers, self._groups, number
        return memory

    @property
    def replicas(self) -> list[KVMemory]:
        """A memory for each replica."""
        return [self.replica(number) for number in range(self.num_replicas)]

    def watch(self, watcher: ChangeWatcher) -> None:
        """Tell `watcher` of every slot that `write_slot` or `fill` changes, in any group."""
        for memory in self._groups:
            memory._watchers.append(watcher)

    def tokens(self, blocks: GroupBlocks) -> npt.NDArray[np.uint8]:
        """A copy of the valid tokens in `blocks`: uint8 [layers, kv_heads, tokens, bytes_per_token] of their group."""
        memory = self if blocks.group_id == self.group_id else self.group(blocks.group_id)
        first = blocks.start * blocks.block_size
        return memory.slots(blocks.block_ids)[:, :, : blocks.num_tokens - first]

    def slots(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A copy of every slot of these blocks: uint8 [layers, kv_heads, slots, bytes_per_token]."""
        shape = (self.num_layers, self.num_kv_heads, len(block_ids) * self.block_size, self.bytes_per_token)
        found = np.empty(shape, dtype=np.uint8)
        for cache in self._of_replica(self._only or 0):
            rows, heads = slice(cache.rows[0], cache.rows[-1] + 1), slice(cache.heads.start, cache.heads.stop)
            found[rows, heads] = cache.slots(block_ids)
        return found

    def write_slot(self, layer: int, head: int, block_id: int, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite the bytes of one token: uint8 [bytes_per_token]."""
        for replica in self._written:
            self._holder(layer, head, replica).write_slot(layer, head, block_id, slot, data)
            self._changed(SlotChange(replica, layer, head, block_id, slot, self.group_id))

    def fill(self, block_ids: tuple[int, ...], pattern: bytes) -> None:
        """Repeat `pattern` (8 bytes, a poison) over every slot of these blocks."""
        for replica in self._written:
            for cache in self._of_replica(replica):
                cache.fill(block_ids, pattern)
                places = product(cache.rows, cache.heads, block_ids, range(self.block_size))
                for layer, head, block_id, slot in places if self._watchers else ():
                    self._changed(SlotChange(replica, layer, head, block_id, slot, self.group_id))

    @property
    def caches(self) -> Sequence[PagedKVCache]:
        """Those of each rank that has any, for a transport that moves bytes by address."""
        return self._caches

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
        return [cache for cache in self._caches if cache.replica == replica]

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
