"""Random KV, and a diagnosis of it: what all these tests begin and end with."""

from collections.abc import Callable

import numpy as np
import pytest

from harness.diagnosis import Diagnosis, KVBlocks, diagnose


@pytest.fixture(scope="session")
def random_kv() -> Callable[..., np.ndarray]:
    """uint8 [layers, heads, tokens, bytes a token]; another seed, other bytes."""

    def make(seed=0, layers=2, heads=2, tokens=200, size=64):
        return np.random.default_rng(seed).integers(0, 256, (layers, heads, tokens, size), dtype=np.uint8)

    return make


@pytest.fixture(scope="session")
def run() -> Callable[..., Diagnosis]:
    def run(p, d, block_size=16, *, first_token=0, producer_block_size=None, **others):
        producer = KVBlocks(p, producer_block_size or block_size)
        named = {name: KVBlocks(kv, block_size) for name, kv in others.items()}
        return diagnose(producer, KVBlocks(d, block_size, first_token), named)

    return run


@pytest.fixture(scope="session")
def best(run) -> Callable[..., tuple[str, str]]:
    """Kind and text of the first hypothesis, which must explain everything."""

    def best(*arguments, **options):
        first = run(*arguments, **options).hypotheses[0]
        assert first.explained == 1.0
        return first.kind, first.text

    return best
