"""How the cost of checksums grows with a request's tokens and a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harness.bench.contenders import BLOCK_TOKENS, HEAD_DIM, HEADS
from harness.bench.timing import Job, medians
from kernels import paths
from kernels.torch_path import LayerCache

TOKENS = (256, 1024, 4096, 16_384)
LAYERS = (1, 2, 4, 8, 16)
TOKENS_OF_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Growth:
    """One request summed as an engine does it (`kernels.paths`): seconds a call (median)."""

    tokens: int
    layers: int
    seconds: float

    @property
    def size(self) -> int:
        """Bytes of KV: 8 heads of 128 in bf16."""
        return self.tokens * self.layers * 2 * HEADS * HEAD_DIM * 2


def measure_growth(rounds: int) -> tuple[Growth, ...]:
    """Requests of more and more tokens in one layer, then of 1,024 tokens in more and more layers."""
    shapes = [(tokens, 1) for tokens in TOKENS] + [(TOKENS_OF_LAYERS, layers) for layers in LAYERS[1:]]
    blocks = max(TOKENS) // BLOCK_TOKENS
    generator = torch.Generator().manual_seed(0)
    cache = torch.randint(0, 2**15, (blocks, 2, HEADS, BLOCK_TOKENS, HEAD_DIM), dtype=torch.int16, generator=generator)
    jobs = {f"{tokens} {layers}": _job(cache, tokens, layers) for tokens, layers in shapes}
    seconds = medians(jobs, rounds)
    return tuple(Growth(tokens, layers, seconds[f"{tokens} {layers}"]) for tokens, layers in shapes)


def _job(cache: torch.Tensor, tokens: int, layers: int) -> Job:
    """Layers are different blocks of one cache: no two share memory."""
    blocks = tokens // BLOCK_TOKENS
    ids = tuple(int(b) for b in np.random.default_rng(tokens).permutation(blocks))
    caches = []
    for layer in range(layers):
        parts = cache[layer * blocks : (layer + 1) * blocks].transpose(2, 3)
        caches.append(LayerCache(layer, 0, (parts[:, 0], parts[:, 1])))

    def job() -> torch.Tensor:
        return paths.block_checksums(caches, ids, block_size=BLOCK_TOKENS, start=0, num_tokens=tokens)

    return job
