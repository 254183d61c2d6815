"""A worker's sums against the definition, on the engine's own cache, and that only the finalizer waits for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.cache import KVMemory
from engine.checksum.payload import fingerprint
from engine.checksum.records import GroupBlocks
from engine.checksum.worker import ChecksumWorker
from engine.config import PRESETS, EngineConfig
from engine.groups import kv_groups
from engine.paged import PagedKVCache
from engine.sharding import shard_model
from kernels.definition import block_checksums


def random_cache(**options):
    cache = PagedKVCache(EngineConfig("e", **{"block_size": 8, "num_blocks": 10} | options))
    generator = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def worker(cache, **options):
    return ChecksumWorker([cache], **options)


def renamed(cache, *names):
    """The cache with other names of its layers."""
    rows = tuple(replace(row, names=(name,)) for row, name in zip(cache.group.rows, names, strict=True))
    cache.group = replace(cache.group, rows=rows)
    return cache


@pytest.mark.req("DEF-4", "DEF-7", "DEF-8", "DEF-2")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["tiny", "small"])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 24), (0, 17), (0, 1), (2, 40), (3, 33)])
def test_the_sums_are_those_of_the_definition(layout, kv_dtype, model, start, num_tokens):
    cache = random_cache(layout=layout, kv_dtype=kv_dtype, model=PRESETS[model])
    block_ids = (7, 2, 9, 4, 1)[start : -(-num_tokens // 8)]
    blocks = GroupBlocks(0, 8, start, block_ids, num_tokens)
    record = worker(cache).checksum("r", {0: blocks}).finalise()
    kv = KVMemory(cache).slots(block_ids)
    wanted = block_checksums(kv, range(len(cache.layers)), 0, 8, start * 8, num_tokens)
    assert record.groups[0].values.dtype == np.uint64
    assert record.groups[0].values.tolist() == wanted.tolist()
    assert (record.request_id, record.tp_rank, record.pp_rank, record.groups[0].blocks) == ("r", 0, 0, blocks)


@pytest.mark.req("FPR-1")
def test_the_fingerprint_is_of_the_layers():
    cache = random_cache()
    record = worker(cache).checksum("r", {0: GroupBlocks(0, 8, 0, (1,), 8)}).finalise()
    layers = [(f"model.layers.{i}.self_attn.attn", "full_attention", "bfloat16") for i in range(2)]
    assert record.groups[0].fingerprint == fingerprint(layers)


@pytest.mark.req("DEF-4", "DEF-7")
def test_layers_count_by_the_number_in_their_names_and_heads_over_the_whole_model():
    small = PRESETS["small"]
    shard = shard_model(small, 4, 1)[0][2]
    config = EngineConfig("e", small, block_size=8, num_blocks=10, tp_size=4)
    cache = renamed(PagedKVCache(config, kv_groups(small)[0], shard), *(f"model.layers.{n}.attn" for n in (5, 2, 9, 1)))
    for layer in cache.layers:
        layer.normal_()
    done = worker(cache, tp_rank=2, pp_rank=3).checksum("r", {0: GroupBlocks(0, 8, 0, (3, 4), 16)}).finalise()
    wanted = block_checksums(cache.slots((3, 4)), [5, 2, 9, 1], 2, 8, 0, 16)
    assert done.groups[0].values.tolist() == wanted.tolist()
    assert (done.tp_rank, done.pp_rank) == (2, 3)


@pytest.mark.req("DEF-8")
def test_slots_past_the_end_and_other_blocks_do_not_count():
    cache = random_cache()
    blocks = GroupBlocks(0, 8, 0, (3, 4), 11)
    before = worker(cache).checksum("r", {0: blocks}).finalise().groups[0].values
    cache.layers[0][4, :, 3:] = 7.0
    cache.layers[1][(0, 1, 2, 5), :] = 7.0
    assert worker(cache).checksum("r", {0: blocks}).finalise().groups[0].values.tolist() == before.tolist()
    cache.layers[0][4, :, 2] = 7.0
    assert worker(cache).checksum("r", {0: blocks}).finalise().groups[0].values.tolist() != before.tolist()


@pytest.mark.req("PRO-2")
def test_sums_are_of_the_bytes_at_the_time_of_the_call():
    cache = random_cache()
    blocks = {0: GroupBlocks(0, 8, 0, (3,), 8)}
    wanted = block_checksums(KVMemory(cache).slots((3,)), [0, 1], 0, 8, 0, 8)
    pending = worker(cache).checksum("r", blocks)
    cache.layers[0].zero_()
    assert pending.finalise().groups[0].values.tolist() == wanted.tolist()


class LateCopy:
    """A host copy whose bytes arrive when somebody waits for them: an instrumented stream and event."""

    def __init__(self):
        self.started, self.waited = [], 0

    def start(self, values):
        host = {group: torch.full_like(value, -1) for group, value in values.items()}
        self.started.append((values, host))
        return host, self

    def synchronize(self):
        self.waited += 1
        for values, host in self.started:
            for group, value in values.items():
                host[group].copy_(value)


@pytest.mark.req("PRO-3", "CON-6")
def test_only_the_finalizer_waits():
    cache = random_cache()
    copy = LateCopy()
    blocks = {0: GroupBlocks(0, 8, 0, (3, 5), 16)}
    pending = worker(cache, host_copy=copy).checksum("r", blocks)
    assert (len(copy.started), copy.waited) == (1, 0)
    assert (
        pending.finalise().groups[0].values.tolist()
        == worker(cache).checksum("r", blocks).finalise().groups[0].values.tolist()
    )
    assert copy.waited == 1
