"""A small cache, a load in it, and a way to arm a fault on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvchaos_vllm_faults.blocks import Blocks
from kvchaos_vllm_faults.evidence import Evidence
from kvchaos_vllm_faults.faults import Fault, Order, make
from kvchaos_vllm_faults.memory import CacheShape, EngineMemory

BLOCK_SIZE, NUM_BLOCKS = 8, 12


@pytest.fixture
def memory() -> EngineMemory:
    generator = torch.Generator().manual_seed(3)
    caches = {
        f"model.layers.{n}.attn": torch.randn((NUM_BLOCKS, 2, BLOCK_SIZE, 8), generator=generator) for n in range(3)
    }
    return EngineMemory(caches, CacheShape(NUM_BLOCKS, BLOCK_SIZE, 2, 4))


@pytest.fixture
def load() -> Blocks:
    """29 tokens in four blocks, of which the first is a local prefix."""
    return Blocks(1, (7, 3, 9), BLOCK_SIZE, 29)


@pytest.fixture
def evidence() -> list[Evidence]:
    return []


@pytest.fixture
def arm(evidence: list[Evidence]) -> Callable[..., Fault]:
    def make_fault(kind: str, at: str, *, seed: int = 1, **more: Any) -> Fault:
        order = {key: more.pop(key) for key in ("held", "other") if key in more}
        return make(Order(kind, "r2", at, more, seed, **order), evidence.append)

    return make_fault
