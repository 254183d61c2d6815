"""The paged KV cache of one rank, in a physical layout, and a byte-exact view of it for oracles and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from engine.checksum.records import GroupBlocks
from engine.config import EngineConfig, Layout

K, V = 0, 1
ChangeWatcher = Callable[[int, int, int, int], None]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class PagedKVCache:
    """One tensor a layer. Block 0 is the null block: never allocated, its content never read.

    `layers[l]` is always indexed [block, K|V, slot, kv_head, element]; only the strides tell the layout.
    """

    def __init__(self, config: EngineConfig) -> None:
        model = config.model
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.num_kv_heads = model.num_kv_heads
        self.layout: Layout = config.layout
        self.dtype = DTYPES[config.kv_dtype]
        self.layers = [self._layer(model.head_dim, config.device) for _ in range(model.num_layers)]

    def _layer(self, head_dim: int, device: str) -> torch.Tensor:
        blocks, slots, heads = self.num_blocks, self.block_size, self.num_kv_heads
        if self.layout == "HND":
            stored = torch.zeros(blocks, 2, heads, slots, head_dim, dtype=self.dtype, device=device)
            return stored.permute(0, 1, 3, 2, 4)
        return torch.zeros(blocks, 2, slots, heads, head_dim, dtype=self.dtype, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Of one layer and head: the K bytes and the V bytes."""
        return 2 * self.layers[0].shape[-1] * self.layers[0].element_size()

    def write(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V float64 [tokens, kv_heads, head_dim], rounded to the cache's dtype."""
        cache = self.layers[layer]
        cache[blocks, K, slots] = k.to(self.dtype)
        cache[blocks, V, slots] = v.to(self.dtype)

    def read(self, layer: int, block_ids: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V float64 [context, kv_heads, head_dim] of a request's first `context` tokens."""
        kv = self.layers[layer][block_ids].to(torch.float64)
        k, v = kv[:, K].flatten(0, 1), kv[:, V].flatten(0, 1)
        return k[:context], v[:context]


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The KV memory of an engine in another process: its shape, and by `engine` who has it."""

    engine: str
    num_layers: int
    num_kv_heads: int
    num_blocks: int
    block_size: int
    bytes_per_token: int


class KVMemory:
    """What a fault or an oracle may do with the KV bytes of an engine.

    A token's bytes of one layer and head are its K bytes and then its V bytes, whatever the layout.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._watchers: list[ChangeWatcher] = []

    def watch(self, watcher: ChangeWatcher) -> None:
        """Tell `watcher` of every slot that `write_slot` or `fill` changes: (layer, head, block, slot)."""
        self._watchers.append(watcher)

    def _changed(self, layer: int, head: int, block_id: int, slot: int) -> None:
        for watcher in self._watchers:
            watcher(layer, head, block_id, slot)

    @property
    def num_layers(self) -> int:
        return len(self._cache.layers)

    @property
    def num_kv_heads(self) -> int:
        return self._cache.num_kv_heads

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def bytes_per_token(self) -> int:
        return self._cache.bytes_per_token

    def tokens(self, blocks: GroupBlocks) -> npt.NDArray[np.uint8]:
        """A copy of the valid tokens in `blocks`: uint8 [layers, kv_heads, tokens, bytes_per_token]."""
        first = blocks.start * blocks.block_size
        return self.slots(blocks.block_ids)[:, :, : blocks.num_tokens - first]

    def slots(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A copy of every slot of these blocks: uint8 [layers, kv_heads, slots, bytes_per_token]."""
        ids = torch.tensor(block_ids, dtype=torch.long, device=self._cache.layers[0].device)
        copies = []
        for layer in self._cache.layers:
            # [blocks, K|V, slot, head, element] to [head, blocks, slot, K|V, element]
            picked = layer[ids].permute(3, 0, 2, 1, 4).contiguous()
            shape = (self.num_kv_heads, len(block_ids) * self.block_size, self.bytes_per_token)
            copies.append(picked.view(torch.uint8).reshape(shape).cpu().numpy())
        return np.stack(copies)

    def write_slot(self, layer: int, head: int, block_id: int, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite the bytes of one token: uint8 [bytes_per_token]."""
        target = self._cache.layers[layer][block_id, :, slot, head]
        values = torch.from_numpy(data.copy()).view(self._cache.dtype).view(2, -1)
        target.copy_(values.to(target.device))
        self._changed(layer, head, block_id, slot)

    def fill(self, block_ids: tuple[int, ...], pattern: bytes) -> None:
        """Repeat `pattern` (8 bytes, a poison) over every slot of these blocks."""
        repeats = self.bytes_per_token // len(pattern)
        token = torch.frombuffer(bytearray(pattern * repeats), dtype=self._cache.dtype).view(2, -1)
        for number, layer in enumerate(self._cache.layers):
            for block_id in block_ids:
                layer[block_id] = token[:, None, None, :].to(layer.device)
                for head, slot in product(range(self.num_kv_heads), range(self.block_size)):
                    self._changed(number, head, block_id, slot)

    def layer_views(self) -> list[torch.Tensor]:
        """Per layer [block, K|V, slot, kv_head, element], for a transport that moves bytes by address."""
        return list(self._cache.layers)

    def region(self, layer: int, block_id: int, part: int, head: int, first: int, count: int) -> torch.Tensor:
        """A writable view [count, element] of `count` slots: what one copy operation moves."""
        return self._cache.layers[layer][block_id, part, first : first + count, head]
