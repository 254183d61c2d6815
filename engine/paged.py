"""The paged KV cache of one rank, in a physical layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.config import EngineConfig, Layout
from engine.sharding import Shard, whole_model

K, V = 0, 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class PagedKVCache:
    """One tensor a layer of the rank's stage. Block 0 is the null block: never allocated, its content never read.

    `layers[i]` is always indexed [kernel block, K|V, slot, kv_head, element]; only the strides tell the layout. Block
    `b` is the kernel blocks `b * splits` to `b * splits + splits - 1`. Layers and heads in arguments are numbered over
    the unsharded model.
    """

    def __init__(self, config: EngineConfig, shard: Shard | None = None) -> None:
        self.shard = shard or whole_model(config.model)
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.splits = config.kernel_block_splits
        self.kernel_block_size = config.block_size // config.kernel_block_splits
        self.num_kv_heads = len(self.shard.kv_heads)
        self.layout: Layout = config.layout
        self.dtype = DTYPES[config.kv_dtype]
        self.layers = [self._layer(config.model.head_dim, config.device) for _ in self.shard.layers]

    def _layer(self, head_dim: int, device: str) -> torch.Tensor:
        blocks, slots, heads = self.num_blocks * self.splits, self.kernel_block_size, self.num_kv_heads
        if self.layout == "HND":
            stored = torch.zeros(blocks, 2, heads, slots, head_dim, dtype=self.dtype, device=device)
            return stored.permute(0, 1, 3, 2, 4)
        return torch.zeros(blocks, 2, slots, heads, head_dim, dtype=self.dtype, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Of one layer and head: the K bytes and the V bytes."""
        return 2 * self.layers[0].shape[-1] * self.layers[0].element_size()

    def holds(self, layer: int, head: int) -> bool:
        return layer in self.shard.layers and head in self.shard.kv_heads

    def write(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V float64 [tokens, kv_heads, head_dim], rounded to the cache's dtype."""
        cache = self._of(layer)
        if self.splits > 1:
            blocks = blocks * self.splits + slots // self.kernel_block_size
            slots = slots % self.kernel_block_size
        cache[blocks, K, slots] = k.to(self.dtype)
        cache[blocks, V, slots] = v.to(self.dtype)

    def read(self, layer: int, block_ids: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V float64 [context, kv_heads, head_dim] of a request's first `context` tokens."""
        kv = self._of(layer)[self._kernel_blocks(block_ids)].to(torch.float64)
        k, v = kv[:, K].flatten(0, 1), kv[:, V].flatten(0, 1)
        return k[:context], v[:context]

    # ---- bytes, for transports, oracles and faults

    def slots(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A copy of every slot of these blocks: uint8 [layers, kv_heads, slots, bytes_per_token] of this rank."""
        ids = self._kernel_blocks(torch.tensor(block_ids, dtype=torch.long, device=self.layers[0].device))
        copies = []
        for layer in self.layers:
            # [kernel blocks, K|V, slot, head, element] to [head, kernel blocks, slot, K|V, element]
            picked = layer[ids].permute(3, 0, 2, 1, 4).contiguous()
            shape = (self.num_kv_heads, len(block_ids) * self.block_size, self.bytes_per_token)
            copies.append(picked.view(torch.uint8).reshape(shape).cpu().numpy())
        return np.stack(copies)

    def write_slot(self, layer: int, head: int, block_id: int, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite the bytes of one token: uint8 [bytes_per_token]."""
        kernel_block, slot = self._place(block_id, slot)
        target = self._of(layer)[kernel_block, :, slot, head - self.shard.kv_heads.start]
        values = torch.from_numpy(data.copy()).view(self.dtype).view(2, -1)
        target.copy_(values.to(target.device))

    def fill(self, block_ids: tuple[int, ...], pattern: bytes) -> None:
        """Repeat `pattern` (8 bytes) over every slot of these blocks, in every layer and head of this rank."""
        repeats = self.bytes_per_token // len(pattern)
        token = torch.frombuffer(bytearray(pattern * repeats), dtype=self.dtype).view(2, -1)
        ids = self._kernel_blocks(torch.tensor(block_ids, dtype=torch.long))
        for layer in self.layers:
            layer[ids.to(layer.device)] = token[:, None, None, :].to(layer.device)

    def region(self, layer: int, block_id: int, part: int, head: int, first: int, count: int) -> torch.Tensor:
        """A writable view [count, element] of `count` slots, all in one kernel block."""
        kernel_block, slot = self._place(block_id, first)
        return self._of(layer)[kernel_block, part, slot : slot + count, head - self.shard.kv_heads.start]

    def _of(self, layer: int) -> torch.Tensor:
        return self.layers[layer - self.shard.layers.start]

    def _place(self, block_id: int, slot: int) -> tuple[int, int]:
        """The kernel block of a slot, and the slot in it."""
        return block_id * self.splits + slot // self.kernel_block_size, slot % self.kernel_block_size

    def _kernel_blocks(self, block_ids: torch.Tensor) -> torch.Tensor:
        if self.splits == 1:
            return block_ids
        return (block_ids[:, None] * self.splits + torch.arange(self.splits, device=block_ids.device)).reshape(-1)
