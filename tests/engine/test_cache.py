"""The paged cache in both layouts, and the byte view of it that faults and oracles get."""

import itertools

import numpy as np
import pytest
import torch

from engine.cache import KVMemory, SlotChange
from engine.checksum.records import GroupBlocks
from engine.config import PRESETS, EngineConfig
from engine.paged import PagedKVCache

POISON = b"POISONED"


@pytest.fixture(params=[("HND", "bfloat16"), ("NHD", "bfloat16"), ("HND", "float16"), ("NHD", "float16")], ids=str)
def cache(request):
    layout, kv_dtype = request.param
    cache = PagedKVCache(EngineConfig("e", block_size=4, num_blocks=6, layout=layout, kv_dtype=kv_dtype))
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def test_every_layout_has_one_indexing(cache):
    config = PRESETS["tiny"]
    shape = (6, 2, 4, config.num_kv_heads, config.head_dim)
    assert [tuple(layer.shape) for layer in cache.layers] == [shape] * config.num_layers
    slot_stride, head_stride = cache.layers[0].stride()[2:4]
    assert (slot_stride < head_stride) == (cache.layout == "HND")
    assert cache.bytes_per_token == 2 * config.head_dim * 2


def test_what_is_written_is_read_rounded(cache):
    k, v = torch.randn(3, 2, 16, dtype=torch.float64), torch.randn(3, 2, 16, dtype=torch.float64)
    before = cache.layers[0].clone()
    cache.write(1, torch.tensor([5, 5, 2]), torch.tensor([2, 3, 0]), k, v)
    read_k, read_v = cache.read(1, torch.tensor([5, 2]), 5)
    assert read_k.dtype == torch.float64
    assert torch.equal(read_k[2:], k.to(cache.dtype).to(torch.float64))
    assert torch.equal(read_v[2:], v.to(cache.dtype).to(torch.float64))
    assert torch.equal(cache.layers[0], before)


def test_reading_ends_with_the_context(cache):
    for context in (1, 4, 7, 8):
        k, v = cache.read(0, torch.tensor([3, 1]), context)
        assert k.shape == v.shape == (context, 2, 16)
        for token in (0, context - 1):
            stored = cache.layers[0][(3, 1)[token // 4], :, token % 4].to(torch.float64)
            assert torch.equal(torch.stack([k[token], v[token]]), stored)


def slot_bytes(cache, layer, head, block_id, slot):
    """K bytes, then V bytes, straight from the tensor."""
    return cache.layers[layer][block_id, :, slot, head].contiguous().view(torch.uint8).numpy().reshape(-1)


def test_slots_are_k_then_v_in_the_order_of_the_blocks(cache):
    seen = KVMemory(cache).slots((4, 1))
    assert seen.shape == (2, 2, 8, cache.bytes_per_token)
    for layer in range(2):
        for head in range(2):
            for slot in range(8):
                wanted = slot_bytes(cache, layer, head, (4, 1)[slot // 4], slot % 4)
                assert np.array_equal(seen[layer, head, slot], wanted)


def test_slots_are_a_copy(cache):
    memory = KVMemory(cache)
    seen = memory.slots((4,))
    seen[:] = 0
    assert memory.slots((4,)).any()


def test_no_blocks_have_no_slots(cache):
    assert KVMemory(cache).slots(()).shape == (2, 2, 0, 64)


@pytest.mark.req("DEF-8")
@pytest.mark.parametrize(("start", "num_tokens", "count"), [(0, 8, 8), (0, 5, 5), (1, 6, 2), (1, 8, 4)])
def test_tokens_leave_out_the_slots_past_the_end(cache, start, num_tokens, count):
    block_ids = (4, 1)[start:]
    memory = KVMemory(cache)
    seen = memory.tokens(GroupBlocks(0, 4, start, block_ids, num_tokens))
    assert np.array_equal(seen, memory.slots(block_ids)[:, :, :count])


def test_write_slot_writes_one_slot(cache):
    memory = KVMemory(cache)
    before = memory.slots(tuple(range(6)))
    data = np.arange(cache.bytes_per_token, dtype=np.uint8)
    memory.write_slot(1, 0, 3, 2, data)
    after = memory.slots(tuple(range(6)))
    assert np.array_equal(after[1, 0, 14], data)
    assert {tuple(index) for index in np.argwhere((before != after).any(-1))} == {(1, 0, 14)}


def test_fill_repeats_a_pattern_over_every_slot(cache):
    memory = KVMemory(cache)
    before = memory.slots((1, 4))
    memory.fill((2, 3), POISON)
    assert memory.slots((2, 3)).tobytes() == POISON * (2 * 2 * 8 * cache.bytes_per_token // len(POISON))
    assert np.array_equal(memory.slots((1, 4)), before)


def test_a_region_is_a_view_of_what_one_copy_moves(cache):
    memory = KVMemory(cache)
    region = memory.region(1, 5, 0, 1, 2, 2)
    assert region.shape == (2, 16)
    assert torch.equal(region, cache.layers[1][5, 0, 2:4, 1])
    region.zero_()
    assert not cache.layers[1][5, 0, 2:4, 1].any()


def test_the_memory_says_its_geometry(cache):
    memory = KVMemory(cache)
    geometry = (memory.num_layers, memory.num_kv_heads, memory.num_blocks, memory.block_size, memory.bytes_per_token)
    assert geometry == (2, 2, 6, 4, 64)


def test_watchers_hear_of_every_slot_that_is_changed_from_outside(cache):
    memory, heard = KVMemory(cache), []
    memory.watch(heard.append)
    memory.write_slot(1, 0, 3, 2, np.zeros(cache.bytes_per_token, dtype=np.uint8))
    assert heard == [SlotChange(replica=0, layer=1, head=0, block_id=3, slot=2)]
    heard.clear()
    memory.fill((2, 5), POISON)
    assert sorted(heard) == list(itertools.product([0], range(2), range(2), (2, 5), range(4), [0]))
    heard.clear()
    memory.slots((1,))
    cache.write(0, torch.tensor([1]), torch.tensor([0]), torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
    assert heard == [], "reading, and the engine's own writes, are no change from outside"
