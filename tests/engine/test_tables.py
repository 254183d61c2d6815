"""Which blocks of a request a transfer names: windows, null blocks, and states (BLK-1 to BLK-3)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checksum.records import GroupBlocks
from engine.groups import kv_groups
from engine.presets import PRESETS
from engine.tables import GroupTables, cdiv

FULL, WINDOW = kv_groups(PRESETS["tiny-window"])
STATE = kv_groups(PRESETS["tiny-hybrid"])[0]


def window(size, block_size=4):
    return GroupTables(replace(WINDOW, window=size), block_size)


@pytest.mark.req("BLK-1")
def test_all_blocks_of_a_full_group_are_named():
    tables = GroupTables(FULL, 4)
    assert tables.blocks([5, 6, 7], 0, 10) == GroupBlocks(0, 4, 0, (5, 6, 7), 10)
    assert tables.blocks([5, 6, 7], 4, 10) == GroupBlocks(0, 4, 1, (6, 7), 10)
    assert (tables.first_read(100), tables.first_sent(100)) == (0, 0)


@pytest.mark.req("BLK-3")
@pytest.mark.parametrize(
    ("size", "num_tokens", "start"),
    [(4, 40, 8), (5, 40, 7), (8, 40, 7), (8, 41, 8), (9, 41, 7), (1, 4, 0), (100, 40, 0)],
)
def test_a_window_group_keeps_its_last_blocks(size, num_tokens, start):
    table = list(range(1, cdiv(num_tokens, 4) + 1))
    blocks = window(size).blocks(table, 0, num_tokens)
    assert len(blocks.block_ids) == min(len(table), cdiv(size, 4) + 1)
    assert (blocks.start, blocks.block_ids) == (start, tuple(table[start:]))


@pytest.mark.req("BLK-3", "BLK-1")
@given(
    size=st.integers(1, 40), block_size=st.integers(1, 16), num_tokens=st.integers(1, 200), chunk=st.integers(0, 199)
)
def test_what_a_producer_has_left_is_what_a_consumer_loads_and_needs(size, block_size, num_tokens, chunk):
    tables = window(size, block_size)
    first_sent = tables.first_sent(num_tokens)
    # However the prompt is cut into chunks, nothing that is sent has slid out of the window before.
    assert tables.first_read(min(chunk, num_tokens - 1)) <= first_sent
    # The consumer computes the last prompt token again, and looks back `size` tokens from there.
    assert first_sent * block_size <= max(0, num_tokens - size)


@pytest.mark.req("BLK-2")
def test_leading_null_blocks_are_left_out():
    assert window(100).blocks([0, 0, 7, 8], 0, 16) == GroupBlocks(1, 4, 2, (7, 8), 16)


@pytest.mark.req("BLK-2")
@pytest.mark.parametrize("table", [[5, 0, 7, 8], [5, 6, 7, 0], [0, 6, 0, 8]])
def test_a_group_with_an_inner_null_block_is_left_out(table):
    assert window(100).blocks(table, 0, 16) is None


@pytest.mark.req("EXT-5")
def test_a_state_is_one_block_and_counts_as_one_token():
    tables = GroupTables(STATE, 16)
    assert (tables.block_size, tables.length(1), tables.length(1000)) == (1, 1, 1)
    assert tables.blocks([9], 0, 77) == GroupBlocks(0, 1, 0, (9,), 1)
