"""What travels inside one engine: which blocks to checksum (to the workers), and the sums (back)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Uint64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Consecutive blocks of one request in one KV cache group, from block position `start` on.

    `num_tokens` counts the tokens of the request that are covered, from its first token: the last block
    holds `num_tokens - position * block_size` of them (DEF-8). `version` is how they are summed, `sum_tokens` how many
    tokens are, if not all (`engine/checksum/hardened.py`).
    """

    group_id: int
    block_size: int
    start: int
    block_ids: tuple[int, ...]
    num_tokens: int
    version: int = 1
    sum_tokens: int | None = None

    @property
    def tokens_to_sum(self) -> int:
        return self.num_tokens if self.sum_tokens is None else self.sum_tokens

    @property
    def num_tokens_to_sum(self) -> int:
        """How many tokens in these blocks are summed: `tokens_to_sum` counts from the request's first."""
        return max(0, self.tokens_to_sum - self.start * self.block_size)

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.block_ids))


@dataclass(frozen=True, slots=True)
class GroupSums:
    """One worker's part of the block checksums of one group: values uint64 [len(blocks.block_ids)]."""

    blocks: GroupBlocks
    fingerprint: int
    values: Uint64Array


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
    """The workers' parts of one group, summed: the unsharded checksums (DEF-7, PRO-5, CON-5)."""

    blocks: GroupBlocks
    fingerprint: int
    values: Uint64Array


@dataclass(frozen=True, slots=True)
class Merge:
    """The outcome of merging one request's records.

    `missing` some worker has not reported; `other_blocks` groups of which a worker checksummed other blocks
    than scheduled; `disputed` groups on whose layers the TP ranks of a stage disagree (FPR-1); `skipped`
    groups that some worker left out (VER-5).
    """

    groups: Mapping[int, MergedGroup]
    missing: bool
    other_blocks: frozenset[int]
    disputed: frozenset[int]
    skipped: frozenset[int]


def merge_records(scheduled: Mapping[int, GroupBlocks], records: list[WorkerRecord], world: WorldShape) -> Merge:
    """Sum the workers' parts of one request over the whole world.

    Values are summed over every worker; fingerprints over one TP rank per PP stage (FPR-1).
    """
    by_rank = {(r.tp_rank, r.pp_rank): r for r in records}
    expected_ranks = {(tp, pp) for tp in range(world.tp_size) for pp in range(world.pp_size)}
    if set(by_rank) != expected_ranks or len(by_rank) != len(records):
        return Merge({}, True, frozenset(), frozenset(), frozenset())
    groups: dict[int, MergedGroup] = {}
    other_blocks, disputed, skipped = set(), set(), set()
    for group_id, blocks in scheduled.items():
        parts = {rank: record.groups.get(group_id) for rank, record in by_rank.items()}
        if any(part is None for part in parts.values()):
            skipped.add(group_id)
            continue
        sums = {rank: part for rank, part in parts.items() if part is not None}
        if any(part.blocks != blocks or len(part.values) != len(blocks.block_ids) for part in sums.values()):
            other_blocks.add(group_id)
            continue
        stages = [{sums[tp, pp].fingerprint for tp in range(world.tp_size)} for pp in range(world.pp_size)]
        if any(len(fingerprints) != 1 for fingerprints in stages):
            disputed.add(group_id)
            continue
        fingerprint = sum(next(iter(stage)) for stage in stages) % 2**64
        values = np.zeros(len(blocks.block_ids), dtype=np.uint64)
        for part in sums.values():
            values += part.values
        groups[group_id] = MergedGroup(blocks, fingerprint, values)
    return Merge(groups, False, frozenset(other_blocks), frozenset(disputed), frozenset(skipped))
