"""The memory of an engine in another process, beside that of an engine in this one: both answer alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.cache import KVMemory, SlotChange
from engine.checksum.records import GroupBlocks
from engine.config import EngineConfig, preset
from engine.ranks import Ranks
from engine.seams import Seams
from harness.remote.codec import MemoryOf, pack, unpack
from harness.remote.engine_side import RemoteSeams
from harness.remote.harness_side import RemoteMemory

SHAPES: list[dict[str, Any]] = [
    {},
    {"tp_size": 2, "pp_size": 2, "layout": "NHD"},
    {"tp_size": 4, "kernel_block_splits": 2},
    {"model": preset("tiny-mla"), "tp_size": 2},
    {"model": preset("tiny-window")},
    {"model": preset("tiny-hybrid"), "tp_size": 2},
]


class Link:
    """Everything that is said goes through the codec, as between processes."""

    engine = "P"

    def __init__(self, memory: KVMemory) -> None:
        self._engine = RemoteSeams("P")
        self._engine.serve(memory, {})

    def call(self, name: str, *arguments: Any) -> Any:
        heard = unpack(pack([name, *arguments], lambda value: None), MemoryOf)
        answer = self._engine._run(heard[0], heard[1:])
        status, value = unpack(pack(answer, lambda value: None), MemoryOf)
        assert status == "ok", value
        return value


def both(**options: Any) -> tuple[KVMemory, RemoteMemory]:
    memory = Ranks(EngineConfig("P", **{"num_blocks": 8, "block_size": 8} | options), Seams()).memory
    return memory, RemoteMemory.of_engine(Link(memory))  # type: ignore[arg-type]


NAMES = (
    *("group_id", "num_groups", "num_layers", "num_kv_heads", "num_parts", "num_replicas", "num_blocks"),
    *("block_size", "kernel_block_size", "bytes_per_token", "factors", "spec"),
)


@pytest.mark.parametrize("options", SHAPES)
def test_it_has_the_same_shape(options: dict[str, Any]) -> None:
    memory, remote = both(**options)
    assert len(remote.groups) == len(memory.groups)
    for near, far in zip(memory.groups, remote.groups, strict=True):
        assert {name: getattr(far, name) for name in NAMES} == {name: getattr(near, name) for name in NAMES}


@pytest.mark.parametrize("options", SHAPES)
def test_what_is_written_is_read_in_every_group_and_replica(options: dict[str, Any]) -> None:
    memory, remote = both(**options)
    told: dict[str, list[SlotChange]] = {"near": [], "far": []}
    memory.watch(told["near"].append)
    remote.watch(told["far"].append)
    rng = np.random.default_rng(0)
    for near, far in zip(memory.groups, remote.groups, strict=True):
        far.fill((2, 3), b"poisoned")
        layer, head, slot = near.num_layers - 1, near.num_kv_heads - 1, near.block_size - 1
        far.write_slot(layer, head, 3, slot, rng.integers(0, 256, near.bytes_per_token, dtype=np.uint8))
        last = far.replicas[-1]
        last.write_slot(0, 0, 2, 0, rng.integers(0, 256, near.bytes_per_token, dtype=np.uint8))
        for one, other in zip(near.replicas, far.replicas, strict=True):
            assert (one.slots((1, 2, 3)) == other.slots((1, 2, 3))).all()
        assert near.slots((3,)).any()
        blocks = GroupBlocks(near.group_id, near.block_size, 0, (2, 3), near.block_size + 1)
        assert (near.tokens(blocks) == far.tokens(blocks)).all()
    # Every slot that was changed, as the engine's own memory tells of it; the order is nobody's concern.
    assert sorted(told["far"]) == sorted(told["near"])


def test_one_replica_alone_is_changed() -> None:
    memory, remote = both(model=preset("tiny-mla"), tp_size=2)
    remote.replica(1).fill((2,), b"poisoned")
    assert not memory.replica(0).slots((2,)).any()
    assert memory.replica(1).slots((2,)).any()


@pytest.mark.parametrize("number", [-1, 2])
def test_groups_and_replicas_that_are_not_there(number: int) -> None:
    memory, remote = both(model=preset("tiny-window"))
    for one in (memory, remote):
        with pytest.raises(ValueError, match=f"group {number}: the engine has 2"):
            one.group(number)
        with pytest.raises(ValueError, match=f"replica {number}: each head has 1"):
            one.replica(number)
