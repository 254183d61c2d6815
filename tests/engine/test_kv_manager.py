"""Admission and growth are all or nothing, the prefix cache never lies, and freed blocks wait behind the fence."""

import pytest

from engine.checksum.records import GroupBlocks
from engine.groups import kv_groups
from engine.kv_manager import KVManager
from engine.presets import PRESETS
from engine.request import Request
from engine.seams import BlocksAllocated, BlocksFreed, Seams
from engine.tables import cdiv

GROUPS = kv_groups(PRESETS["tiny"])


@pytest.fixture
def events():
    return []


@pytest.fixture
def kv(events):
    seams = Seams()
    for seam in ("blocks.allocated", "blocks.freed"):
        seams.on(seam, events.append)
    return KVManager("e", num_blocks=9, block_size=4, prefix_caching=True, seams=seams, groups=GROUPS)


def request(length, name="r", **fields):
    return Request(name, list(range(length)), 4, **fields)


def admitted(kv, length, name="r", **fields):
    new = request(length, name, **fields)
    assert kv.admit(new, kv.cached_prefix(new), length)
    return new


def cached(kv, length, name="first"):
    """A request whose blocks are cached and free again."""
    first = admitted(kv, length, name)
    kv.cache(first, length)
    kv.free(name, first.block_ids, 0)
    kv.release(0)
    return first


@pytest.mark.parametrize(("a", "b", "wanted"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_cdiv(a, b, wanted):
    assert cdiv(a, b) == wanted


def test_admission_takes_what_the_tokens_need(kv, events):
    new = admitted(kv, 9)
    assert new.block_ids == [1, 2, 3]
    assert events == [BlocksAllocated("e", "r", (1, 2, 3))]


def test_admission_is_all_or_nothing(kv, events):
    new = request(33)
    assert not kv.admit(new, kv.no_prefix, 33)
    assert (new.block_ids, kv.pool.num_free, events) == ([], 8, [])


def test_growth_is_all_or_nothing(kv):
    new = admitted(kv, 4)
    assert kv.grow(new, 4)
    assert new.block_ids == [1]
    assert kv.grow(new, 5)
    assert new.block_ids == [1, 2]
    assert not kv.grow(new, 33)
    assert new.block_ids == [1, 2]
    assert kv.grow(new, 2), "fewer tokens take nothing away"
    assert new.block_ids == [1, 2]


def test_a_cached_prefix_leaves_a_token_to_compute(kv):
    first = cached(kv, 8)
    assert list(kv.cached_prefix(request(9)).tables[0]) == first.block_ids
    assert list(kv.cached_prefix(request(8)).tables[0]) == first.block_ids[:1]
    assert list(kv.cached_prefix(request(4)).tables[0]) == []


def test_a_cached_prefix_counts_free_blocks_that_it_wakes(kv):
    """Two free cached blocks and six others: a request that shares two can have six more, not seven."""
    cached(kv, 8)
    blocked = request(4 * 9)
    assert not kv.admit(blocked, kv.cached_prefix(blocked), 36)
    assert kv.pool.num_free == 8
    fits = request(4 * 8)
    assert kv.admit(fits, kv.cached_prefix(fits), 32)
    assert (len(fits.block_ids), kv.pool.num_free) == (8, 0)


def test_shared_blocks_have_two_references(kv):
    first = admitted(kv, 8, "a")
    kv.cache(first, 8)
    second = admitted(kv, 12, "b")
    assert second.block_ids[:2] == first.block_ids
    assert [kv.pool.references(b) for b in second.block_ids] == [2, 2, 1]


@pytest.mark.req("POL-3")
def test_a_recomputed_request_finds_no_prefix(kv):
    cached(kv, 8)
    assert list(kv.cached_prefix(request(9, recomputed=True)).tables[0]) == []


def test_without_prefix_caching_nothing_is_cached():
    kv = KVManager("e", num_blocks=9, block_size=4, prefix_caching=False, seams=Seams(), groups=GROUPS)
    cached(kv, 8)
    assert list(kv.cached_prefix(request(9)).tables[0]) == []


def test_only_full_blocks_are_cached(kv):
    new = admitted(kv, 11)
    kv.cache(new, 3)
    assert not any(map(kv.pool.is_cached, new.block_ids))
    kv.cache(new, 7)
    assert [kv.pool.is_cached(b) for b in new.block_ids] == [True, False, False]
    kv.cache(new, 11)
    assert [kv.pool.is_cached(b) for b in new.block_ids] == [True, True, False]


def test_the_output_is_part_of_what_is_cached(kv):
    new = admitted(kv, 7)
    new.output_token_ids = [77, 78]
    kv.cache(new, 8)
    follower = request(7, "next")
    follower.prompt_token_ids += [77, 5]
    assert list(kv.cached_prefix(follower).tables[0]) == new.block_ids
    other = request(7, "other")
    other.prompt_token_ids += [78, 5]
    assert list(kv.cached_prefix(other).tables[0]) == new.block_ids[:1]


@pytest.mark.req("BLK-1")
def test_blocks_hold_the_tokens_and_no_more(kv):
    new = admitted(kv, 14)
    assert kv.blocks(new, 0, 13)[0] == GroupBlocks(0, 4, 0, (1, 2, 3, 4), 13)
    assert kv.blocks(new, 0, 12)[0] == GroupBlocks(0, 4, 0, (1, 2, 3), 12)
    assert kv.blocks(new, 8, 13)[0] == GroupBlocks(0, 4, 2, (3, 4), 13)


def test_freed_blocks_wait_for_the_steps_in_flight(kv, events):
    """The shape of vllm-project/vllm-ascend#14055: a step in flight may still write them."""
    new = admitted(kv, 8)
    events.clear()
    kv.free("r", new.block_ids, last_step=5)
    for collected in (3, 4):
        kv.release(collected)
        assert (kv.pool.num_free, kv.num_fenced, events) == (6, 2, [])
    kv.release(5)
    assert (kv.pool.num_free, kv.num_fenced) == (8, 0)
    assert events == [BlocksFreed("e", "r", (1, 2))]
    kv.release(6)
    assert kv.pool.num_free == 8


def test_the_fence_lets_through_what_is_due_and_keeps_the_rest(kv):
    first, second = admitted(kv, 4, "a"), admitted(kv, 8, "b")
    kv.free("b", second.block_ids, last_step=7)
    kv.free("a", first.block_ids, last_step=5)
    kv.release(6)
    assert (kv.pool.num_free, kv.num_fenced) == (6, 2)


def test_freeing_nothing_is_nothing(kv, events):
    kv.free("r", [], last_step=0)
    kv.release(1)
    assert (kv.num_fenced, events) == (0, [])
