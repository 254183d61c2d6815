"""The checksums of `definition.py` computed by torch, from vLLM's paged caches, on whatever device they lie.

A cache has whatever strides its attention kernel wants, so KV is gathered a bounded chunk at a time. With `j = t*P + p`
a token's share of a slice checksum is `2*P*t * sum_p(x) + sum_p(x * (2*p + 1))`: two sums and one row of weights a
cache, whatever the block and its position. Nothing here waits for the device. int64 arithmetic wraps around, which is
unsigned arithmetic modulo 2**64 on the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvchaos_vllm.definition import MAX_KV_HEADS_PER_LAYER, PIECE_BYTES

DEFAULT_GATHER_BYTES = 4 * 2**20
LITTLE_ENDIAN = sys.byteorder == "little"

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LayerCache:
    """One layer's paged cache, as one worker holds it.

    Attributes:
        layer_number: the number in the layer's name.
        first_head: the number, over the unsharded model, of the worker's first KV head.
        cache: [kernel_blocks, heads, kernel_block_tokens, width] of any dtype and strides: vLLM's logical view.
        order: where a token's elements lie, if not in its row: int64 [kernel_block_tokens, width], places in the
            flattened last two dimensions, K's before V's.
    """

    layer_number: int
    first_head: int
    cache: torch.Tensor
    order: torch.Tensor | None = None

    @property
    def kernel_block_tokens(self) -> int:
        return self.cache.shape[2]

    @property
    def num_pieces(self) -> int:
        """Pieces of a token and head."""
        return self.cache.shape[3] * self.cache.element_size() // PIECE_BYTES

    def gather(self, kernel_ids: torch.Tensor, tokens: slice) -> torch.Tensor:
        """The pieces of these kernel blocks' tokens: int64 [kernel_ids, tokens, heads, pieces]."""
        elements = self.cache.detach().view(_INTEGER_OF_SIZE[self.cache.element_size()])
        if self.order is None:
            rows = elements[:, :, tokens].index_select(0, kernel_ids)
        else:
            heads, width = self.cache.shape[1], self.cache.shape[3]
            flat = elements.index_select(0, kernel_ids).flatten(2)
            places = self.order[tokens]
            rows = flat.index_select(2, places.reshape(-1)).view(len(kernel_ids), heads, len(places), width)
        return rows.transpose(1, 2).contiguous().view(torch.int64)


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


def problem_of(cache: torch.Tensor, block_size: int, first_head: int) -> str | None:
    """Why a cache of this form has no block checksums; None: it has (FPR-2).

    Args:
        cache: as in `LayerCache`.
        block_size: tokens a logical block.
    """
    if not LITTLE_ENDIAN:
        return "pieces are little-endian and this machine is not"
    if cache.ndim != 4:
        return f"its cache {list(cache.shape)} is not [kernel_blocks, heads, kernel_block_tokens, width]"
    _, heads, kernel_block_tokens, width = cache.shape
    if not kernel_block_tokens or block_size % kernel_block_tokens:
        return f"kernel blocks of {kernel_block_tokens} tokens do not tile blocks of {block_size}"
    if not heads or first_head < 0 or first_head + heads > MAX_KV_HEADS_PER_LAYER:
        return f"{heads} KV heads from {first_head} on are not some of 0 to {MAX_KV_HEADS_PER_LAYER - 1}"
    width_bytes = width * cache.element_size()
    if not width_bytes or width_bytes % PIECE_BYTES or cache.element_size() not in _INTEGER_OF_SIZE:
        return f"{width} elements of {cache.dtype} a token and head are not whole {PIECE_BYTES}-byte pieces"
    return None


def block_checksums(
    layers: Sequence[LayerCache],
    block_ids: Sequence[int],
    *,
    block_size: int,
    start: int,
    num_tokens: int,
    max_gather_bytes: int = DEFAULT_GATHER_BYTES,
) -> torch.Tensor:
    """Sum these layers' and heads' part of the checksums of consecutive blocks of one request.

    Block `b` of the request's block table is kernel blocks `b*k` to `b*k + k - 1` of a cache whose kernel blocks are
    `k` times smaller. Slots that do not count are not read.

    Args:
        layers: at least one, all on one device, of which `problem_of` finds nothing to say.
        block_ids: logical block ids.
        block_size: tokens a logical block.
        start: block position in the request of the first of block_ids.
        num_tokens: tokens of the request that count, from its first token.
        max_gather_bytes: the most KV gathered at once, but never less than one token of all heads. The result does
            not depend on it.

    Returns:
        int64 [blocks] on the cache's device: the bits of uint64.

    Raises:
        ValueError: ids outside a cache, or numbers out of range.
    """
    if block_size < 1 or start < 0 or num_tokens < 0 or max_gather_bytes < 1:
        raise ValueError(
            f"block_size {block_size} and max_gather_bytes {max_gather_bytes} must be at least 1, "
            f"start {start} and num_tokens {num_tokens} at least 0"
        )
    device = layers[0].cache.device
    blocks = min(layer.cache.shape[0] * layer.kernel_block_tokens // block_size for layer in layers)
    outside = [b for b in block_ids if not 0 <= b < blocks]
    if outside:
        raise ValueError(
            f"block id {outside[0]} is outside the cache, which has {blocks} blocks of {block_size} tokens"
        )
    ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    sums = torch.zeros(len(ids), dtype=torch.int64, device=device)
    covered = max(0, min(num_tokens - start * block_size, len(ids) * block_size))
    split: dict[int, torch.Tensor] = {}
    for layer in layers:
        per_block = block_size // layer.kernel_block_tokens
        if per_block not in split:
            split[per_block] = (ids[:, None] * per_block + torch.arange(per_block, device=device)).reshape(-1)
        full_blocks, tail_tokens = divmod(covered, layer.kernel_block_tokens)
        tokens = _Tokens(split[per_block], layer.kernel_block_tokens, full_blocks, tail_tokens, start * block_size)
        sums += _layer_sums(layer, tokens, max_gather_bytes).reshape(-1, per_block).sum(1)
    return sums


def _layer_sums(layer: LayerCache, tokens: _Tokens, max_gather_bytes: int) -> torch.Tensor:
    """Sum `m * s` over the heads of one layer: int64 [kernel blocks]."""
    device = tokens.kernel_ids.device
    sums = torch.zeros(len(tokens.kernel_ids), dtype=torch.int64, device=device)
    heads, pieces = layer.cache.shape[1], layer.num_pieces
    first_factor = 2 * (layer.layer_number * MAX_KV_HEADS_PER_LAYER + layer.first_head) + 1
    head_factors = 2 * torch.arange(heads, device=device) + first_factor
    piece_factors = 2 * torch.arange(pieces, device=device) + 1
    for rows, columns in tokens.chunks(heads * pieces * PIECE_BYTES, max_gather_bytes):
        x = layer.gather(tokens.kernel_ids[rows], columns)
        position = (
            torch.arange(rows.start, rows.stop, device=device)[:, None] * tokens.kernel_block_tokens
            + torch.arange(columns.start, columns.stop, device=device)
            + tokens.first_token
        )
        by_token = x.sum(3) * (position * (2 * pieces))[:, :, None]
        by_token += x.mul_(piece_factors).sum(3)
        sums[rows] += by_token.mul_(head_factors).sum((1, 2))
    return sums
