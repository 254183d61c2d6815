"""The verdict of one load: pure comparison of what P sent with what D's workers summed (VER, BLK-4).

The names in capitals (VER-1 and so on) are requirements in docs/spec.md of kvchaos, which this is a copy of.

Each KV cache group is judged on its own. Mismatch wins over unverified, unverified over verified, and a group in
which nothing was compared is never verified (VER-6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvchaos_vllm.payload import Payload, PayloadGroup
from kvchaos_vllm.records import GroupBlocks, Merge, MergedGroup, Uint64Array


class VerdictStatus(StrEnum):
    VERIFIED = "verified"
    MISMATCH = "mismatch"
    UNVERIFIED = "unverified"
    NOT_CHECKED = "not_checked"
    NO_LOAD = "no_load"


class UnverifiedReason(StrEnum):
    """VER-4. Constants that logs, metrics and scenarios share."""

    NO_CHECKSUMS = "no_checksums"
    INVALID = "invalid"
    WORKERS_MISSING = "workers_missing"
    OTHER_BLOCKS = "other_blocks"
    NO_GROUP = "no_group"
    ONE_SIDE_ONLY = "one_side_only"
    OTHER_LAYERS = "other_layers"
    OTHER_BLOCK_SIZE = "other_block_size"
    NO_COMMON_POSITION = "no_common_position"
    REPLICA_UNCHECKED = "replica_unchecked"


class NotCheckedReason(StrEnum):
    """VER-7."""

    OFF = "off"
    NO_CARRIER = "no_carrier"
    LOAD_FAILED = "load_failed"
    REQUEST_ENDED = "request_ended"


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """One group's part of a verdict. All lists are block positions in the request, ascending."""

    group_id: int
    status: VerdictStatus
    reason: str | None
    loaded: tuple[int, ...]
    compared: tuple[int, ...]
    differing: tuple[int, ...]

    @property
    def not_compared(self) -> tuple[int, ...]:
        compared = set(self.compared)
        return tuple(p for p in self.loaded if p not in compared)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one load. `reason` is set unless the status is verified, mismatch or no_load."""

    status: VerdictStatus
    reason: str | None = None
    groups: tuple[GroupVerdict, ...] = ()

    @property
    def acceptable(self) -> bool:
        """Whether fail-closed lets the blocks be used (POL-3): verified, or not checked by design (GAP-13)."""
        return self.status not in (VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED)


NO_LOAD = Verdict(VerdictStatus.NO_LOAD)


def not_checked(reason: NotCheckedReason) -> Verdict:
    return Verdict(VerdictStatus.NOT_CHECKED, reason)


def judge_load(
    payload: Payload | UnverifiedReason,
    loaded: Mapping[int, GroupBlocks],
    merge: Merge,
) -> Verdict:
    """Judge one finished load. Blocks of different sizes are compared where one divides the other (EXT-2).

    Args:
        payload: what P sent, or why there is nothing to compare with (`no_checksums`, `invalid`).
        loaded: the blocks that the load wrote, per group.
        merge: D's workers' sums of those blocks.
    """
    if isinstance(payload, UnverifiedReason):
        return _unverified(payload, loaded)
    if merge.missing:
        return _unverified(UnverifiedReason.WORKERS_MISSING, loaded)
    sent = {group.group_id: group for group in payload.groups}
    present = [g for g in sorted(set(sent) | set(loaded)) if g in sent or g not in merge.skipped]
    if not present:
        return _unverified(UnverifiedReason.NO_GROUP, loaded)
    groups = tuple(_judge_group(g, payload.num_tokens, sent.get(g), loaded.get(g), merge) for g in present)
    for status in (VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED):
        for group in groups:
            if group.status is status:
                return Verdict(status, group.reason, groups)
    return Verdict(VerdictStatus.VERIFIED, None, groups)


def _unverified(reason: UnverifiedReason, loaded: Mapping[int, GroupBlocks]) -> Verdict:
    groups = tuple(_unverified_group(g, loaded[g], reason) for g in sorted(loaded))
    return Verdict(VerdictStatus.UNVERIFIED, reason, groups)


def _unverified_group(group_id: int, blocks: GroupBlocks | None, reason: UnverifiedReason) -> GroupVerdict:
    loaded = tuple(blocks.positions) if blocks else ()
    return GroupVerdict(group_id, VerdictStatus.UNVERIFIED, reason, loaded, (), ())


def _judge_group(
    group_id: int,
    sent_tokens: int,
    sent: PayloadGroup | None,
    blocks: GroupBlocks | None,
    merge: Merge,
) -> GroupVerdict:
    mine = merge.groups.get(group_id)
    reason = _unverified_reason(group_id, sent, mine, merge)
    if reason is not None or sent is None or mine is None:
        return _unverified_group(group_id, blocks, reason or UnverifiedReason.ONE_SIDE_ONLY)
    compared, differing = _compare(sent_tokens, sent, mine)
    if not compared:
        return _unverified_group(group_id, blocks, UnverifiedReason.NO_COMMON_POSITION)
    if group_id in merge.unchecked_replicas and not differing:
        return _unverified_group(group_id, blocks, UnverifiedReason.REPLICA_UNCHECKED)
    status = VerdictStatus.MISMATCH if differing else VerdictStatus.VERIFIED
    return GroupVerdict(group_id, status, None, tuple(mine.blocks.positions), compared, differing)


def _unverified_reason(
    group_id: int, sent: PayloadGroup | None, mine: MergedGroup | None, merge: Merge
) -> UnverifiedReason | None:
    if group_id in merge.other_blocks:
        return UnverifiedReason.OTHER_BLOCKS
    if group_id in merge.disputed:
        return UnverifiedReason.OTHER_LAYERS
    if sent is None or mine is None:
        return UnverifiedReason.ONE_SIDE_ONLY
    if sent.fingerprint != mine.fingerprint:
        return UnverifiedReason.OTHER_LAYERS
    smaller, larger = sorted((sent.block_size, mine.blocks.block_size))
    if larger % smaller:
        return UnverifiedReason.OTHER_BLOCK_SIZE
    return None


def _compare(sent_tokens: int, sent: PayloadGroup, mine: MergedGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of D's blocks that were compared, and those of them that differ, in any replica (EXT-1).

    Blocks of different sizes are compared by the larger ones (DEF-6): those of D that lie in one stand and fall
    together.
    """
    blocks = mine.blocks
    size = max(sent.block_size, blocks.block_size)
    their_start, theirs = _larger_blocks(sent.values, sent.start, sent.block_size, size, sent_tokens)
    ours = [
        _larger_blocks(values, blocks.start, blocks.block_size, size, blocks.num_tokens)
        for values in (mine.values, *mine.replicas)
    ]
    our_start = ours[0][0]
    held = range(their_start, their_start + len(theirs)), range(our_start, our_start + len(ours[0][1]))
    common = _common_positions(sent_tokens, blocks.num_tokens, size, *held)
    if not common:
        return (), ()
    wanted = theirs[common.start - their_start : common.stop - their_start]
    bad = np.zeros(len(common), dtype=np.bool_)
    for _, values in ours:
        bad |= values[common.start - our_start : common.stop - our_start] != wanted
    positions = np.arange(blocks.start, blocks.start + len(blocks.block_ids))
    larger = positions // min(size // blocks.block_size, 2**62)
    compared = (larger >= common.start) & (larger < common.stop)
    differing = bad[larger[compared] - common.start]
    return tuple(positions[compared].tolist()), tuple(positions[compared][differing].tolist())


def _common_positions(sent_tokens: int, our_tokens: int, size: int, theirs: range, ours: range) -> range:
    """Positions that both sides hold with the same number of tokens in the block (BLK-4)."""
    # Blocks that are full on both sides are alike; a last block in part only if the requests are equally long.
    alike = -(-our_tokens // size) if sent_tokens == our_tokens else min(sent_tokens, our_tokens) // size
    first = max(theirs.start, ours.start)
    return range(first, max(first, min(theirs.stop, ours.stop, alike)))


def _larger_blocks(
    values: Uint64Array, start: int, block_size: int, size: int, num_tokens: int
) -> tuple[int, Uint64Array]:
    """The checksums of consecutive blocks of `size` tokens of which every token is summed (DEF-6).

    Returns the position of the first, and uint64 [blocks].
    """
    per_block, count = size // block_size, len(values)
    position = -(-start // per_block)
    # Whole arrays, since an engine's thread does this for every load: offsets into values of each block's first
    # part and of the end of its last. P says its start and block size, which may be too large for an array: beyond
    # the values' end one offset is as good as another.
    step, end = min(per_block, count + 1), max(0, min(-(-num_tokens // block_size) - start, count + 1))
    first = np.arange(min(position * per_block - start, count), count, step)
    # What ends the request may be less than a whole block.
    stop = np.minimum(first + step, np.maximum(end, first + 1))
    whole = stop <= count
    upto = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(values, dtype=np.uint64)))
    return position, upto[stop[whole]] - upto[first[whole]]
