"""The bytes of an engine's KV cache, by layer, head, block and slot, whatever the layout of its tensors.

A token's bytes of one layer and head are its K bytes and then its V bytes. Caches are recognised by their shapes: K and
V side by side in a row of `2 * head_size`, or apart along an axis of 2. Where a backend scatters what a token holds
over its block, as vLLM's on CPU does, it has to be said where (`order`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvchaos_vllm_faults.blocks import Blocks

Bytes = npt.NDArray[np.uint8]


class LayoutError(ValueError):
    """A cache whose layout cannot be told from its shape."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the engine says of its caches: one KV cache group, all layers alike."""

    num_blocks: int
    block_size: int
    num_heads: int
    head_size: int


class EngineMemory:
    """The KV caches of one worker that holds the whole model."""

    def __init__(
        self, caches: Mapping[str, torch.Tensor], shape: CacheShape, order: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            caches: the tensor of each layer, by name.
            order: int64 [slots, 2 * head_size], where in a head's flattened block the elements of each token lie; None
                for rows.

        Raises:
            LayoutError: a shape that says nothing, or more than one thing.
        """
        names = sorted(caches, key=_layer_number)
        self._parts = [_parts(name, caches[name], shape) for name in names]
        self.layer_numbers = tuple(_layer_number(name) for name in names)
        self.num_layers = len(names)
        self.num_heads = shape.num_heads
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self._order = None if order is None else order.reshape(-1)
        self.packed = len(self._parts[0]) == 1 and order is None
        if order is not None and (len(self._parts[0]) > 1 or order.shape != self._parts[0][0].shape[2:]):
            raise LayoutError(f"an order of {tuple(order.shape)} is not that of a block (of {shape})")
        self.dtype = caches[names[0]].dtype
        self.bytes_per_token = 2 * shape.head_size * self.dtype.itemsize

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """A copy: uint8 [layers, heads, blocks, slots, bytes_per_token]."""
        found = []
        for parts in self._parts:
            chosen = torch.tensor(block_ids, dtype=torch.long, device=parts[0].device)
            whole = torch.cat([part.index_select(0, chosen) for part in parts], dim=-1)
            if self._order is not None:
                whole = whole.flatten(2)[:, :, self._order].view(whole.shape)
            found.append(whole.contiguous().view(torch.uint8).cpu().numpy().swapaxes(0, 1))
        return np.stack(found)

    def write(self, block_ids: Sequence[int], kv: Bytes) -> None:
        """Overwrite whole blocks with uint8 [layers, heads, blocks, slots, bytes_per_token]."""
        for parts, layer in zip(self._parts, kv, strict=True):
            chosen = torch.tensor(block_ids, dtype=torch.long, device=parts[0].device)
            rows = torch.from_numpy(np.ascontiguousarray(layer.swapaxes(0, 1))).view(self.dtype)
            if self._order is not None:
                scattered = torch.empty_like(rows).flatten(2)
                scattered[:, :, self._order] = rows.flatten(2)
                rows = scattered.view(rows.shape)
            width = rows.shape[-1] // len(parts)
            for number, part in enumerate(parts):
                part[chosen] = rows[..., number * width : (number + 1) * width].to(part.device)

    def fill(self, block_ids: Sequence[int], pattern: bytes) -> None:
        """Repeat `pattern` (8 bytes) over every slot of these blocks."""
        shape = (self.num_layers, self.num_heads, len(block_ids), self.block_size, self.bytes_per_token)
        size = int(np.prod(shape))
        repeated = np.frombuffer(pattern * -(-size // len(pattern)), dtype=np.uint8)[:size]
        self.write(block_ids, repeated.reshape(shape).copy())

    def tokens(self, blocks: Blocks) -> Bytes:
        """A copy of the tokens in `blocks`: uint8 [layers, heads, tokens, bytes_per_token]."""
        kv = self.read(blocks.block_ids)
        kv = kv.reshape(self.num_layers, self.num_heads, -1, self.bytes_per_token)
        return kv[:, :, : max(0, blocks.num_tokens - blocks.first_token)]


def _layer_number(name: str) -> int:
    numbers = [part for part in name.split(".") if re.fullmatch(r"\d+", part)]
    if len(numbers) != 1:
        raise LayoutError(f"{name}: its name has {len(numbers)} numbers, and one would say which layer it is")
    return int(numbers[0])


def _parts(name: str, cache: torch.Tensor, shape: CacheShape) -> list[torch.Tensor]:
    """Views [blocks, heads, slots, row] of a cache: one where K and V share a row, else K and V."""
    sizes = tuple(cache.shape)
    blocks, heads, slots, width = shape.num_blocks, shape.num_heads, shape.block_size, shape.head_size
    halves = [axis for axis in (0, 1) if cache.ndim == 5 and sizes[axis] == 2]
    if cache.ndim == 4 and sizes[0] == blocks and sizes[3] == 2 * width:
        whole, row = [cache], 2 * width
    elif len(halves) == 1:
        whole, row = [cache.select(halves[0], 0), cache.select(halves[0], 1)], width
    else:
        raise LayoutError(f"{name}: a cache of shape {sizes} is not known here (of {shape})")
    wanted = {(blocks, heads, slots, row): False, (blocks, slots, heads, row): True}
    found = tuple(whole[0].shape)
    if heads == slots or found not in wanted:
        raise LayoutError(f"{name}: which axis of {sizes} counts heads cannot be told (of {shape})")
    return [part.transpose(1, 2) if wanted[found] else part for part in whole]
