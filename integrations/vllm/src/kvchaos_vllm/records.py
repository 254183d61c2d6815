"""What travels inside one engine: which blocks to checksum (to the workers), and the sums (back), merged there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Uint64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Consecutive blocks of one request in one KV cache group, from block position `start` on.

    `num_tokens` counts the tokens of the request that are covered, from its first token: the last block
    holds `num_tokens - position * block_size` of them (DEF-8).
    """

    group_id: int
    block_size: int
    start: int
    block_ids: tuple[int, ...]
    num_tokens: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.block_ids))


@dataclass(frozen=True, slots=True)
class GroupSums:
    """One worker's part of the block checksums of one group: values uint64 [len(blocks.block_ids)].

    The worker holds replica `replica` of its heads, of `num_replicas` (EXT-1). One that it did not sum, which only
    a replica beyond 0 may be, has no values and says `summed` False.
    """

    blocks: GroupBlocks
    fingerprint: int
    values: Uint64Array
    replica: int = 0
    num_replicas: int = 1
    summed: bool = True


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Everything one worker reports of one request. A group that it cannot checksum is absent (FPR-2)."""

    request_id: str
    tp_rank: int
    pp_rank: int
    groups: Mapping[int, GroupSums]


@dataclass(frozen=True, slots=True)
class WorldShape:
    """How many workers have to report: tp_size * pp_size."""

    tp_size: int
    pp_size: int

    @property
    def size(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class MergedGroup:
    """The workers' parts of one group, summed: the unsharded checksums (DEF-7, PRO-5, CON-5).

    `values` are replica 0's, `replicas` those of the further replicas that were summed (EXT-1).
    """

    blocks: GroupBlocks
    fingerprint: int
    values: Uint64Array
    replicas: tuple[Uint64Array, ...] = ()


@dataclass(frozen=True, slots=True)
class Merge:
    """The outcome of merging one request's records.

    `missing` some worker has not reported; `other_blocks` groups of which a worker checksummed other blocks
    than scheduled; `disputed` groups on whose layers the TP ranks of a stage disagree (FPR-1); `skipped`
    groups that some worker left out (VER-5); `unchecked_replicas` groups of which some replica was not summed (EXT-1).
    """

    groups: Mapping[int, MergedGroup]
    missing: bool
    other_blocks: frozenset[int]
    disputed: frozenset[int]
    skipped: frozenset[int]
    unchecked_replicas: frozenset[int] = frozenset()


def merge_records(scheduled: Mapping[int, GroupBlocks], records: list[WorkerRecord], world: WorldShape) -> Merge:
    """Sum the workers' parts of one request over the whole world.

    Values are summed over every worker that holds a replica, one replica at a time; fingerprints over one TP rank per
    PP stage (FPR-1).
    """
    by_rank = {(r.tp_rank, r.pp_rank): r for r in records}
    expected_ranks = {(tp, pp) for tp in range(world.tp_size) for pp in range(world.pp_size)}
    if set(by_rank) != expected_ranks or len(by_rank) != len(records):
        return Merge({}, True, frozenset(), frozenset(), frozenset())
    groups: dict[int, MergedGroup] = {}
    other_blocks, disputed, skipped, unchecked = set(), set(), set(), set()
    for group_id, blocks in scheduled.items():
        parts = {rank: record.groups.get(group_id) for rank, record in by_rank.items()}
        sums = {rank: part for rank, part in parts.items() if part is not None}
        if len(sums) < len(parts):
            skipped.add(group_id)
        elif any(not _is_of(part, blocks) for part in sums.values()):
            other_blocks.add(group_id)
        elif (layers := _fingerprint(sums, world)) is None:
            disputed.add(group_id)
        else:
            first, *others = _by_replica(list(sums.values()))
            if len(others) + 1 < next(iter(sums.values())).num_replicas:
                unchecked.add(group_id)
            groups[group_id] = MergedGroup(blocks, layers, first, tuple(others))
    return Merge(groups, False, frozenset(other_blocks), frozenset(disputed), frozenset(skipped), frozenset(unchecked))


def _is_of(part: GroupSums, blocks: GroupBlocks) -> bool:
    """Whether a worker summed what was scheduled, or left a replica beyond 0 alone."""
    wanted = len(blocks.block_ids) if part.summed or part.replica == 0 else 0
    return part.blocks == blocks and len(part.values) == wanted


def _fingerprint(sums: Mapping[tuple[int, int], GroupSums], world: WorldShape) -> int | None:
    """Of all layers of a group, one TP rank a stage; None if those of a stage disagree, on layers or replicas."""
    stages = [{sums[tp, pp].fingerprint for tp in range(world.tp_size)} for pp in range(world.pp_size)]
    if any(len(fingerprints) != 1 for fingerprints in stages):
        return None
    replicas = {part.num_replicas for part in sums.values()}
    held = Counter(part.replica for part in sums.values())
    count = replicas.pop()
    if replicas or set(held) != set(range(count)) or len(set(held.values())) != 1:
        return None
    return sum(next(iter(stage)) for stage in stages) % 2**64


def _by_replica(parts: list[GroupSums]) -> list[Uint64Array]:
    """The unsharded checksums of each replica, but for those that some worker did not sum."""
    found: list[Uint64Array] = []
    for replica in range(parts[0].num_replicas):
        of_replica = [part for part in parts if part.replica == replica]
        if all(part.summed for part in of_replica):
            found.append(np.sum([part.values for part in of_replica], axis=0, dtype=np.uint64))
    return found
