"""Where an engine's KV caches lie, in words that another process can read them by: addresses and strides.

Every rank's caches of every group are described, and are registered once, whatever is read of them later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

from engine.cache import GroupShape, KVMemory, PeerMemory
from engine.errors import KVChaosError
from engine.paged import PagedKVCache

DRAM, VRAM = "DRAM", "VRAM"
# More than any engine has; what is above is no description of one.
_MAX_GROUPS, _MAX_RANKS, _MAX_DEVICES = 2**6, 2**8, 2**10
_LIMITS = GroupShape(
    num_layers=2**12,
    num_kv_heads=2**16,
    num_parts=2**4,
    num_replicas=2**8,
    num_blocks=2**31,
    block_size=2**16,
    kernel_block_size=2**16,
    bytes_per_token=2**24,
)


class PeerError(KVChaosError):
    """A peer cannot be reached, or is not what this engine can read from."""


def memory_kind(cache: PagedKVCache) -> tuple[str, int]:
    """NIXL's name for where a rank's caches lie, and the number of their device."""
    device = cache.layers[0].device
    return (VRAM, device.index or 0) if device.type == "cuda" else (DRAM, 0)


@dataclass(frozen=True, slots=True)
class RankCaches:
    """A group's caches on one rank. Rows (caches of the group) and heads are numbered over the unsharded model.

    Attributes:
        bases: address of each cache.
        strides: in bytes, of [kernel block, part, slot, head], the same in each cache.
    """

    rows: range
    heads: range
    replica: int
    bases: tuple[int, ...]
    strides: tuple[int, int, int, int]

    @classmethod
    def of(cls, cache: PagedKVCache) -> RankCaches:
        view = cache.layers[0]
        block, part, slot, head, _ = (stride * view.element_size() for stride in view.stride())
        rows = range(cache.rows[0], cache.rows[-1] + 1)
        bases = tuple(layer.data_ptr() for layer in cache.layers)
        return cls(rows, cache.heads, cache.replica, bases, (block, part, slot, head))

    def to_plain(self) -> dict[str, Any]:
        return {
            "rows": [self.rows.start, self.rows.stop],
            "heads": [self.heads.start, self.heads.stop],
            "replica": self.replica,
            "bases": list(self.bases),
            "strides": list(self.strides),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], shape: GroupShape) -> RankCaches:
        """Raises ValueError, KeyError or TypeError for anything that `to_plain` does not give for such a group."""
        rows, heads = _run(plain, "rows", shape.num_layers), _run(plain, "heads", shape.num_kv_heads)
        bases, strides = (_addresses(plain, name) for name in ("bases", "strides"))
        if len(bases) != len(rows) or len(strides) != 4:
            raise ValueError("bases or strides of another length than the caches and axes have")
        replica = _integer(plain, "replica", 0, shape.num_replicas - 1)
        return cls(rows, heads, replica, bases, (strides[0], strides[1], strides[2], strides[3]))

    def overlaps(self, other: RankCaches) -> bool:
        """Whether both claim to hold the same thing."""
        return self.replica == other.replica and _meet(self.rows, other.rows) and _meet(self.heads, other.heads)


@dataclass(frozen=True, slots=True)
class GroupCaches:
    """How the caches of one KV cache group are read."""

    shape: GroupShape
    ranks: tuple[RankCaches, ...]
    kind: str = DRAM
    device: int = 0

    @property
    def row_bytes(self) -> int:
        """What lies together whatever the layout: one part of one token and head."""
        return self.shape.bytes_per_token // self.shape.num_parts

    def runs(
        self, layer: int, block: int, part: int, head: int, replica: int, slot: int, count: int
    ) -> list[tuple[int, int]]:
        """(address, bytes) of `count` slots of one kernel block: one run where they lie together, else one a slot.

        Raises:
            PeerError: no rank holds that cache and head.
        """
        rank = self._holder(layer, head, replica)
        splits = self.shape.block_size // self.shape.kernel_block_size
        kernel_block, slot = block * splits + slot // self.shape.kernel_block_size, slot % self.shape.kernel_block_size
        block_stride, part_stride, slot_stride, head_stride = rank.strides
        first = rank.bases[layer - rank.rows.start] + kernel_block * block_stride + part * part_stride
        first += (head - rank.heads.start) * head_stride + slot * slot_stride
        size = self.row_bytes
        if slot_stride == size:
            return [(first, count * size)]
        return [(first + n * slot_stride, size) for n in range(count)]

    def _holder(self, layer: int, head: int, replica: int) -> RankCaches:
        for rank in self.ranks:
            if rank.replica == replica and layer in rank.rows and head in rank.heads:
                return rank
        raise PeerError(f"no rank holds layer {layer}, head {head}, replica {replica}")

    @classmethod
    def of(cls, memory: KVMemory) -> GroupCaches:
        """Those of one group of an engine of this process."""
        kind, device = memory_kind(memory.caches[0])
        return cls(GroupShape.of(memory), tuple(RankCaches.of(cache) for cache in memory.caches), kind, device)

    def to_plain(self) -> dict[str, Any]:
        shape = {field.name: getattr(self.shape, field.name) for field in fields(GroupShape)}
        return shape | {"memory": self.kind, "device": self.device, "ranks": [rank.to_plain() for rank in self.ranks]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> GroupCaches:
        """Raises ValueError, KeyError or TypeError for anything that is no description of a group."""
        names = [field.name for field in fields(GroupShape)]
        shape = GroupShape(*(_integer(plain, name, 1, getattr(_LIMITS, name)) for name in names))
        if shape.block_size % shape.kernel_block_size or shape.bytes_per_token % shape.num_parts:
            raise ValueError("its blocks are no whole kernel blocks, or its tokens no whole parts")
        if plain["memory"] not in (DRAM, VRAM):
            raise ValueError(f"memory is {plain['memory']!r}")
        ranks = tuple(RankCaches.from_plain(rank, shape) for rank in _listed(plain, "ranks", _MAX_RANKS))
        held = sum(len(rank.rows) * len(rank.heads) for rank in ranks)
        wanted = shape.num_layers * shape.num_kv_heads * shape.num_replicas
        if held != wanted or any(one.overlaps(other) for one, other in combinations(ranks, 2)):
            raise ValueError("its ranks do not hold each cache and head once")
        return cls(shape, ranks, plain["memory"], _integer(plain, "device", 0, _MAX_DEVICES))


@dataclass(frozen=True, slots=True)
class Peer:
    """How to read an engine's memory: who serves it, and a description of each KV cache group."""

    agent: str
    engine: str
    groups: tuple[GroupCaches, ...]

    @property
    def geometry(self) -> PeerMemory:
        """Its shape alone."""
        return PeerMemory(self.engine, tuple(group.shape for group in self.groups))

    @classmethod
    def of(cls, engine_id: str, agent: str, memory: KVMemory) -> Peer:
        """How an engine's own memory is read."""
        return cls(agent, engine_id, tuple(GroupCaches.of(group) for group in memory.groups))

    def to_plain(self) -> dict[str, Any]:
        """As JSON values, without the names of the engine and its agent."""
        return {"groups": [group.to_plain() for group in self.groups]}

    @classmethod
    def from_plain(cls, engine_id: str, agent: str, plain: Mapping[str, Any]) -> Peer:
        """Read what `to_plain` gave. Raises ValueError, KeyError or TypeError for anything else."""
        groups = tuple(GroupCaches.from_plain(group) for group in _listed(plain, "groups", _MAX_GROUPS))
        return cls(agent, engine_id, groups)

    def differs_from(self, mine: Peer) -> str | None:
        """In what this engine keeps other KV than mine, so that none of it can be read; None: in nothing."""
        if len(self.groups) != len(mine.groups):
            return f"{len(self.groups)} KV cache groups, not {len(mine.groups)}"
        for number, (theirs, own) in enumerate(zip(self.groups, mine.groups, strict=True)):
            for name in ("num_layers", "num_kv_heads", "num_parts", "bytes_per_token"):
                found, wanted = getattr(theirs.shape, name), getattr(own.shape, name)
                if found != wanted:
                    return f"{name} {found} in KV cache group {number}, not {wanted}"
        return None


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _integer(plain: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = plain[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}")
    return value


def _listed(plain: Mapping[str, Any], name: str, most: int) -> Sequence[Mapping[str, Any]]:
    values = plain[name]
    if not isinstance(values, list) or not 1 <= len(values) <= most or not all(isinstance(v, dict) for v in values):
        raise ValueError(f"{name} is no list of 1 to {most} descriptions")
    return values


def _run(plain: Mapping[str, Any], name: str, most: int) -> range:
    values = plain[name]
    if not isinstance(values, list) or len(values) != 2 or not all(type(value) is int for value in values):
        raise ValueError(f"{name} is {values!r}")
    if not 0 <= values[0] < values[1] <= most:
        raise ValueError(f"{name} is {values!r}")
    return range(values[0], values[1])


def _addresses(plain: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = plain[name]
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{name} are no addresses")
    return tuple(values)
