"""What version 2 costs beside version 1: bytes of the payload, time to write and read it, time to sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.checksum.hardened import bound, prompt_binding, unbound
from engine.checksum.payload import HARDENED, Payload, PayloadGroup, PayloadLimits, decode, encode
from harness.bench.contenders import BLOCK_BYTES, BLOCK_TOKENS, HEAD_DIM, HEADS
from harness.bench.timing import medians
from kernels import cpu_path, torch_path
from kernels.torch_path import VERSIONS, LayerCache

REPEATS = 9


@dataclass(frozen=True, slots=True)
class Cost:
    """One figure of both versions; `unit` is characters, or ms of this thread's CPU time (median, interleaved)."""

    what: str
    unit: str
    version_1: float
    version_2: float


def measure(num_tokens: int = 131_072, megabytes: int = 64, repeats: int = REPEATS) -> list[Cost]:
    """Measure a payload of that many tokens in blocks of 16, and sums of so many MiB of paged cache, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*_payload_costs(num_tokens, repeats), *_sum_costs(megabytes, repeats)]
    finally:
        torch.set_num_threads(before)


def _payload_costs(num_tokens: int, repeats: int) -> list[Cost]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 2**17, num_tokens).tolist()
    values = rng.integers(0, 2**64, -(-num_tokens // BLOCK_TOKENS), dtype=np.uint64)
    first = Payload(1, num_tokens, (PayloadGroup(0, 2**63, BLOCK_TOKENS, 0, values),))
    second = Payload(1, num_tokens, first.groups, HARDENED)
    limits = PayloadLimits.for_engine(num_tokens, (BLOCK_TOKENS,))

    def send() -> str:
        return encode(bound(second, prompt_binding(prompt)))

    texts = {"1": encode(first), "2": send()}
    took = medians(
        {
            "encode 1": lambda: encode(first),
            "encode 2": send,
            "decode 1": lambda: decode(texts["1"], limits),
            "decode 2": lambda: unbound(decode(texts["2"], limits), prompt),
        },
        repeats,
    )
    size = Cost(f"kv_checksums of {num_tokens:,} tokens", "characters", len(texts["1"]), len(texts["2"]))
    return [size, *(_milliseconds(f"{what} it", what, took) for what in ("encode", "decode"))]


def _sum_costs(megabytes: int, repeats: int) -> Iterator[Cost]:
    blocks = megabytes * 2**20 // BLOCK_BYTES
    shape = (blocks, BLOCK_TOKENS, HEADS, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    parts = tuple(torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator) for _ in range(2))
    # In random order, as a request has its blocks: in ascending order memory is all that either version waits for.
    layers, ids = [LayerCache(0, 0, parts)], np.random.default_rng(0).permutation(blocks).tolist()
    how = {"block_size": BLOCK_TOKENS, "start": 0, "num_tokens": blocks * BLOCK_TOKENS}
    jobs: dict[str, Callable[[], object]] = {
        f"{name} {version}": partial(path.block_checksums, layers, ids, **how, version=version)
        for name, path in (("torch", torch_path), ("cpu", cpu_path))
        for version in VERSIONS
    }
    took = medians(jobs, repeats)
    for name in ("torch", "cpu"):
        yield _milliseconds(f"sum {megabytes} MiB of paged cache, {name}", name, took)


def _milliseconds(what: str, job: str, took_s: dict[str, float]) -> Cost:
    return Cost(what, "ms", 1e3 * took_s[f"{job} 1"], 1e3 * took_s[f"{job} 2"])
