"""Merging the workers' records of one request: sums, fingerprints, and what is incomplete (PRO-5, FPR-1, VER)."""

import numpy as np
import pytest

from engine.checksum.records import GroupBlocks, GroupSums, Merge, WorkerRecord, WorldShape, merge_records

BLOCKS = GroupBlocks(group_id=0, block_size=16, start=2, block_ids=(7, 4), num_tokens=60)
OTHER = GroupBlocks(group_id=1, block_size=32, start=0, block_ids=(5,), num_tokens=32)


def u64(*values):
    return np.array(values, dtype=np.uint64)


def record(tp=0, pp=0, values=(1, 2), fingerprint=10, blocks=BLOCKS, **more):
    sums = {blocks.group_id: GroupSums(blocks, fingerprint, u64(*values))}
    return WorkerRecord("r", tp, pp, sums | more.get("groups", {}))


def world_records(tp_size, pp_size):
    """Records whose values are 10**rank and whose fingerprints are 100 * stage."""
    return [
        record(tp, pp, (10 ** (tp * pp_size + pp), 2**63), 100 * (pp + 1))
        for tp in range(tp_size)
        for pp in range(pp_size)
    ]


@pytest.mark.req("PRO-5", "CON-5", "DEF-7", "FPR-1")
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_values_sum_over_the_world_and_fingerprints_over_stages(tp_size, pp_size):
    merge = merge_records({0: BLOCKS}, world_records(tp_size, pp_size)[::-1], WorldShape(tp_size, pp_size))
    group = merge.groups[0]
    size = tp_size * pp_size
    assert group.values.tolist() == [int("1" * size), (2**63 * size) % 2**64]
    assert group.values.dtype == np.uint64
    assert group.fingerprint == sum(100 * (pp + 1) for pp in range(pp_size))
    assert group.blocks == BLOCKS
    assert (merge.missing, merge.other_blocks, merge.disputed, merge.skipped) == (False, set(), set(), set())


@pytest.mark.req("FPR-1")
def test_fingerprints_wrap_around():
    records = [record(pp=0, fingerprint=2**64 - 1), record(pp=1, fingerprint=5)]
    assert merge_records({0: BLOCKS}, records, WorldShape(1, 2)).groups[0].fingerprint == 4


@pytest.mark.req("VER-3", "PRO-7")
@pytest.mark.parametrize(
    "records",
    [[], [record()], [record(), record()], [record(), record(tp=2)], [record(), record(tp=1), record(tp=1)]],
    ids=["none", "one short", "one twice", "a stranger", "one too many"],
)
def test_not_exactly_every_worker_is_missing(records):
    assert merge_records({0: BLOCKS}, records, WorldShape(2, 1)) == Merge(
        {}, True, frozenset(), frozenset(), frozenset()
    )


@pytest.mark.req("VER-2", "PRO-7")
@pytest.mark.parametrize(
    "blocks",
    [
        GroupBlocks(0, 16, 2, (7, 5), 60),
        GroupBlocks(0, 16, 1, (7, 4), 60),
        GroupBlocks(0, 16, 2, (7, 4), 59),
        GroupBlocks(0, 8, 2, (7, 4), 60),
    ],
)
def test_other_blocks_than_scheduled(blocks):
    merge = merge_records({0: BLOCKS}, [record(), record(tp=1, blocks=blocks)], WorldShape(2, 1))
    assert (merge.groups, merge.other_blocks, merge.missing) == ({}, {0}, False)


@pytest.mark.req("VER-2")
def test_a_value_short_is_other_blocks():
    merge = merge_records({0: BLOCKS}, [record(values=(1,))], WorldShape(1, 1))
    assert (merge.groups, merge.other_blocks) == ({}, {0})


@pytest.mark.req("FPR-1")
def test_ranks_of_a_stage_that_disagree_on_layers_dispute_the_group():
    records = [record(tp=0, fingerprint=1), record(tp=1, fingerprint=2)]
    merge = merge_records({0: BLOCKS}, records, WorldShape(2, 1))
    assert (merge.groups, merge.disputed) == ({}, {0})
    stages = [record(pp=0, fingerprint=1), record(pp=1, fingerprint=2)]
    assert merge_records({0: BLOCKS}, stages, WorldShape(1, 2)).disputed == set()


@pytest.mark.req("VER-5")
def test_a_group_that_one_worker_left_out_is_skipped_and_the_other_stays():
    both = {"groups": {1: GroupSums(OTHER, 3, u64(9))}}
    merge = merge_records({0: BLOCKS, 1: OTHER}, [record(**both), record(tp=1)], WorldShape(2, 1))
    assert (set(merge.groups), merge.skipped) == ({0}, {1})
    assert merge.groups[0].values.tolist() == [2, 4]


def test_the_records_stay_as_they_are():
    records = [record(), record(tp=1)]
    merge_records({0: BLOCKS}, records, WorldShape(2, 1))
    assert [r.groups[0].values.tolist() for r in records] == [[1, 2], [1, 2]]


def test_positions_and_size():
    assert list(BLOCKS.positions) == [2, 3]
    assert WorldShape(3, 2).size == 6
