"""Which caches a model keeps, in which groups, and which layer uses which."""

from dataclasses import asdict, replace

import pytest

from engine.config import PRESETS, EngineConfig
from engine.errors import StartupError
from engine.groups import CachePlace, cache_places, kv_groups
from engine.presets import ModelConfig

NAMES = {
    "tiny": [("full_attention", [(0,), (1,)], 2, 2, 16)],
    "tiny-window": [("full_attention", [(0,), (2,)], 2, 2, 16), ("sliding_window", [(1,), (3,)], 2, 2, 16)],
    "tiny-shared": [("full_attention", [(0, 1), (2, 3)], 2, 2, 16)],
    "tiny-mla": [("mla", [(0,), (1,)], 1, 1, 48)],
    "tiny-indexed": [("mla", [(0,), (0,), (1,), (1,)], 1, 1, 48)],
    "tiny-hybrid": [("mamba", [(0,), (2,)], 4, 1, 128), ("full_attention", [(1,), (3,)], 2, 2, 16)],
    "tiny-skips": [
        ("full_attention", [(0,), (2,)], 2, 2, 16),
        ("full_attention", [(1,)], 2, 2, 16),
        ("full_attention", [(3,)], 2, 2, 16),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_the_groups_of_a_model(name):
    groups = kv_groups(PRESETS[name])
    assert [group.group_id for group in groups] == list(range(len(groups)))
    assert [(g.spec_type, [row.layers for row in g.rows], g.num_heads, g.num_parts, g.width) for g in groups] == NAMES[
        name
    ]


def test_what_sets_groups_of_one_kind_apart():
    skips = kv_groups(PRESETS["tiny-skips"])
    assert [(g.host_resident, g.packed_heads) for g in skips] == [(False, False), (True, False), (False, True)]
    assert [g.window for g in kv_groups(PRESETS["tiny-window"])] == [None, 24]


@pytest.mark.req("FPR-3")
def test_a_cache_is_named_after_every_layer_that_uses_it():
    (group,) = kv_groups(PRESETS["tiny-shared"])
    assert [row.names for row in group.rows] == [
        ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"),
        ("model.layers.2.self_attn.attn", "model.layers.3.self_attn.attn"),
    ]
    assert cache_places(PRESETS["tiny-shared"]) == (
        (CachePlace(0, 0, writes=True),),
        (CachePlace(0, 0, writes=False),),
        (CachePlace(0, 1, writes=True),),
        (CachePlace(0, 1, writes=False),),
    )


@pytest.mark.req("EXT-9")
def test_a_layer_with_an_indexer_has_two_caches_in_one_group():
    assert cache_places(PRESETS["tiny-indexed"])[1] == (CachePlace(0, 2, True), CachePlace(0, 3, True))
    names = [row.names[0] for row in kv_groups(PRESETS["tiny-indexed"])[0].rows]
    assert names[:2] == ["model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache"]


def test_an_unknown_kind_of_layer_is_an_error():
    with pytest.raises(ValueError, match="odd: there is no kind of layer 'holographic'"):
        kv_groups(ModelConfig("odd", 1, 64, 4, 2, 16, 128, ("holographic",)))


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_survives_json(name):
    plain = asdict(PRESETS[name])
    assert ModelConfig.from_plain(plain | {"layers": list(plain["layers"])}) == PRESETS[name]


def test_shared_kv_must_be_in_the_same_stage():
    apart = replace(PRESETS["tiny-shared"], layers=("full", "full", "shared:0", "shared:1"))
    with pytest.raises(StartupError, match="layer 2 of tiny-shared would be in another stage than the KV it shares"):
        EngineConfig("e", apart, pp_size=2)
    EngineConfig("e", PRESETS["tiny-shared"], pp_size=2)


@pytest.mark.parametrize(("name", "tokens"), [("tiny", 144), ("tiny-window", 64), ("tiny-hybrid", 128)])
def test_a_pool_is_shared_by_the_groups(name, tokens):
    assert EngineConfig("e", PRESETS[name], num_blocks=10).capacity == tokens
