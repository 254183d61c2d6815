"""What the bench compares: our paths, what memory allows, and the hashes that one would use instead.

Everybody works on the same bytes: one flat buffer, or the slices of a paged cache. A hash of flat buffers cannot read
a paged cache, so it is given what is gathered first, as an engine would have to.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harness.bench.timing import Job
from kernels import definition, paths, torch_path
from kernels.torch_path import LayerCache

HEADS = 8
HEAD_DIM = 128
BLOCK_TOKENS = 16
TOKEN_BYTES = 2 * HEAD_DIM
"""Of K or V of one head, in bf16."""
BLOCK_BYTES = 2 * HEADS * BLOCK_TOKENS * TOKEN_BYTES
LAYOUTS = ("HND", "NHD")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to go over the bytes: what to call, or why it is not here."""

    name: str
    job: Job | None
    missing: str = ""


def flat_contenders(buffer: Bytes) -> Iterator[Contender]:
    """Everybody, on one buffer. Our paths take it as one block of one head, a latent cache of 256 bytes a token."""
    target = np.empty_like(buffer)
    pieces = buffer.view(np.uint64)
    yield Contender("np.sum", lambda: pieces.sum())
    yield Contender("memcpy", lambda: np.copyto(target, buffer))
    tokens = len(buffer) // TOKEN_BYTES
    cache = torch.from_numpy(buffer).view(torch.bfloat16).view(1, tokens, 1, HEAD_DIM)
    yield from _ours(LayerCache(0, 0, (cache,)), np.zeros(1, dtype=np.int64), tokens)
    kv = buffer.reshape(1, 1, tokens, TOKEN_BYTES)
    yield Contender("definition", lambda: definition.block_checksums(kv, [0], 0, tokens, 0, tokens))
    for name, function, missing in _hashes():
        yield Contender(name, None if function is None else _bound(function, buffer), missing)


def paged_contenders(buffer: Bytes, layout: str, seed: int = 0) -> Iterator[Contender]:
    """Everybody, on the same bytes as the K and V of 8 heads in blocks of 16 tokens, which a request has in any order.

    Args:
        buffer: uint8, whole blocks.
        layout: `HND` or `NHD`, K and V of a block beside each other.
        seed: of the order of blocks.
    """
    blocks = len(buffer) // BLOCK_BYTES
    ids = np.random.default_rng(seed).permutation(blocks).astype(np.int64)
    shape = (HEADS, BLOCK_TOKENS) if layout == "HND" else (BLOCK_TOKENS, HEADS)
    cache = torch.from_numpy(buffer).view(torch.bfloat16).view(blocks, 2, *shape, HEAD_DIM)
    parts = cache.transpose(2, 3) if layout == "HND" else cache
    yield from _ours(LayerCache(0, 0, (parts[:, 0], parts[:, 1])), ids, BLOCK_TOKENS)
    by_block = buffer.view(np.uint64).reshape(blocks, -1)
    gathered = np.empty_like(by_block)

    def gather() -> Bytes:
        # mode: without it numpy gathers into a buffer of its own, and copies.
        return np.take(by_block, ids, axis=0, out=gathered, mode="clip").reshape(-1).view(np.uint8)

    yield Contender("gather alone", gather)
    for name, function, missing in _hashes():
        yield Contender(name, None if function is None else _after(gather, function), missing)


def _ours(layer: LayerCache, ids: npt.NDArray[np.int64], block_size: int) -> Iterator[Contender]:
    tokens = len(ids) * block_size
    reason = paths.why_not_compiled()
    if reason is None:
        from kernels import cpu_path

        table = cpu_path.describe([layer], block_size)
        yield Contender("cpu", lambda: cpu_path.sum_blocks(table, ids, start=0, num_tokens=tokens))
    else:
        yield Contender("cpu", None, f"pip install numba ({reason})")
    on_device = torch.from_numpy(ids)

    def by_torch() -> torch.Tensor:
        return torch_path.block_checksums([layer], on_device, block_size=block_size, start=0, num_tokens=tokens)

    yield Contender("torch", by_torch)


def _bound(function: Callable[[Any], object], buffer: Bytes) -> Job:
    return lambda: function(buffer)


def _after(gather: Callable[[], Bytes], function: Callable[[Any], object]) -> Job:
    return lambda: function(gather())


def _hashes() -> Iterator[tuple[str, Callable[[Any], object] | None, str]]:
    """(name, function of a buffer, what to install). crc32c is that of the package crc32c, with SSE 4.2."""
    yield "adler32", zlib.adler32, ""
    for name, module, attribute in (("xxh3_64", "xxhash", "xxh3_64_intdigest"), ("crc32c", "crc32c", "crc32c")):
        found = _imported(module)
        yield name, getattr(found, attribute, None), "" if found else _advice(module)
    blake3 = _imported("blake3")
    yield (
        "blake3",
        (lambda buffer: blake3.blake3(buffer).digest()) if blake3 else None,
        "" if blake3 else _advice("blake3"),
    )


def _advice(module: str) -> str:
    return f"pip install {module} (or the extra bench)"


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
