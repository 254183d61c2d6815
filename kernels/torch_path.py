"""The checksums of `kernels/definition.py` computed by torch, from a paged KV cache, on any device.

An engine's cache has whatever strides its attention kernel wants, so KV is gathered a bounded chunk at a time. With
`j = t*P + p` a token's share of a slice checksum is `2*P*t * sum_p(x) + sum_p(x * (2*p + 1))`: two sums and one row
of weights a cache, whatever the block and its position. Nothing here waits for the device. int64 arithmetic wraps
around, which is unsigned arithmetic modulo 2**64 on the same bits. `version=2` sums the terms of
`kernels/definition_v2.py` instead, which `kernels/torch_path_v2.py` knows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import torch_path_v2
from kernels.definition import MAX_KV_HEADS_PER_LAYER, PIECE_BYTES
from kernels.torch_path_v2 import signed

DEFAULT_GATHER_BYTES = 4 * 2**20
POISON_BYTE = 0xA5
VERSIONS = (1, 2)

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LayerCache:
    """One layer's paged cache, as one worker holds it.

    Attributes:
        layer_number: the number in the layer's name (DEF-4).
        first_head: the number, over the unsharded model, of the worker's first KV head.
        parts: K then V, or the one latent cache, each [kernel_blocks, kernel_block_tokens, heads, width] of any dtype
            and strides. They may differ in width and dtype only.
    """

    layer_number: int
    first_head: int
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Tokens:
    """The tokens to sum of one layer: rows of kernel blocks, the last of which may count in part."""

    kernel_ids: torch.Tensor  # int64 [kernel blocks]
    kernel_block_tokens: int
    full_blocks: int
    tail_tokens: int
    first_token: int

    def chunks(self, token_bytes: int, max_bytes: int) -> Iterator[tuple[slice, slice]]:
        """Yield (kernel blocks, tokens in each) of at most max_bytes, at least one token."""
        tokens = max(1, min(self.kernel_block_tokens, max_bytes // token_bytes))
        blocks = max(1, max_bytes // (token_bytes * self.kernel_block_tokens))
        for block in range(0, self.full_blocks, blocks):
            rows = slice(block, min(block + blocks, self.full_blocks))
            for token in range(0, self.kernel_block_tokens, tokens):
                yield rows, slice(token, min(token + tokens, self.kernel_block_tokens))
        for token in range(0, self.tail_tokens, tokens):
            yield slice(self.full_blocks, self.full_blocks + 1), slice(token, min(token + tokens, self.tail_tokens))


def block_checksums(
    layers: Sequence[LayerCache],
    block_ids: Sequence[int] | torch.Tensor,
    *,
    block_size: int,
    start: int,
    num_tokens: int,
    max_gather_bytes: int = DEFAULT_GATHER_BYTES,
    version: int = 1,
) -> torch.Tensor:
    """Sum these layers' and heads' part of the checksums of consecutive blocks of one request (DEF-4, DEF-7).

    Block `b` of the request's block table is kernel blocks `b*k` to `b*k + k - 1` of a cache whose kernel blocks are
    `k` times smaller. Slots that do not count are not read.

    Args:
        layers: the layers of one KV cache group on this worker, all on one device.
        block_ids: logical block ids; an int64 tensor [blocks] on the cache's device is taken as it is (nothing is
            copied, and its ids are not checked, for that would wait for the device).
        block_size: tokens a logical block.
        start: block position in the request of the first of block_ids.
        num_tokens: tokens of the request that count, from its first token (DEF-8).
        max_gather_bytes: the most KV gathered at once, but never less than one token of all heads. The result does
            not depend on it (PRO-10).
        version: of the definition: 1, or 2 (hardened).

    Returns:
        int64 [blocks] on the cache's device: the bits of uint64. `as_uint64` brings it to the host.

    Raises:
        ValueError: a cache that cannot be checksummed (FPR-2), or ids outside it.
    """
    device = check_layers(layers, block_size)
    check_version(version)
    if block_size < 1 or start < 0 or num_tokens < 0 or max_gather_bytes < 1:
        raise ValueError(
            f"block_size {block_size} and max_gather_bytes {max_gather_bytes} must be at least 1, "
            f"start {start} and num_tokens {num_tokens} at least 0"
        )
    ids = _ids_on_device(layers, block_ids, block_size, device)
    sums = torch.zeros(len(ids), dtype=torch.int64, device=device)
    first_token = start * block_size
    covered = max(0, min(num_tokens - first_token, len(ids) * block_size))
    split: dict[int, torch.Tensor] = {}
    for layer in layers:
        kernel_block_tokens = layer.parts[0].shape[1]
        per_block = block_size // kernel_block_tokens
        if per_block not in split:
            split[per_block] = (ids[:, None] * per_block + torch.arange(per_block, device=device)).reshape(-1)
        full_blocks, tail_tokens = divmod(covered, kernel_block_tokens)
        tokens = _Tokens(split[per_block], kernel_block_tokens, full_blocks, tail_tokens, first_token)
        sums += _layer_sums(layer, tokens, max_gather_bytes, version).reshape(-1, per_block).sum(1)
    return sums


def as_uint64(sums: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Bring int64 [blocks] from `block_checksums` to the host as uint64 [blocks]. Waits for the device."""
    return sums.cpu().numpy().view(np.uint64)


def paged_cache(
    kv: npt.NDArray[np.uint8],
    layer_numbers: Sequence[int],
    first_head: int,
    block_size: int,
    block_ids: Sequence[int],
    *,
    device: str = "cpu",
) -> list[LayerCache]:
    """Put KV into a paged cache as an engine would hold it, so that the paged path can be tried on a dump.

    Args:
        kv: uint8 [layers, heads, tokens, bytes_per_token], whole blocks; the first half of a token's pieces becomes
            K and the rest V, a single piece a latent cache.
        layer_numbers, first_head: as in `kernels.definition.block_checksums`.
        block_ids: where each block of kv goes, distinct; slots of other blocks hold a poison pattern.

    Raises:
        ValueError: kv is not whole blocks and pieces, or the ids are not one a block, distinct and not negative.
    """
    _, heads, tokens, width = kv.shape
    blocks = tokens // block_size if block_size > 0 else 0
    if not blocks or blocks * block_size != tokens or width % PIECE_BYTES:
        raise ValueError(f"kv {list(kv.shape)} is not whole {PIECE_BYTES}-byte pieces in whole blocks of {block_size}")
    if len(block_ids) != blocks or len(set(block_ids)) != blocks or min(block_ids) < 0:
        raise ValueError(f"block_ids must be {blocks} distinct ids, one for each block of kv")
    pieces = width // PIECE_BYTES
    cut = pieces // 2 * PIECE_BYTES
    target = torch.tensor(block_ids, dtype=torch.int64)
    caches = []
    for layer_number, layer in zip(layer_numbers, kv, strict=True):
        cache = torch.full((max(block_ids) + 1, block_size, heads, width), POISON_BYTE, dtype=torch.uint8)
        by_block = torch.from_numpy(layer.copy()).reshape(heads, blocks, block_size, width)
        cache[target] = by_block.permute(1, 2, 0, 3)
        cache = cache.to(device)
        parts = (cache[..., :cut], cache[..., cut:]) if cut else (cache,)
        caches.append(LayerCache(layer_number, first_head, parts))
    return caches


def _layer_sums(layer: LayerCache, tokens: _Tokens, max_gather_bytes: int, version: int) -> torch.Tensor:
    """Sum `m * s` over the heads of one layer: int64 [kernel blocks]."""
    device = tokens.kernel_ids.device
    sums = torch.zeros(len(tokens.kernel_ids), dtype=torch.int64, device=device)
    pieces = [part.shape[3] * part.element_size() // PIECE_BYTES for part in layer.parts]
    heads = layer.parts[0].shape[2]
    first_factor = 2 * (layer.layer_number * MAX_KV_HEADS_PER_LAYER + layer.first_head) + 1
    head_factors = 2 * torch.arange(heads, device=device) + signed(first_factor)
    keys = torch_path_v2.row_keys(layer.layer_number, layer.first_head, heads, device) if version == 2 else None
    first_piece = 0
    for part, part_pieces in zip(layer.parts, pieces, strict=True):
        piece_factors = 2 * torch.arange(first_piece, first_piece + part_pieces, device=device) + 1
        elements = part.detach().view(_INTEGER_OF_SIZE[part.element_size()])
        for rows, columns in tokens.chunks(heads * part_pieces * PIECE_BYTES, max_gather_bytes):
            gathered = elements[:, columns].index_select(0, tokens.kernel_ids[rows]).contiguous()
            x = gathered.view(torch.int64)  # [rows, columns, heads, part_pieces]
            position = (
                torch.arange(rows.start, rows.stop, device=device)[:, None] * tokens.kernel_block_tokens
                + torch.arange(columns.start, columns.stop, device=device)
                + signed(tokens.first_token)
            )
            if keys is not None:
                sums[rows] += torch_path_v2.sum_terms(x, keys, position * signed(sum(pieces)) + first_piece)
                continue
            by_token = x.sum(3) * (position * signed(2 * sum(pieces)))[:, :, None]
            by_token += x.mul_(piece_factors).sum(3)
            sums[rows] += by_token.mul_(head_factors).sum((1, 2))
        first_piece += part_pieces
    return sums


def _ids_on_device(
    layers: Sequence[LayerCache], block_ids: Sequence[int] | torch.Tensor, block_size: int, device: torch.device
) -> torch.Tensor:
    """Give int64 [blocks] on device, copied without waiting for it."""
    if isinstance(block_ids, torch.Tensor):
        check_id_tensor(block_ids, device)
        return block_ids
    blocks = blocks_in(layers, block_size)
    outside = [b for b in block_ids if not 0 <= b < blocks]
    if outside:
        raise id_outside(outside[0], blocks, block_size)
    ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=device.type == "cuda")
    return ids.to(device, non_blocking=True)


def check_version(version: int) -> None:
    """Refuse a version that has no definition.

    Raises:
        ValueError: which there are.
    """
    if version not in VERSIONS:
        raise ValueError(f"version is {version}: there are definitions {VERSIONS[0]} and {VERSIONS[1]}")


def check_id_tensor(block_ids: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor that is not int64 [blocks] on device.

    Raises:
        ValueError: what it is instead.
    """
    if block_ids.dtype != torch.int64 or block_ids.ndim != 1 or block_ids.device != device:
        raise ValueError(
            f"block_ids as a tensor must be int64 [blocks] on {device}, "
            f"not {block_ids.dtype} {list(block_ids.shape)} on {block_ids.device}"
        )


def blocks_in(layers: Sequence[LayerCache], block_size: int) -> int:
    """How many logical blocks every one of these caches has."""
    return min(part.shape[0] * part.shape[1] // block_size for layer in layers for part in layer.parts)


def id_outside(block_id: int, blocks: int, block_size: int) -> ValueError:
    """The error for a block id outside a cache."""
    return ValueError(f"block id {block_id} is outside the cache, which has {blocks} blocks of {block_size} tokens")


def check_layers(layers: Sequence[LayerCache], block_size: int) -> torch.device:
    """Refuse layers that have no block checksums, and give the device that they are on.

    Raises:
        ValueError: a cache that cannot be checksummed (FPR-2), or layers that are not one group on one device.
    """
    if sys.byteorder != "little":
        raise ValueError("pieces are little-endian and this machine is not: use kernels.definition")
    numbers = [layer.layer_number for layer in layers]
    if not numbers or len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise ValueError(f"layers must be at least one, with distinct numbers >= 0, not {numbers}")
    device = layers[0].parts[0].device if layers[0].parts else torch.device("cpu")
    for layer in layers:
        problem = _problem_of(layer, device, block_size)
        if problem:
            raise ValueError(f"layer {layer.layer_number} cannot be checksummed: {problem}")
    return device


def _problem_of(layer: LayerCache, device: torch.device, block_size: int) -> str | None:
    if not layer.parts or any(part.ndim != 4 for part in layer.parts):
        return "its parts must be K and V, or one latent, of [kernel_blocks, kernel_block_tokens, heads, width]"
    if any(part.shape[:3] != layer.parts[0].shape[:3] or part.device != device for part in layer.parts):
        return f"its parts must agree in all but width and dtype, and lie on {device} with the other layers"
    _, kernel_block_tokens, heads, _ = layer.parts[0].shape
    if not kernel_block_tokens or block_size % kernel_block_tokens:
        return f"kernel blocks of {kernel_block_tokens} tokens do not tile blocks of {block_size}"
    if not heads or layer.first_head < 0 or layer.first_head + heads > MAX_KV_HEADS_PER_LAYER:
        return f"{heads} heads from {layer.first_head} on are not some of 0 to {MAX_KV_HEADS_PER_LAYER - 1}"
    for part in layer.parts:
        width = part.shape[3] * part.element_size()
        if not width or width % PIECE_BYTES or part.element_size() not in _INTEGER_OF_SIZE:
            return f"{part.shape[3]} elements of {part.dtype} a token and head are not whole {PIECE_BYTES}-byte pieces"
    return None
