"""The checksums of `kernels/definition.py` for a paged cache in host memory: one pass, nothing gathered or copied.

The arithmetic is `kernels/cpu_compiled.py`, and `kernels/cpu_compiled_v2.py` for version 2, which numba compiles. Here
a cache becomes a table of addresses and strides for them. What they cannot read (elements of a token that are not
neighbours, strides that are not whole pieces) is left to `kernels/torch_path.py`, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels import cpu_compiled, torch_path
from kernels.definition import MAX_KV_HEADS_PER_LAYER, PIECE_BYTES
from kernels.torch_path import LayerCache
from kernels.torch_path_v2 import signed

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostTable:
    """Layers as `cpu_compiled` reads them: addresses and strides, looked up once. It keeps the caches alive.

    Attributes:
        layers, parts: its two tables.
        others: the layers that torch has to sum.
    """

    caches: tuple[LayerCache, ...]
    block_size: int
    blocks: int
    layers: Table
    parts: Table
    others: tuple[LayerCache, ...]


def describe(layers: Sequence[LayerCache], block_size: int) -> HostTable:
    """Look up where these layers are, for any number of calls of `sum_blocks`.

    Args:
        layers: of one KV cache group, in host memory. Their tensors must not be resized or given other strides later.
        block_size: tokens a logical block.

    Raises:
        ValueError: a cache that cannot be checksummed (FPR-2) or is not in host memory.
    """
    device = torch_path.check_layers(layers, block_size)
    if device.type != "cpu":
        raise ValueError(f"the layers are on {device}: the CPU path reads host memory only")
    if block_size < 1:
        raise ValueError(f"block_size {block_size} must be at least 1")
    layer_rows: list[list[int]] = []
    part_rows: list[list[int]] = []
    others = []
    for layer in layers:
        parts = _parts_of(layer)
        if parts is None:
            others.append(layer)
            continue
        _, kernel_block_tokens, heads, _ = layer.parts[0].shape
        first_row = layer.layer_number * MAX_KV_HEADS_PER_LAYER + layer.first_head
        pieces, at = sum(part[4] for part in parts), len(part_rows)
        weights = (signed(2 * first_row + 1), at, at + len(parts), signed(first_row))
        layer_rows.append([kernel_block_tokens, heads, pieces, *weights])
        part_rows += parts
    return HostTable(
        tuple(layers),
        block_size,
        torch_path.blocks_in(layers, block_size),
        np.array(layer_rows, dtype=np.int64).reshape(-1, len(cpu_compiled.LAYER_COLUMNS)),
        np.array(part_rows, dtype=np.int64).reshape(-1, len(cpu_compiled.PART_COLUMNS)),
        tuple(others),
    )


def sum_blocks(
    table: HostTable,
    block_ids: npt.NDArray[np.int64],
    *,
    start: int,
    num_tokens: int,
    max_threads: int = 1,
    version: int = 1,
) -> npt.NDArray[np.uint64]:
    """Sum consecutive blocks of one request over all layers and heads of the table.

    Args:
        table: from `describe`.
        block_ids: int64 [blocks], contiguous: logical block ids.
        start, num_tokens, max_threads, version: as in `block_checksums`.

    Returns:
        uint64 [blocks].

    Raises:
        ValueError: start, num_tokens, max_threads or version out of their range, or an id outside the caches.
    """
    add_sums = loops(version)
    if start < 0 or num_tokens < 0 or max_threads < 1:
        raise ValueError(
            f"start {start} and num_tokens {num_tokens} must be at least 0, max_threads {max_threads} at least 1"
        )
    first_token = start * table.block_size
    covered = max(0, min(num_tokens - first_token, len(block_ids) * table.block_size))
    where = (block_ids, table.blocks, table.block_size, np.uint64(first_token % 2**64), covered)
    threads = min(max_threads, torch.get_num_threads(), len(table.layers))
    sums = np.zeros(len(block_ids), dtype=np.uint64)
    if threads <= 1:
        bad = add_sums(table.layers, table.parts, *where, sums)
    else:
        shares = np.zeros((threads, len(block_ids)), dtype=np.uint64)

        def add_share(thread: int) -> int:
            layers = np.ascontiguousarray(table.layers[thread::threads])
            return int(add_sums(layers, table.parts, *where, shares[thread]))

        with ThreadPoolExecutor(threads) as pool:
            bad = max(pool.map(add_share, range(threads)))
        sums = shares.sum(0, dtype=np.uint64)
    if bad >= 0:
        raise torch_path.id_outside(int(block_ids[bad]), table.blocks, table.block_size)
    if table.others:
        ids = torch.from_numpy(block_ids)
        how = {"block_size": table.block_size, "start": start, "num_tokens": num_tokens, "version": version}
        sums += torch_path.as_uint64(torch_path.block_checksums(table.others, ids, **how))
    return sums


def block_checksums(
    layers: Sequence[LayerCache],
    block_ids: Sequence[int] | torch.Tensor,
    *,
    block_size: int,
    start: int,
    num_tokens: int,
    max_threads: int = 1,
    version: int = 1,
) -> torch.Tensor:
    """Sum these layers' and heads' part of the checksums of consecutive blocks of one request (DEF-4, DEF-7).

    Args:
        layers, block_ids, block_size, start, num_tokens, version: as in `kernels.torch_path.block_checksums`, on the
            CPU. Ids are checked in any form, for a wrong one would read memory that is not the cache's.
        max_threads: the most threads to use, never more than layers or than `torch.get_num_threads()` (which follows
            OMP_NUM_THREADS). The result does not depend on it.

    Returns:
        int64 [blocks]: the bits of uint64.

    Raises:
        ValueError: as `kernels.torch_path.block_checksums`, and for layers that are not in host memory.
    """
    table = describe(layers, block_size)
    if isinstance(block_ids, torch.Tensor):
        torch_path.check_id_tensor(block_ids, torch.device("cpu"))
        ids = np.ascontiguousarray(block_ids.numpy())
    else:
        ids = np.array(block_ids, dtype=np.int64)
    sums = sum_blocks(table, ids, start=start, num_tokens=num_tokens, max_threads=max_threads, version=version)
    return torch.from_numpy(sums.view(np.int64))


def loops(version: int) -> Callable[..., Any]:
    """`add_sums` of this version. Those of version 2 are imported when first asked for, which compiles them.

    Raises:
        ValueError: there is no such version.
    """
    torch_path.check_version(version)
    if version == 1:
        return cpu_compiled.add_sums  # type: ignore[no-any-return]
    from kernels import cpu_compiled_v2

    return cpu_compiled_v2.add_sums  # type: ignore[no-any-return]


def _parts_of(layer: LayerCache) -> list[list[int]] | None:
    """Rows of the table of parts; None for a layer that `cpu_compiled` cannot read."""
    rows, first_piece = [], 0
    for part in layer.parts:
        size = part.element_size()
        block, token, head, element = (stride * size for stride in part.stride())
        if element != size or (block | token | head) % PIECE_BYTES:
            return None
        pieces = part.shape[3] * size // PIECE_BYTES
        rows.append([part.data_ptr(), block, token, head, pieces, first_piece])
        first_piece += pieces
    return rows
