"""What an engine says of where its caches lie: true of every byte, and believed only if it can be true."""

from __future__ import annotations

import ctypes
import json
from itertools import product

import numpy as np
import pytest
import torch

from engine.cache import GroupShape
from engine.config import EngineConfig, preset
from engine.connectors.nixl_memory import GroupCaches, Peer, PeerError
from engine.ranks import Ranks
from engine.seams import Seams

SHAPES = [
    *((model, {}) for model in ("tiny", "tiny-window", "tiny-mla", "tiny-indexed", "tiny-hybrid", "tiny-skips")),
    ("tiny", {"layout": "NHD"}),
    ("tiny", {"kernel_block_splits": 2}),
    ("tiny", {"tp_size": 2, "pp_size": 2, "layout": "NHD", "kernel_block_splits": 2}),
    ("tiny", {"tp_size": 4}),
    ("tiny-mla", {"tp_size": 2}),
    ("tiny-hybrid", {"tp_size": 2, "pp_size": 2}),
    ("tiny-skips", {"tp_size": 2, "layout": "NHD"}),
]


def memory_of(model="tiny", **options):
    config = EngineConfig("E", **{"model": preset(model), "num_blocks": 8, "block_size": 8} | options)
    return Ranks(config, Seams()).memory


@pytest.mark.parametrize(("model", "options"), SHAPES)
def test_addresses_lead_to_the_bytes_that_the_engine_sees(model, options):
    memory = memory_of(model, **options)
    rng = np.random.default_rng(0)
    for group, described in zip(memory.groups, Peer.of("E", "agent", memory).groups, strict=True):
        step = group.kernel_block_size
        places = product(
            range(group.num_layers), range(group.num_kv_heads), range(group.num_replicas), range(group.num_parts)
        )
        for layer, head, replica, part in places:
            for block, slot in ((0, 0), (3, group.block_size - step), (group.num_blocks - 1, 0)):
                region = group.region(layer, block, part, head, slot, step, replica).view(torch.uint8)
                region.copy_(torch.from_numpy(rng.integers(0, 256, region.shape, dtype=np.uint8)))
                runs = described.runs(layer, block, part, head, replica, slot, step)
                assert b"".join(ctypes.string_at(*run) for run in runs) == region.numpy().tobytes()


@pytest.mark.parametrize(("model", "options"), SHAPES)
def test_a_description_is_written_down_and_read_again(model, options):
    mine = Peer.of("E", "agent", memory_of(model, **options))
    plain = json.loads(json.dumps(mine.to_plain()))
    assert Peer.from_plain("E", "agent", plain) == mine
    assert mine.differs_from(mine) is None


def test_what_no_rank_holds_has_no_address():
    described = Peer.of("E", "agent", memory_of()).groups[0]
    for layer, head, replica in ((2, 0, 0), (0, 2, 0), (0, 0, 1)):
        with pytest.raises(PeerError, match=f"layer {layer}, head {head}, replica {replica}"):
            described.runs(layer, 0, 0, head, replica, 0, 1)


def described(**options):
    return Peer.of("E", "agent", memory_of(**options)).to_plain()


ODD = [0, -1, True, 1.5, "2", None, [], 2**70]
SHAPE_NAMES = list(GroupShape.__dataclass_fields__)
WRONG_GROUPS = [
    *({name: value} for name in SHAPE_NAMES for value in ODD),
    *({"ranks": value} for value in (None, [], {}, [None], [1], [[]], [{}])),
    {"num_kv_heads": 4},
    {"num_layers": 1},
    {"num_replicas": 2},
    {"kernel_block_size": 3},
    {"num_parts": 7},
    {"memory": "FILE"},
    {"memory": None},
    {"device": -1},
    {"device": "0"},
]
WRONG_RANKS = [
    *(
        {name: v}
        for name in ("bases", "strides")
        for v in (None, [], [1], ["a"] * 4, [True] * 2, [-1] * 2, [2**64] * 2)
    ),
    *({name: v} for name in ("rows", "heads") for v in (None, [], [0], [0, 3], [1, 1], [-1, 2], ["0", 2], [0, 2, 2])),
    {"strides": [1, 2, 3, -4]},
    {"rows": [0, 1], "bases": [4096]},
    {"heads": [0, 1]},
    {"replica": 1},
    {"replica": -1},
    {"replica": None},
]


@pytest.mark.parametrize("wrong", WRONG_GROUPS)
def test_a_group_that_cannot_be(wrong):
    plain = described()["groups"][0]
    with pytest.raises((ValueError, KeyError, TypeError)):
        GroupCaches.from_plain(plain | wrong)


@pytest.mark.parametrize("wrong", WRONG_RANKS)
def test_a_rank_that_cannot_be(wrong):
    plain = described()["groups"][0]
    with pytest.raises((ValueError, KeyError, TypeError)):
        GroupCaches.from_plain(plain | {"ranks": [plain["ranks"][0] | wrong]})


@pytest.mark.parametrize("name", [*SHAPE_NAMES, "ranks", "memory", "device"])
def test_a_group_that_leaves_something_out(name):
    plain = described()["groups"][0]
    with pytest.raises(KeyError):
        GroupCaches.from_plain({key: value for key, value in plain.items() if key != name})


@pytest.mark.parametrize("name", ["rows", "heads", "replica", "bases", "strides"])
def test_a_rank_that_leaves_something_out(name):
    plain = described()["groups"][0]
    rank = {key: value for key, value in plain["ranks"][0].items() if key != name}
    with pytest.raises(KeyError):
        GroupCaches.from_plain(plain | {"ranks": [rank]})


@pytest.mark.parametrize("groups", [None, [], {}, [1], [None]])
def test_groups_that_cannot_be(groups):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Peer.from_plain("E", "agent", {"groups": groups})


def test_two_ranks_that_hold_the_same():
    """As many caches and heads as there are, but one twice and one not at all."""
    plain = described(tp_size=2)["groups"][0]
    first, second = plain["ranks"]
    GroupCaches.from_plain(plain)
    with pytest.raises(ValueError, match="once"):
        GroupCaches.from_plain(plain | {"ranks": [first, second | {"heads": first["heads"]}]})


def test_more_ranks_than_any_engine_has():
    plain = described()["groups"][0]
    with pytest.raises(ValueError, match="ranks"):
        GroupCaches.from_plain(plain | {"ranks": plain["ranks"] * 1000})


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("tiny-window", "2 KV cache groups"),
        ("tiny-shared", None),
        ("small", "num_layers 4"),
        ("tiny-mla", "num_kv_heads"),
    ],
)
def test_engines_that_keep_other_kv(model, what):
    mine = Peer.of("D", "agent", memory_of())
    difference = Peer.of("P", "agent", memory_of(model)).differs_from(mine)
    assert difference is None if what is None else what in difference


def test_ranks_layouts_and_block_sizes_may_differ():
    mine = Peer.of("D", "agent", memory_of())
    other = memory_of(tp_size=4, pp_size=2, layout="NHD", block_size=16, kernel_block_splits=2, num_blocks=5)
    assert Peer.of("P", "agent", other).differs_from(mine) is None
