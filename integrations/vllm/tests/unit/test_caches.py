"""Which groups can be checksummed and how caches are read, with stand-ins for vLLM's specs and layers (DEF-4, FPR)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvchaos_vllm.caches import CannotChecksum, Ranks, by_cache, group_shapes, heads_of, summed_groups, why_skipped
from kvchaos_vllm.definition import block_checksums
from kvchaos_vllm.fingerprint import fingerprint
from kvchaos_vllm.records import GroupBlocks

ONE = Ranks(0, 1, 0, 2)


class Quant(IntEnum):
    NONE = 0
    FP8 = 1
    INT4 = 4


@dataclass
class FullAttentionSpec:
    """What is read of vLLM's spec of that name."""

    block_size: int = 4
    num_kv_heads: int = 2
    head_size: int = 4
    head_size_v: int = 4
    dtype: torch.dtype = torch.float32
    kv_quant_mode: Quant = Quant.NONE
    num_head_slots: int | None = None
    tokens_per_state: Any = 1
    max_tp_shards: int | None = None


@dataclass
class MambaSpec:
    block_size: int = 4


@dataclass
class Several:
    kv_cache_specs: dict[str, Any]
    block_size: int = 4


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)
    host_resident: bool = False


def config(*groups, transferred=None):
    ids = tuple(range(len(groups))) if transferred is None else transferred
    return SimpleNamespace(kv_cache_groups=list(groups), transfer_group_ids=ids)


def names(*numbers):
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


def caches_of(layer_names, heads=2, tokens=4, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, heads, tokens, width, generator=generator) for name in layer_names}


def layer(backend="FlashAttentionBackend", write=None, shares=None):
    made = SimpleNamespace(kv_sharing_target_layer_name=shares, isa="vec")
    made.get_attn_backend = lambda: type(backend, (), {})
    made.impl = SimpleNamespace(do_kv_cache_update=lambda _, key, value, cache, slots: write(key, value, cache))
    return made


def columns(key, value, cache):
    flat = cache.view(-1)
    flat[: flat.numel() // 2] = key[:, 0].T.reshape(-1)
    flat[flat.numel() // 2 :] = value[:, 0].reshape(-1)


def summed(group, caches, layers=None, ranks=ONE):
    return summed_groups(config(group), caches, layers or {name: layer() for name in caches}, ranks)


# ---- what is left out


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (Group(names(0), MambaSpec()), r"no KV blocks of tokens \(MambaSpec\)"),
        (Group(names(0), FullAttentionSpec(tokens_per_state=4)), "compressed: a state for 4 tokens"),
        (Group(names(0), FullAttentionSpec(num_head_slots=1)), "2 KV heads are packed into 1 head slots"),
        (Group(names(0), FullAttentionSpec(kv_quant_mode=Quant.INT4)), r"not known \(INT4\)"),
        (Group(names(0), host_resident=True), "host-resident"),
        (Group(["model.embed"]), "model.embed holds no single layer number"),
        (Group(["layers.1.block.2"]), "layers.1.block.2 holds no single layer number"),
        (Group(names(0, 1), Several({names(0)[0]: FullAttentionSpec(), names(1)[0]: MambaSpec()})), "MambaSpec"),
    ],
)
def test_a_kind_that_is_left_out_is_logged_at_start_and_the_others_are_not(group, why, caplog):
    with caplog.at_level(logging.WARNING):
        shapes = group_shapes(config(Group(names(7)), group), {})
    assert [shape.group_id for shape in shapes] == [0]
    assert "KV cache group 1 is not checksummed: " in caplog.text
    assert why_skipped(group) is not None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(why_skipped(group))


def test_groups_that_are_not_transferred_are_not_there():
    two = config(Group(names(0)), Group(names(1)), transferred=(1,))
    assert [(shape.group_id, shape.window) for shape in group_shapes(two, {1: 6})] == [(1, 6)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"backend": "RocmShuffledBackend"}, "how RocmShuffledBackend lays out tokens in a block is not known"),
        ({"backend": "CPUAttentionBackend", "write": lambda *_: None}, "in a place of its own"),
    ],
)
def test_a_backend_that_is_not_known_leaves_its_group_out(change, why, caplog):
    with caplog.at_level(logging.WARNING):
        assert summed(Group(names(0)), caches_of(names(0)), {names(0)[0]: layer(**change)}) == {}
    assert why in caplog.text


@pytest.mark.parametrize(
    ("caches", "why"),
    [
        (caches_of(names(0), width=3), "3 elements of torch.float32 a token and head are not whole 8-byte pieces"),
        (caches_of(names(0), tokens=3), "kernel blocks of 3 tokens do not tile blocks of 4"),
    ],
)
def test_a_cache_that_is_no_whole_pieces_or_blocks_leaves_its_group_out(caches, why, caplog):
    with caplog.at_level(logging.WARNING):
        assert summed(Group(names(0)), caches) == {}
    assert why in caplog.text


def test_two_caches_of_one_layer_leave_their_group_out(caplog):
    two = ["layers.3.attn", "layers.3.indexer"]
    with caplog.at_level(logging.WARNING):
        assert summed(Group(two), caches_of(two)) == {}
    assert "two of its caches have one layer number" in caplog.text


def test_a_layer_that_is_not_there_to_be_asked_leaves_its_group_out(caplog):
    with caplog.at_level(logging.WARNING):
        assert summed_groups(config(Group(names(0))), caches_of(names(0)), {}, ONE) == {}
    assert "has no attention layer that could be asked" in caplog.text


# ---- what is summed


@pytest.mark.parametrize("backend", ["FlashAttentionBackend", "CPUAttentionBackend"])
def test_the_sums_are_the_definition_s_whatever_the_backend_s_layout(backend):
    """The same K and V, stored by a backend in rows and by one in columns, have the same checksums."""
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(2, 6, 2, 4, 8, generator=generator)  # [layers, blocks, heads, tokens, K and V]
    caches = {}
    for number, name in enumerate(names(2, 5)):
        cache = torch.zeros(6, 2, 4, 8)
        for block in range(6):
            for head in range(2):
                key, value = kv[number, block, head, :, None, :4], kv[number, block, head, :, None, 4:]
                if backend == "CPUAttentionBackend":
                    columns(key, value, cache[block, head])
                else:
                    cache[block, head] = torch.cat([key[:, 0], value[:, 0]], dim=1)
        caches[name] = cache
    layers = {name: layer(backend, columns) for name in caches}
    group = summed(Group(names(2, 5)), caches, layers)[0]
    blocks = GroupBlocks(0, 4, 1, (4, 2), 10)
    as_bytes = torch.cat([kv[:, block] for block in blocks.block_ids], dim=2).view(torch.uint8).numpy()
    expected = block_checksums(as_bytes, [2, 5], 0, 4, 4, 10)
    assert group.sums(blocks).numpy().view(np.uint64).tolist() == expected.tolist()


def test_the_fingerprint_is_of_names_kinds_and_types():
    group = summed(Group(names(0, 1)), caches_of(names(0, 1)))[0]
    assert group.fingerprint == fingerprint((name, "FullAttentionSpec", "float32") for name in names(0, 1))


def test_layers_that_share_a_cache_count_once_under_the_lowest_number_and_all_in_the_fingerprint():
    caches = caches_of(names(1, 4))
    caches[names(3)[0]] = caches[names(1)[0]]
    caches[names(0)[0]] = caches[names(4)[0]]
    layers = {name: layer() for name in caches}
    # The layer that shares cannot be asked: only the one that owns the cache writes it.
    layers[names(0)[0]] = layer("UnknownBackend", shares=names(4)[0])
    group = summed(Group(names(0, 1, 3, 4)), caches, layers)[0]
    assert [cached.layer_number for cached in group.layers] == [0, 1]
    assert group.fingerprint == fingerprint((name, "FullAttentionSpec", "float32") for name in names(0, 1, 3, 4))
    assert [number for number, _ in by_cache(caches, caches)] == [0, 1]


def test_views_into_one_storage_are_caches_of_their_own():
    whole = torch.zeros(6, 2, 2, 4, 8)
    caches = {name: whole[:, row] for row, name in enumerate(names(0, 1))}
    assert [number for number, _ in by_cache(caches, caches)] == [0, 1]


def test_a_stage_without_a_layer_of_a_group_has_it_nevertheless():
    groups = config(Group(names(0)), Group(names(9)))
    caches = caches_of(names(0))
    found = summed_groups(groups, caches, {name: layer() for name in caches}, ONE)
    assert [len(found[g].layers) for g in (0, 1)] == [1, 0]
    assert found[1].fingerprint == 0


# ---- heads across TP


@pytest.mark.parametrize(
    ("tp", "total", "per_rank", "shards", "expected"),
    [
        (1, 8, 8, None, [(0, 0, 1)]),
        (2, 8, 4, None, [(0, 0, 1), (4, 0, 1)]),
        (4, 2, 1, None, [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]),
        (2, 1, 1, None, [(0, 0, 2), (0, 1, 2)]),
        (2, 128, 1, 1, [(0, 0, 2), (0, 1, 2)]),
        (2, 128, 4, 8, [(0, 0, 1), (4, 0, 1)]),
    ],
    ids=["one rank", "split", "replicated in pairs", "one head", "a latent", "its own shards"],
)
def test_heads_are_numbered_over_the_unsharded_model(tp, total, per_rank, shards, expected):
    spec = FullAttentionSpec(num_kv_heads=per_rank, max_tp_shards=shards)
    assert [heads_of(spec, Ranks(rank, tp, 0, total)) for rank in range(tp)] == expected


@pytest.mark.parametrize(("tp", "total", "per_rank"), [(2, 8, 8), (3, 2, 1), (4, 6, 1)])
def test_heads_that_are_spread_in_another_way_leave_their_group_out(tp, total, per_rank):
    with pytest.raises(CannotChecksum):
        heads_of(FullAttentionSpec(num_kv_heads=per_rank), Ranks(0, tp, 0, total))
