"""The copy to the host on a real device: the same values, and nothing on the way waits for the device."""

import pytest
import torch

from engine.cache import KVMemory, PagedKVCache
from engine.checksum.records import GroupBlocks
from engine.checksum.worker import ChecksumWorker
from engine.config import EngineConfig
from kernels.definition import block_checksums

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS = {0: GroupBlocks(0, 16, 0, (3, 1, 2), 40)}


@pytest.fixture
def cache():
    cache = PagedKVCache(EngineConfig("e", device="cuda"))
    for layer in cache.layers:
        layer.normal_()
    torch.cuda.synchronize()
    return cache


@pytest.mark.req("PRO-3", "CON-6")
def test_summing_waits_for_nothing_and_the_finalizer_gets_the_sums(cache):
    worker = ChecksumWorker([cache])
    worker.checksum("warm up", BLOCKS).finalise()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = worker.checksum("r", BLOCKS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kv = KVMemory(cache).slots(BLOCKS[0].block_ids)
    wanted = block_checksums(kv, [0, 1], 0, 16, 0, 40)
    assert pending.finalise().groups[0].values.tolist() == wanted.tolist()


@pytest.mark.req("PRO-3")
def test_sums_arrive_in_pinned_memory(cache):
    worker = ChecksumWorker([cache])
    pending = worker.checksum("r", BLOCKS)
    assert all(group.values.is_pinned() for group in pending.groups.values())


def test_a_device_changes_neither_tokens_nor_kv(tools):
    prompts = [tools.prompt(f"r{n}", n, max_tokens=8) for n in (1, 17, 64, 130)]
    tokens, kv = tools.serve(prompts)
    on_device = tools.serve(prompts, device="cuda")
    assert on_device[0] == tokens
    assert all((on_device[1][name] == stored).all() for name, stored in kv.items())
