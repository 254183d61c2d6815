"""Broken verification: what D concludes from P's checksums and its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from engine.checksum.consumer import ConsumerChecksums
from engine.checksum.payload import VERSION, Payload, PayloadGroup
from engine.checksum.records import Merge
from engine.checksum.verdict import GroupVerdict, UnverifiedReason, Verdict, VerdictStatus
from harness.mutants.base import Function, Mutant
from harness.mutants.checks import checksums_of_zero_are_compared, nothing_in_common_is_unverified

JUDGE_LOAD = "engine.checksum.verdict.judge_load"
JUDGE_GROUP = "engine.checksum.verdict._judge_group"
VERIFIED = Verdict(VerdictStatus.VERIFIED)
Sent = Payload | UnverifiedReason


def _same_for_all(original: Function) -> Function:
    """The verdict of the first load, kept for those that follow."""
    first: dict[ConsumerChecksums, Verdict] = {}

    def judge(checks: ConsumerChecksums, request_id: str) -> Verdict:
        return first.setdefault(checks, original(checks, request_id))

    return judge


def _own_with_own(original: Function) -> Function:
    def judge_load(payload: Sent, loaded: Any, merge: Merge, *how: bool) -> Verdict:
        groups = [
            PayloadGroup(g, m.fingerprint, m.blocks.block_size, m.blocks.start, m.values)
            for g, m in sorted(merge.groups.items())
        ]
        tokens = max(blocks.num_tokens for blocks in loaded.values())
        verdict: Verdict = original(Payload(1, tokens, tuple(groups)), loaded, merge, *how)
        return verdict

    return judge_load


def _swallowed(original: Function) -> Function:
    def judge_load(payload: Any, loaded: Any, merge: Merge, *how: bool) -> Verdict:
        try:
            verdict: Verdict = original(replace(payload, groups=payload.groups), loaded, merge, *how)
        except Exception:  # noqa: BLE001 - the bug
            return VERIFIED
        return verdict

    return judge_load


def _verified_where(reason: UnverifiedReason) -> Callable[[Function], Function]:
    """What is unverified for this reason counts as verified."""

    def make(original: Function) -> Function:
        def judge_load(payload: Sent, loaded: Any, merge: Merge, *how: bool) -> Verdict:
            verdict: Verdict = original(payload, loaded, merge, *how)
            return replace(verdict, status=VerdictStatus.VERIFIED, reason=None) if verdict.reason is reason else verdict

        return judge_load

    return make


def _first_block(original: Function) -> Function:
    return lambda *args: original(*args)[:1]


def _differences_ignored(original: Function) -> Function:
    def judge_group(*args: Any) -> GroupVerdict:
        group: GroupVerdict = original(*args)
        if group.status is VerdictStatus.MISMATCH:
            return replace(group, status=VerdictStatus.VERIFIED, differing=())
        return group

    return judge_group


def _zero_is_nothing(original: Function) -> Function:
    """A checksum of 0 is taken for "none", and what has none is not compared."""

    def judge_group(
        group_id: int, tokens: int, sent: PayloadGroup | None, blocks: Any, merge: Merge, *how: bool
    ) -> GroupVerdict:
        mine = merge.groups.get(group_id)
        if sent is not None and mine is not None and len(sent.values) == len(mine.values):
            either = (sent.values == 0) | (mine.values == 0)
            mine = replace(mine, values=np.where(either, sent.values, mine.values))
            merge = replace(merge, groups={**merge.groups, group_id: mine})
        group: GroupVerdict = original(group_id, tokens, sent, blocks, merge, *how)
        return group

    return judge_group


def _any_block_size(original: Function) -> Function:
    def unverified_reason(*args: Any) -> UnverifiedReason | None:
        reason: UnverifiedReason | None = original(*args)
        return None if reason is UnverifiedReason.OTHER_BLOCK_SIZE else reason

    return unverified_reason


def _any_version(original: Function) -> Function:
    return lambda value: VERSION


MUTANTS = (
    Mutant(
        name="differences-ignored",
        area="verifier",
        what="Checksums that differ count as equal.",
        target=JUDGE_GROUP,
        replace=_differences_ignored,
        killers=("flip-before-verify", "stale-read-after-reuse--fail_open"),
        control="checksums-lost--fail_open",
    ),
    Mutant(
        name="first-block-only",
        area="verifier",
        what="Only the first block of a load is compared.",
        target="engine.checksum.verdict._common_positions",
        replace=_first_block,
        killers=("short-transfer--fail_open", "short-transfer--fail_closed_fail"),
        control="empty-transfer--fail_open",
    ),
    Mutant(
        name="own-with-own",
        area="verifier",
        what="D compares its checksums with themselves: what P sent is ignored.",
        target=JUDGE_LOAD,
        replace=_own_with_own,
        killers=("flip-before-verify--fail_open", "checksums-altered--fail_closed_fail", "checksums-lost--fail_open"),
        control="clean-transfer--fail_open",
    ),
    Mutant(
        name="exceptions-swallowed",
        area="verifier",
        what="An exception during the comparison counts as verified.",
        target=JUDGE_LOAD,
        replace=_swallowed,
        killers=("checksums-lost--fail_closed_fail", "checksums-cut--fail_open"),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="invalid-is-verified",
        area="verifier",
        what="A payload that cannot be read counts as no mismatch.",
        target=JUDGE_LOAD,
        replace=_verified_where(UnverifiedReason.INVALID),
        killers=("checksums-cut", "checksums-other-version--fail_open"),
        control="checksums-lost--fail_open",
    ),
    Mutant(
        name="none-is-verified",
        area="verifier",
        what="A load without checksums counts as verified.",
        target=JUDGE_LOAD,
        replace=_verified_where(UnverifiedReason.NO_CHECKSUMS),
        killers=("checksums-lost",),
        control="checksums-cut--fail_open",
    ),
    Mutant(
        name="nothing-compared-is-verified",
        area="verifier",
        what="A load of which no position could be compared counts as verified.",
        target=JUDGE_LOAD,
        replace=_verified_where(UnverifiedReason.NO_COMMON_POSITION),
        killers=(nothing_in_common_is_unverified,),
        control="checksums-lost--fail_open",
    ),
    Mutant(
        name="zero-is-nothing",
        area="verifier",
        what="A checksum of 0 counts as none, and is not compared.",
        target=JUDGE_GROUP,
        replace=_zero_is_nothing,
        killers=(checksums_of_zero_are_compared,),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="block-size-ignored",
        area="verifier",
        what="Block positions are compared whatever the block sizes.",
        target="engine.checksum.verdict._unverified_reason",
        replace=_any_block_size,
        killers=("clean-other-block-size",),
        control="clean-transfer--fail_open",
    ),
    Mutant(
        name="version-ignored",
        area="verifier",
        what="A payload of any version is read as version 1.",
        target="engine.checksum.payload._version",
        replace=_any_version,
        killers=("checksums-other-version",),
        control="checksums-cut--fail_open",
    ),
    Mutant(
        name="one-verdict-for-all",
        area="verifier",
        what="Every load gets the verdict of the first.",
        target="engine.checksum.consumer.ConsumerChecksums.judge",
        replace=_same_for_all,
        killers=("flip-before-verify--fail_open", "checksums-lost--fail_closed_fail"),
        control="clean-transfer--fail_open",
    ),
)
