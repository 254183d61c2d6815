"""The verdict of one load: pure comparison of what P sent with what D's workers summed (VER, BLK-4).

Each KV cache group is judged on its own. Mismatch wins over unverified, unverified over verified, and a group in
which nothing was compared is never verified (VER-6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from engine.checksum.payload import Payload, PayloadGroup
from engine.checksum.records import GroupBlocks, Merge, MergedGroup


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


def judge_load(payload: Payload | UnverifiedReason, loaded: Mapping[int, GroupBlocks], merge: Merge) -> Verdict:
    """Judge one finished load.

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
    group_id: int, sent_tokens: int, sent: PayloadGroup | None, blocks: GroupBlocks | None, merge: Merge
) -> GroupVerdict:
    mine = merge.groups.get(group_id)
    reason = _unverified_reason(group_id, sent, mine, merge)
    if reason is not None or sent is None or mine is None:
        return _unverified_group(group_id, blocks, reason or UnverifiedReason.ONE_SIDE_ONLY)
    compared = _common_positions(sent_tokens, sent, mine)
    if not compared:
        return _unverified_group(group_id, blocks, UnverifiedReason.NO_COMMON_POSITION)
    theirs = sent.values[compared.start - sent.start : compared.stop - sent.start]
    ours = mine.values[compared.start - mine.blocks.start : compared.stop - mine.blocks.start]
    differing = tuple(compared.start + int(offset) for offset in np.flatnonzero(theirs != ours))
    status = VerdictStatus.MISMATCH if differing else VerdictStatus.VERIFIED
    return GroupVerdict(group_id, status, None, tuple(mine.blocks.positions), tuple(compared), differing)


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
    if sent.block_size != mine.blocks.block_size:
        return UnverifiedReason.OTHER_BLOCK_SIZE
    return None


def _common_positions(sent_tokens: int, sent: PayloadGroup, mine: MergedGroup) -> range:
    """Positions that both sides hold with the same number of tokens in the block (BLK-4)."""
    size, our_tokens = mine.blocks.block_size, mine.blocks.num_tokens
    # Blocks that are full on both sides are alike; a last block in part only if the requests are equally long.
    alike = -(-our_tokens // size) if sent_tokens == our_tokens else min(sent_tokens, our_tokens) // size
    first = max(sent.start, mine.blocks.start)
    last = min(sent.start + len(sent.values), mine.blocks.positions.stop, alike)
    return range(first, max(first, last))
