"""Bytes that an engine told of, read as oracles read an engine's memory."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from engine.checksum.records import GroupBlocks
from engine.checksum.verdict import VerdictStatus
from harness.oracles.kv_bytes import grid_sums
from harness.targets.vllm.moments import read_verdict
from harness.targets.vllm.snapshot import SnapshotMemory, read_snapshot
from kernels.definition import block_checksums

BLOCKS = GroupBlocks(0, 4, 1, (7, 3, 9), 14)


@pytest.fixture
def kv() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (2, 3, 12, 16), dtype=np.uint8)


@pytest.fixture
def memory(kv: np.ndarray) -> SnapshotMemory:
    return SnapshotMemory(BLOCKS, kv, (0, 5))


def test_tokens_are_those_of_the_blocks_as_far_as_they_count(memory: SnapshotMemory, kv: np.ndarray) -> None:
    assert (memory.tokens(BLOCKS) == kv[:, :, :10]).all()
    assert (memory.slots((9, 7)) == np.concatenate((kv[:, :, 8:], kv[:, :, :4]), axis=2)).all()


def test_it_holds_no_other_blocks_and_groups(memory: SnapshotMemory) -> None:
    with pytest.raises(ValueError, match="not in"):
        memory.slots((8,))
    with pytest.raises(ValueError, match="group 1"):
        memory.group(1)
    assert memory.group(0).replicas == [memory]


def test_its_factors_are_the_numbers_of_the_layers(memory: SnapshotMemory, kv: np.ndarray) -> None:
    """Known gaps are predicted from sums with these."""
    sums = grid_sums(memory.tokens(BLOCKS), memory.factors, 4, 4)
    padded = np.pad(kv[:, :, :10], ((0, 0), (0, 0), (0, 2), (0, 0)))
    wanted = block_checksums(padded, [0, 5], 0, 4, 4, 14)
    assert sums == [f"{int(value):016x}" for value in wanted]


def test_what_an_engine_tells_is_read_back(kv: np.ndarray) -> None:
    told = {
        "start": 1, "block_ids": [7, 3, 9], "block_size": 4, "num_tokens": 14, "layers": 2, "heads": 3,
        "layer_numbers": [0, 5], "element_bytes": 2, "kv": base64.b64encode(kv.tobytes()).decode(),
    }  # fmt: skip
    blocks, memory = read_snapshot(told)
    assert blocks == BLOCKS
    assert memory is not None
    assert (memory.slots(BLOCKS.block_ids) == kv).all()
    assert memory.spec.element_bytes == 2
    del told["kv"]
    assert read_snapshot(told) == (BLOCKS, None)


def test_a_verdict_of_the_protection_is_read_in_full() -> None:
    group = {
        "group_id": 0,
        "status": "unverified",
        "reason": "one_side_only",
        "loaded": [1, 2],
        "compared": [],
        "differing": [],
    }
    verdict = read_verdict({"status": "unverified", "reason": "one_side_only", "groups": [group]})
    assert verdict.status is VerdictStatus.UNVERIFIED
    assert verdict.groups[0].not_compared == (1, 2)
    with pytest.raises(ValueError, match="maybe"):
        read_verdict({"status": "maybe", "reason": None, "groups": []})
