"""The sums of every topology, on worker records alone: all are those of the unsharded definition, so all agree.

The full product of (TP, PP), layout, block size and kernel blocks, for a model whose heads are replicated at TP 4 and
for one whose are not. Nothing of an engine runs: random KV is put into the caches of all ranks.
"""

import itertools

import numpy as np
import pytest
import torch

from engine.cache import KVMemory
from engine.checksum.payload import Payload, PayloadGroup, fingerprint
from engine.checksum.records import GroupBlocks, WorldShape, merge_records
from engine.checksum.verdict import VerdictStatus, judge_load
from engine.config import PRESETS, EngineConfig
from engine.paged import PagedKVCache
from engine.sharding import shard_model
from engine.worker import Worker
from kernels.definition import block_checksums

WORLDS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
NUM_TOKENS = 75
TOPOLOGIES = list(itertools.product(WORLDS, ("HND", "NHD"), (8, 16, 32), (1, 2)))


def random_kv(model, seed=0):
    """uint8 [layers, heads, 96 tokens, bytes]."""
    shape = (model.num_layers, model.num_kv_heads, 96, 4 * model.head_dim)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def merged(model, kv, topology, received):
    """The sums of all workers of an engine that holds these KV."""
    (tp_size, pp_size), layout, block_size, splits = topology
    config = EngineConfig(
        "e", model, tp_size=tp_size, pp_size=pp_size, layout=layout, block_size=block_size, num_blocks=20,
        kernel_block_splits=splits,
    )  # fmt: skip
    workers = [Worker(config, shard) for stage in shard_model(model, tp_size, pp_size) for shard in stage]
    count = -(-NUM_TOKENS // block_size)
    blocks = GroupBlocks(0, block_size, 0, tuple(range(count + 3, 3, -1)), NUM_TOKENS)
    for worker in workers:
        fill(worker.caches[0], kv, blocks)
    memory = KVMemory(*(worker.caches[0] for worker in workers))
    assert all((replica.tokens(blocks) == kv[:, :, :NUM_TOKENS]).all() for replica in memory.replicas)
    records = [worker.checksums.checksum("r", {0: blocks}, received=received).finalise() for worker in workers]
    merge = merge_records({0: blocks}, records, WorldShape(tp_size, pp_size))
    assert (merge.missing, merge.other_blocks, merge.disputed, merge.skipped) == (False, set(), set(), set())
    return merge, blocks


def fill(cache: PagedKVCache, kv, blocks):
    """Whole blocks, straight into the tensors: [kernel block, K|V, slot, head, element]."""
    for index, layer in enumerate(cache.shard.layers):
        heads = kv[layer, cache.heads.start : cache.heads.stop]
        for position, block_id in enumerate(blocks.block_ids):
            first = position * blocks.block_size
            for kernel in range(cache.splits):
                start = first + kernel * cache.kernel_block_size
                tokens = heads[:, start : start + cache.kernel_block_size].copy()
                values = torch.from_numpy(tokens).view(cache.dtype)  # [heads, slots, K then V]
                parts = values.view(*values.shape[:2], 2, -1).permute(2, 1, 0, 3)
                cache.layers[index][block_id * cache.splits + kernel] = parts


@pytest.mark.req("DEF-1", "DEF-4", "DEF-7", "PRO-9", "CON-5", "FPR-1", "EXT-1", "EXT-2", "DEF-6")
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_all_are_those_of_the_definition_and_every_two_agree(name):
    model = PRESETS[name]
    kv = random_kv(model)
    layers = [(f"model.layers.{i}.self_attn.attn", "full_attention", "bfloat16") for i in range(model.num_layers)]
    sides = []
    for topology in TOPOLOGIES:
        block_size = topology[2]
        wanted = block_checksums(kv, range(model.num_layers), 0, block_size, 0, NUM_TOKENS)
        wanted = wanted[: -(-NUM_TOKENS // block_size)].tolist()
        merge, blocks = merged(model, kv, topology, received=True)
        group = merge.groups[0]
        tp_size = topology[0][0]
        assert group.values.tolist() == wanted, topology
        others = max(1, tp_size // model.num_kv_heads) - 1
        assert [replica.tolist() for replica in group.replicas] == [wanted] * others
        assert group.fingerprint == fingerprint(layers), topology
        sides.append((Payload(tp_size, NUM_TOKENS, (_sent(group),)), merge, blocks))
    for (payload, _, _), (_, merge, blocks) in itertools.product(sides, sides):
        verdict = judge_load(payload, {0: blocks}, merge, compare_block_sizes=True)
        assert (verdict.status, verdict.groups[0].not_compared) == (VerdictStatus.VERIFIED, ())


def _sent(group):
    return PayloadGroup(0, group.fingerprint, group.blocks.block_size, group.blocks.start, group.values)


@pytest.mark.req("EXT-1", "PRO-9")
def test_p_sends_the_sums_of_replica_0():
    model = PRESETS["tiny"]
    kv = random_kv(model)
    merge, _ = merged(model, kv, ((4, 1), "HND", 16, 1), received=False)
    wanted = block_checksums(kv, range(model.num_layers), 0, 16, 0, NUM_TOKENS)[:5]
    assert merge.groups[0].values.tolist() == wanted.tolist()
    assert merge.groups[0].replicas == ()
    assert merge.unchecked_replicas == {0}, "which is no trouble for P"
