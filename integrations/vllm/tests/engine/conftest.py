"""Pairs of real vLLM engines, started once a module and shared by its tests. Needs vLLM: `make vllm-env`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from roles import BLOCK, Engine, checksum_transfer, meet


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Starts an engine without waiting for it; all are stopped at the module's end."""
    logs, engines = tmp_path_factory.mktemp("logs"), []

    def start_one(name: str, **changes: Any) -> Engine:
        engine = Engine(name, changes.pop("model", model), logs / f"{name}-{len(engines)}.log", **changes)
        engines.append(engine)
        return engine

    yield start_one
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def pair(start: Callable[..., Engine]) -> Callable[..., tuple[Engine, Engine]]:
    """Starts a producer and a consumer side by side, with settings of the checksums of each."""

    def start_pair(p: dict[str, Any], d: dict[str, Any], **changes: Any) -> tuple[Engine, Engine]:
        d_changes = {name[2:]: changes.pop(name) for name in list(changes) if name.startswith("d_")}
        roles = {"role": "kv_producer"} | p, {"role": "kv_consumer"} | d
        producer = start("p", kv_transfer_config=checksum_transfer(**roles[0]), **changes)
        consumer = start("d", kv_transfer_config=checksum_transfer(**roles[1]), **(changes | d_changes))
        for engine in (producer, consumer):
            assert engine.wait_until_ready().refused is None, engine.refused
        meet(producer, consumer)
        return producer, consumer

    return start_pair


@pytest.fixture
def prompts() -> Callable[..., list[list[int]]]:
    """Random prompts: so many, of lengths in a range, from a seed."""

    def make(count: int, shortest: int = 5, longest: int = 6 * BLOCK, seed: int = 1) -> list[list[int]]:
        chosen = random.Random(seed)
        return [[chosen.randrange(3, 512) for _ in range(chosen.randint(shortest, longest))] for _ in range(count)]

    return make
