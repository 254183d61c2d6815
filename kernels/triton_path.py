"""The checksums of `kernels/definition.py` in one launch on a GPU, each byte of KV read once (EXT-6).

One program sums one block of one layer, all heads. With `m` affine in the head and `2*j + 1` in the token and piece,
`sum_{h,t,p} x * m_h * w_tp` is one multiplication a piece on the way, and weights that are computed once a program and
applied at its end. int64 arithmetic wraps around, which is unsigned arithmetic modulo 2**64 on the same bits.

Nothing here waits for the device: addresses and rows go there from pinned memory, and the sums stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels import torch_path
from kernels.definition import MAX_KV_HEADS_PER_LAYER, PIECE_BYTES
from kernels.torch_path import LayerCache
from kernels.torch_path_v2 import signed

TILE_TOKENS = 16
MAX_TILE_PIECES = 32
NUM_WARPS = 4
ALIGNED_BYTES = 16

# Columns of the layers' table: of the layer, then of each of its parts, strides in pieces.
LAYER_COLUMNS = ("kernel_block_tokens", "blocks_per_block", "heads", "pieces_per_token", "first_factor")
PART_COLUMNS = ("address", "block_stride", "token_stride", "head_stride", "pieces", "first_piece")
ROW_COLUMNS = ("block_id", "first_token", "tokens")

_LAYER_COLUMNS = tl.constexpr(len(LAYER_COLUMNS))
_PART_COLUMNS = tl.constexpr(len(PART_COLUMNS))
_ROW_COLUMNS = tl.constexpr(len(ROW_COLUMNS))


@triton.jit  # type: ignore[untyped-decorator]
def sum_rows_kernel(  # type: ignore[no-untyped-def]
    layers,  # int64 [layers, LAYER_COLUMNS + parts * PART_COLUMNS]
    rows,  # int64 [rows, ROW_COLUMNS]
    sums,  # int64 [rows], added to
    parts: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_pieces: tl.constexpr,
    aligned: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = layers + tl.program_id(1).to(tl.int64) * (_LAYER_COLUMNS + parts * _PART_COLUMNS)
    block_id = tl.load(rows + row * _ROW_COLUMNS)
    first_token = tl.load(rows + row * _ROW_COLUMNS + 1)
    tokens = tl.load(rows + row * _ROW_COLUMNS + 2)
    kernel_tokens = tl.load(layer)
    per_block = tl.load(layer + 1)
    heads = tl.load(layer + 2)
    pieces_per_token = tl.load(layer + 3)
    first_factor = tl.load(layer + 4)
    total = tl.zeros((tile_tokens, tile_pieces), tl.int64)
    for part in tl.static_range(parts):
        columns = layer + _LAYER_COLUMNS + part * _PART_COLUMNS
        cache = tl.load(columns).to(tl.pointer_type(tl.int64))
        block_stride = tl.load(columns + 1)
        token_stride = tl.load(columns + 2)
        head_stride = tl.load(columns + 3)
        pieces = tl.load(columns + 4)
        first_piece = tl.load(columns + 5)
        if aligned:  # the host has looked: two pieces can be loaded at once
            cache = tl.multiple_of(cache, 16)
            block_stride = tl.multiple_of(block_stride, 2)
            token_stride = tl.multiple_of(token_stride, 2)
            head_stride = tl.multiple_of(head_stride, 2)
            pieces = tl.multiple_of(pieces, 2)
        for first in range(0, tokens, tile_tokens):
            token = first + tl.arange(0, tile_tokens).to(tl.int64)
            kernel_block = block_id * per_block + token // kernel_tokens
            slot = kernel_block * block_stride + (token % kernel_tokens) * token_stride
            for first_of_tile in range(0, pieces, tile_pieces):
                piece = first_of_tile + tl.arange(0, tile_pieces).to(tl.int64)
                at = cache + slot[:, None] + piece[None, :]
                counts = (token < tokens)[:, None] & (piece < pieces)[None, :]
                by_head = tl.zeros((tile_tokens, tile_pieces), tl.int64)
                for head in range(heads):  # int64, as its bound
                    x = tl.load(at + head * head_stride, mask=counts, other=0)
                    by_head += x * (first_factor + 2 * head)
                j = (first_token + token)[:, None] * pieces_per_token + (first_piece + piece)[None, :]
                total += by_head * (2 * j + 1)
    tl.atomic_add(sums + row, tl.sum(total), sem="relaxed")


@dataclass(frozen=True)
class LayerTable:
    """Layers as the kernel reads them; made once for an engine's caches, which it keeps alive."""

    caches: tuple[LayerCache, ...]
    block_size: int
    table: torch.Tensor
    parts: int
    tile_pieces: int
    aligned: bool


def can_read(layer: LayerCache) -> bool:
    """Whether the kernel can: pieces at whole multiples of their size, the elements of a token neighbours."""
    for part in layer.parts:
        size = part.element_size()
        strides = [stride * size for stride in part.stride()[:3]]
        if part.stride(3) != 1 or any(value % PIECE_BYTES for value in (part.data_ptr(), *strides)):
            return False
    return True


def describe(layers: Sequence[LayerCache], block_size: int) -> LayerTable:
    """Put what the kernel must know of these layers on their device.

    Args:
        layers: of one KV cache group, all with as many parts.
        block_size: tokens a logical block.

    Raises:
        ValueError: a cache that cannot be checksummed (FPR-2), or that `can_read` refuses, or unlike parts.
    """
    device = torch_path.check_layers(layers, block_size)
    parts = len(layers[0].parts)
    for layer in layers:
        if len(layer.parts) != parts or not can_read(layer):
            raise ValueError(f"layer {layer.layer_number} cannot be read in whole pieces by one kernel with the others")
    table = np.array([_row_of(layer, block_size) for layer in layers], dtype=np.int64)
    by_part = table[:, len(LAYER_COLUMNS) :].reshape(-1, len(PART_COLUMNS))
    widest = int(by_part[:, 4].max())
    aligned = not (by_part[:, 0] % ALIGNED_BYTES).any() and not (by_part[:, 1:5] % 2).any()
    tile_pieces = min(tile_pieces_limit(aligned), triton.next_power_of_2(widest))
    return LayerTable(tuple(layers), block_size, _to_device(table, device), parts, tile_pieces, aligned)


def tile_pieces_limit(aligned: bool) -> int:
    """The most pieces of a token that a program holds at once: half where each needs an address of its own."""
    return MAX_TILE_PIECES if aligned else MAX_TILE_PIECES // 2


def rows_of(block_ids: Sequence[int], block_size: int, start: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Rows of one request for `sum_rows`: int64 [blocks, ROW_COLUMNS]. Those of several can be stacked."""
    rows = np.empty((len(block_ids), len(ROW_COLUMNS)), dtype=np.int64)
    offsets = np.arange(len(block_ids), dtype=np.int64) * block_size
    covered = max(0, min(num_tokens - start * block_size, len(block_ids) * block_size))
    rows[:, 0] = block_ids
    rows[:, 1] = (offsets.view(np.uint64) + np.uint64(start * block_size % 2**64)).view(np.int64)
    rows[:, 2] = np.clip(covered - offsets, 0, block_size)
    return rows


def sum_rows(table: LayerTable, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Sum blocks of any requests over all layers and heads of the table in one launch; waits for nothing.

    Args:
        table: from `describe`.
        rows: int64 [rows, ROW_COLUMNS], from `rows_of`.

    Returns:
        int64 [rows] on the layers' device: the bits of uint64.

    Raises:
        ValueError: a row outside the caches.
    """
    blocks = torch_path.blocks_in(table.caches, table.block_size)
    if len(rows) and not 0 <= rows[:, 0].min() <= rows[:, 0].max() < blocks:
        outside = next(int(b) for b in rows[:, 0] if not 0 <= b < blocks)
        raise torch_path.id_outside(outside, blocks, table.block_size)
    device = table.table.device
    sums = torch.zeros(len(rows), dtype=torch.int64, device=device)
    if len(rows):
        grid = (len(rows), len(table.caches))
        # Triton launches on the current device, whatever its arguments are on.
        with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
            sum_rows_kernel[grid](
                table.table,
                _to_device(rows, device),
                sums,
                parts=table.parts,
                tile_tokens=TILE_TOKENS,
                tile_pieces=table.tile_pieces,
                aligned=table.aligned,
                num_warps=NUM_WARPS,
            )
    return sums


def block_checksums(
    layers: Sequence[LayerCache], block_ids: Sequence[int], *, block_size: int, start: int, num_tokens: int
) -> torch.Tensor:
    """Sum as `kernels.torch_path.block_checksums` does, with the kernel.

    Raises:
        ValueError: as there, and for caches that `describe` refuses.
    """
    if block_size < 1 or start < 0 or num_tokens < 0:
        raise ValueError(
            f"block_size {block_size} must be at least 1, start {start} and num_tokens {num_tokens} at least 0"
        )
    return sum_rows(describe(layers, block_size), rows_of(block_ids, block_size, start, num_tokens))


def _row_of(layer: LayerCache, block_size: int) -> list[int]:
    _, kernel_tokens, heads, _ = layer.parts[0].shape
    pieces = [part.shape[3] * part.element_size() // PIECE_BYTES for part in layer.parts]
    first_factor = 2 * (layer.layer_number * MAX_KV_HEADS_PER_LAYER + layer.first_head) + 1
    row = [kernel_tokens, block_size // kernel_tokens, heads, sum(pieces), signed(first_factor)]
    first_piece = 0
    for part, part_pieces in zip(layer.parts, pieces, strict=True):
        block, token, head = (stride * part.element_size() // PIECE_BYTES for stride in part.stride()[:3])
        row += [part.data_ptr(), block, token, head, part_pieces, first_piece]
        first_piece += part_pieces
    return row


def _to_device(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
