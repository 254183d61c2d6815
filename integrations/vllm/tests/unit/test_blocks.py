"""Which blocks are checksummed (BLK-1 to BLK-3)."""

from __future__ import annotations

import pytest
from kvchaos_vllm.blocks import GroupShape, blocks_of
from kvchaos_vllm.records import GroupBlocks

FULL = GroupShape(3, 4)
WINDOW = GroupShape(1, 4, window=6)


def test_the_blocks_that_hold_the_tokens_and_no_later_ones():
    assert blocks_of(FULL, [7, 8, 9, 10], 0, 9) == GroupBlocks(3, 4, 0, (7, 8, 9), 9)
    assert blocks_of(FULL, [7, 8, 9, 10], 4, 12) == GroupBlocks(3, 4, 1, (8, 9), 12)
    assert blocks_of(FULL, [7], 0, 1) == GroupBlocks(3, 4, 0, (7,), 1)


def test_a_window_keeps_as_many_blocks_as_nixl_transfers():
    assert WINDOW.max_blocks == 3
    assert blocks_of(WINDOW, [5, 6, 7, 8, 9], 0, 20) == GroupBlocks(1, 4, 2, (7, 8, 9), 20)
    assert blocks_of(WINDOW, [0, 0, 0, 8, 9], 0, 20) == GroupBlocks(1, 4, 3, (8, 9), 20)
    assert blocks_of(WINDOW, [5, 6, 7, 8, 9], 16, 20) == GroupBlocks(1, 4, 4, (9,), 20)


@pytest.mark.parametrize(
    ("table", "first", "tokens"),
    [([7, 8], 0, 9), ([7, 0, 9], 0, 12), ([0, 0], 0, 8), ([7, 8], 8, 8), ([], 0, 0), ([0, 7, 0], 0, 12)],
    ids=["table too short", "null inside", "only nulls", "nothing loaded", "nothing at all", "null at the end"],
)
def test_a_group_that_is_left_out(table, first, tokens):
    assert blocks_of(FULL, table, first, tokens) is None
