"""Verdicts, group by group (VER-1 to VER-7, BLK-4), with the compared positions worked out one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checksum.payload import Payload, PayloadGroup
from engine.checksum.records import GroupBlocks, Merge, MergedGroup
from engine.checksum.verdict import (
    NO_LOAD,
    NotCheckedReason,
    UnverifiedReason,
    Verdict,
    VerdictStatus,
    judge_load,
    not_checked,
)

SIZE = 16
VERIFIED, MISMATCH, UNVERIFIED = VerdictStatus.VERIFIED, VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED


def u64(values):
    return np.array(list(values), dtype=np.uint64)


def value_at(position):
    return (position + 1) * 0x9E3779B97F4A7C15 % 2**64


def sent_group(group_id=0, start=0, count=4, *, fingerprint=5, block_size=SIZE, wrong=()):
    values = [value_at(p) ^ (p in wrong) for p in range(start, start + count)]
    return PayloadGroup(group_id, fingerprint, block_size, start, u64(values))


def payload(*groups, num_tokens=4 * SIZE):
    return Payload(1, num_tokens, groups)


def blocks(group_id=0, start=0, count=4, *, num_tokens=4 * SIZE):
    return GroupBlocks(group_id, SIZE, start, tuple(range(100, 100 + count)), num_tokens)


def loaded(*groups):
    return {g.group_id: g for g in groups}


def merge(*groups, **problems):
    """D's own sums of these blocks; a group named in a problem has none."""
    named = {g for ids in problems.values() if ids is not True for g in ids}
    sums = {g.group_id: MergedGroup(g, 5, u64(map(value_at, g.positions))) for g in groups if g.group_id not in named}
    flags = {name: frozenset(problems.get(name, ())) for name in ("other_blocks", "disputed", "skipped")}
    return Merge(sums, problems.get("missing", False), **flags)


def judge(sent, *groups, **problems):
    return judge_load(sent, loaded(*groups), merge(*groups, **problems))


@pytest.mark.req("VER-6")
def test_verified_when_every_group_was_compared_and_none_differs():
    verdict = judge(payload(sent_group(0), sent_group(1, 1, 3)), blocks(0), blocks(1, 1, 3))
    assert (verdict.status, verdict.reason, verdict.acceptable) == (VERIFIED, None, True)
    assert [(g.group_id, g.loaded, g.compared, g.not_compared, g.differing) for g in verdict.groups] == [
        (0, (0, 1, 2, 3), (0, 1, 2, 3), (), ()),
        (1, (1, 2, 3), (1, 2, 3), (), ()),
    ]


@pytest.mark.req("VER-1")
@pytest.mark.parametrize("wrong", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_mismatch_names_the_positions(wrong):
    verdict = judge(payload(sent_group(wrong=wrong)), blocks())
    assert (verdict.status, verdict.reason, verdict.acceptable) == (MISMATCH, None, False)
    assert verdict.groups[0].differing == wrong
    assert verdict.groups[0].compared == (0, 1, 2, 3)


@pytest.mark.req("VER-1")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_mismatch_wins_over_unverified_over_verified(order):
    """Which group has which trouble does not matter."""
    good, bad, stranger = order
    sent = {good: sent_group(good), bad: sent_group(bad, wrong=(2,)), stranger: sent_group(stranger, fingerprint=6)}
    sides = [blocks(g) for g in range(3)]
    verdict = judge(payload(*(sent[g] for g in range(3))), *sides)
    assert verdict.status is MISMATCH
    assert [g.status for g in verdict.groups] == [
        {good: VERIFIED, bad: MISMATCH, stranger: UNVERIFIED}[g] for g in range(3)
    ]
    del sent[bad]
    verdict = judge(payload(*(sent[g] for g in sorted(sent))), *(blocks(g) for g in sorted(sent)))
    assert (verdict.status, verdict.reason) == (UNVERIFIED, "other_layers")


@pytest.mark.req("VER-2")
@pytest.mark.parametrize(
    ("sent", "sides", "problems", "reason"),
    [
        (payload(), [blocks()], {}, UnverifiedReason.ONE_SIDE_ONLY),
        (payload(sent_group(0), sent_group(1)), [blocks(0)], {}, UnverifiedReason.ONE_SIDE_ONLY),
        (payload(sent_group()), [blocks()], {"skipped": [0]}, UnverifiedReason.ONE_SIDE_ONLY),
        (payload(sent_group(fingerprint=6)), [blocks()], {}, UnverifiedReason.OTHER_LAYERS),
        (payload(sent_group()), [blocks()], {"disputed": [0]}, UnverifiedReason.OTHER_LAYERS),
        (payload(sent_group(block_size=32)), [blocks()], {}, UnverifiedReason.OTHER_BLOCK_SIZE),
        (payload(sent_group()), [blocks()], {"other_blocks": [0]}, UnverifiedReason.OTHER_BLOCKS),
        (payload(sent_group(0, 0, 2)), [blocks(0, 2, 2)], {}, UnverifiedReason.NO_COMMON_POSITION),
        (payload(sent_group(0, 0, 0)), [blocks()], {}, UnverifiedReason.NO_COMMON_POSITION),
    ],
)
def test_unverified_groups_and_their_reasons(sent, sides, problems, reason):
    verdict = judge(sent, *sides, **problems)
    assert (verdict.status, verdict.reason, verdict.acceptable) == (UNVERIFIED, reason, False)
    (group,) = (g for g in verdict.groups if g.status is UNVERIFIED)
    assert (group.reason, group.compared, group.differing) == (reason, (), ())
    assert group.not_compared == group.loaded


@pytest.mark.req("VER-3")
@pytest.mark.parametrize(
    ("sent", "sides", "problems", "reason"),
    [
        (UnverifiedReason.NO_CHECKSUMS, [blocks()], {}, UnverifiedReason.NO_CHECKSUMS),
        (UnverifiedReason.INVALID, [blocks()], {}, UnverifiedReason.INVALID),
        (payload(sent_group()), [blocks()], {"missing": True}, UnverifiedReason.WORKERS_MISSING),
        (payload(), [blocks()], {"skipped": [0]}, UnverifiedReason.NO_GROUP),
        (payload(), [], {}, UnverifiedReason.NO_GROUP),
    ],
)
def test_unverified_loads_and_their_reasons(sent, sides, problems, reason):
    verdict = judge(sent, *sides, **problems)
    assert (verdict.status, verdict.reason, verdict.acceptable) == (UNVERIFIED, reason, False)
    assert [(g.group_id, g.reason, g.loaded) for g in verdict.groups] == [(0, reason, (0, 1, 2, 3)) for _ in sides]


@pytest.mark.req("VER-4")
def test_the_reasons_are_these_constants():
    assert [reason.value for reason in UnverifiedReason] == [
        "no_checksums",
        "invalid",
        "workers_missing",
        "other_blocks",
        "no_group",
        "one_side_only",
        "other_layers",
        "other_block_size",
        "no_common_position",
        "replica_unchecked",
    ]


@pytest.mark.req("VER-5")
def test_a_group_skipped_on_both_sides_is_left_out():
    verdict = judge(payload(sent_group(0)), blocks(0), blocks(1), skipped=[1])
    assert verdict.status is VERIFIED
    assert [g.group_id for g in verdict.groups] == [0]


@pytest.mark.req("VER-5")
def test_a_group_skipped_on_one_side_is_unverified():
    for sent, problems in ((payload(sent_group(0), sent_group(1)), {"skipped": [1]}), (payload(sent_group(0)), {})):
        verdict = judge(sent, blocks(0), blocks(1), **problems)
        assert (verdict.status, verdict.reason) == (UNVERIFIED, "one_side_only")
        assert [g.status for g in verdict.groups] == [VERIFIED, UNVERIFIED]


@pytest.mark.req("BLK-4", "GAP-4")
@pytest.mark.parametrize(
    ("sent_tokens", "our_tokens", "compared"),
    [
        (64, 64, (0, 1, 2, 3)),
        (60, 60, (0, 1, 2, 3)),
        (60, 61, (0, 1, 2)),
        (61, 60, (0, 1, 2)),
        (60, 64, (0, 1, 2)),
        (64, 60, (0, 1, 2)),
        (33, 64, (0, 1)),
        (32, 64, (0, 1)),
        (48, 48, (0, 1, 2)),
        (1, 64, ()),
        (10**18, 64, (0, 1, 2, 3)),
        (1, 1, (0,)),
    ],
)
def test_the_last_block_counts_only_with_equally_many_tokens(sent_tokens, our_tokens, compared):
    verdict = judge(payload(sent_group(wrong=range(4)), num_tokens=sent_tokens), blocks(num_tokens=our_tokens))
    (group,) = verdict.groups
    assert group.compared == group.differing == compared
    assert verdict.status is (MISMATCH if compared else UNVERIFIED)


@pytest.mark.req("BLK-4", "GAP-4", "CON-1")
def test_only_what_both_sides_hold_is_compared():
    verdict = judge(payload(sent_group(0, 0, 3, wrong=(0,))), blocks(0, 1, 3))
    assert verdict.status is VERIFIED
    (group,) = verdict.groups
    assert (group.loaded, group.compared, group.not_compared) == ((1, 2, 3), (1, 2), (3,))


@pytest.mark.req("BLK-4", "VER-1", "VER-6")
@settings(max_examples=300, deadline=None)
@given(
    theirs=st.tuples(st.sampled_from([0, 1, 2, 3, 2**64 - 2]), st.integers(0, 6), st.integers(1, 6 * SIZE)),
    ours=st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 6 * SIZE)),
    wrong=st.sets(st.integers(0, 8)),
)
def test_against_a_search_of_every_position(theirs, ours, wrong):
    start, count, num_tokens = ours
    held = {p: range(p * SIZE, min((p + 1) * SIZE, theirs[2])) for p in range(theirs[0], theirs[0] + theirs[1])}
    expected = [
        p
        for p in range(start, start + count)
        if p in held and len(held[p]) == len(range(p * SIZE, min((p + 1) * SIZE, num_tokens))) > 0
    ]
    sent = payload(sent_group(0, theirs[0], theirs[1], wrong=wrong), num_tokens=theirs[2])
    verdict = judge(sent, blocks(0, start, count, num_tokens=num_tokens))
    differing = tuple(p for p in expected if p in wrong)
    (group,) = verdict.groups
    assert (group.compared, group.differing) == (tuple(expected), differing)
    assert verdict.status is (MISMATCH if differing else VERIFIED if expected else UNVERIFIED)


@pytest.mark.req("VER-7")
@pytest.mark.parametrize("reason", ["off", "no_carrier", "load_failed", "request_ended"])
def test_not_checked_is_acceptable_and_has_a_reason(reason):
    verdict = not_checked(NotCheckedReason(reason))
    assert verdict == Verdict(VerdictStatus.NOT_CHECKED, reason, ())
    assert verdict.acceptable


def test_no_load_is_acceptable():
    assert (NO_LOAD.status, NO_LOAD.acceptable) == ("no_load", True)


# ---- blocks of different sizes (EXT-2)


def in_blocks_of(size, start, count, num_tokens, wrong=()):
    """Checksums of consecutive blocks of `size` tokens, made of those of single tokens (DEF-6)."""
    sums = []
    for position in range(start, start + count):
        tokens = range(position * size, min((position + 1) * size, num_tokens))
        sums.append(sum(value_at(t) ^ (t in wrong) for t in tokens) % 2**64)
    return u64(sums)


@pytest.mark.req("EXT-2", "DEF-6", "BLK-4")
@pytest.mark.parametrize(
    ("theirs", "mine", "compared", "differing"),
    [
        # (block size, start, blocks, tokens) of each side; a wrong token is 40
        ((32, 0, 3, 70), (16, 0, 5, 70), (0, 1, 2, 3, 4), (2, 3)),
        ((16, 0, 5, 70), (32, 0, 3, 70), (0, 1, 2), (1,)),
        ((8, 0, 9, 70), (32, 0, 3, 70), (0, 1, 2), (1,)),
        # D holds the first 16 tokens already: what is left of P's first block cannot be compared
        ((32, 0, 3, 70), (16, 1, 4, 70), (2, 3, 4), (2, 3)),
        # P sends from 24 on: D's first block of 32 is not all there
        ((8, 3, 6, 70), (32, 0, 3, 70), (1, 2), (1,)),
        # other token counts: a block that is full on one side alone is not compared
        ((32, 0, 3, 70), (16, 0, 5, 80), (0, 1, 2, 3), (2, 3)),
        ((16, 0, 4, 64), (32, 0, 3, 70), (0, 1), (1,)),
    ],
)
def test_blocks_of_different_sizes_are_compared_by_the_larger(theirs, mine, compared, differing):
    size, start, count, tokens = theirs
    sent = PayloadGroup(0, 5, size, start, in_blocks_of(size, start, count, tokens))
    size, start, count, own_tokens = mine
    own = GroupBlocks(0, size, start, tuple(range(count)), own_tokens)
    sums = in_blocks_of(size, start, count, own_tokens, wrong=(40,))
    merged = Merge({0: MergedGroup(own, 5, sums)}, False, frozenset(), frozenset(), frozenset())
    verdict = judge_load(payload(sent, num_tokens=tokens), {0: own}, merged, compare_block_sizes=True)
    assert (verdict.groups[0].compared, verdict.groups[0].differing) == (compared, differing)
    off = judge_load(payload(sent, num_tokens=tokens), {0: own}, merged)
    assert (off.status, off.reason) == (UNVERIFIED, "other_block_size")
    right = in_blocks_of(size, start, count, own_tokens)
    clean = Merge({0: MergedGroup(own, 5, right)}, False, frozenset(), frozenset(), frozenset())
    assert judge_load(payload(sent, num_tokens=tokens), {0: own}, clean, compare_block_sizes=True).status is VERIFIED


@pytest.mark.req("EXT-2", "VER-6")
def test_where_no_larger_block_is_whole_nothing_is_compared():
    sent = PayloadGroup(0, 5, 32, 0, in_blocks_of(32, 0, 1, 30))
    own = GroupBlocks(0, 16, 1, (7,), 30)
    merged = Merge({0: MergedGroup(own, 5, in_blocks_of(16, 1, 1, 30))}, False, frozenset(), frozenset(), frozenset())
    verdict = judge_load(payload(sent, num_tokens=30), {0: own}, merged, compare_block_sizes=True)
    assert (verdict.status, verdict.reason) == (UNVERIFIED, "no_common_position")
