"""The paged caches of one KV cache group on one rank, in a physical layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.config import EngineConfig, Layout
from engine.groups import KVGroup, kv_groups
from engine.numerics import DTYPES
from engine.sharding import Shard, whole_model

K, V = 0, 1


class PagedKVCache:
    """One tensor for each cache of the group in the rank's stage. Block 0 is the null block: its content is never read.

    `layers[i]` is always indexed [kernel block, part, slot, kv_head, element]; only the strides tell the layout. Block
    `b` is the kernel blocks `b * splits` to `b * splits + splits - 1`. Rows (caches of the group) and heads in
    arguments are numbered over the unsharded model.
    """

    def __init__(self, config: EngineConfig, group: KVGroup | None = None, shard: Shard | None = None) -> None:
        """Without a group: the model's first. Without a shard: that of the only rank."""
        self.group = group or kv_groups(config.model)[0]
        self.shard = shard or whole_model(config.model)
        self.rows = [n for n, row in enumerate(self.group.rows) if row.layers[0] in self.shard.layers]
        self.heads = self.shard.run(self.group.num_heads)
        self.replica = self.shard.replica(self.group.num_heads)
        self.num_replicas = self.shard.num_replicas(self.group.num_heads)
        self.block_size = self.group.block_size(config.block_size)
        self.num_blocks = config.num_blocks
        self.splits = 1 if self.group.is_state else config.kernel_block_splits
        self.kernel_block_size = self.block_size // self.splits
        self.layout: Layout = config.layout
        self.kv_dtype = config.kv_dtype
        self.dtype = DTYPES[config.kv_dtype]
        device = "cpu" if self.group.host_resident else config.device
        self.layers = [self._tensor(device) for _ in self.rows]

    def _tensor(self, device: str) -> torch.Tensor:
        blocks, parts, slots = self.num_blocks * self.splits, self.group.num_parts, self.kernel_block_size
        heads, width = len(self.heads), self.group.width
        if self.group.packed_heads:
            # A head slot holds two heads side by side, so all of a token's heads lie together in either layout.
            packed = torch.zeros(blocks, parts, slots, heads * width, dtype=self.dtype, device=device)
            return packed.view(blocks, parts, slots, heads, width)
        if self.layout == "HND":
            stored = torch.zeros(blocks, parts, heads, slots, width, dtype=self.dtype, device=device)
            return stored.permute(0, 1, 3, 2, 4)
        return torch.zeros(blocks, parts, slots, heads, width, dtype=self.dtype, device=device)

    @property
    def num_kv_heads(self) -> int:
        return len(self.heads)

    @property
    def bytes_per_token(self) -> int:
        """Of one cache and head: the bytes of all parts, such as K and then V."""
        return self.group.num_parts * self.group.width * self.dtype.itemsize

    def holds(self, row: int, head: int) -> bool:
        return row in self.rows and head in self.heads

    def write(self, row: int, blocks: torch.Tensor, slots: torch.Tensor, *parts: torch.Tensor) -> None:
        """Store the parts, float64 [tokens, kv_heads, width] each, rounded to the cache's dtype."""
        cache = self._of(row)
        if self.splits > 1:
            blocks = blocks * self.splits + slots // self.kernel_block_size
            slots = slots % self.kernel_block_size
        for number, part in enumerate(parts):
            cache[blocks, number, slots] = part.to(self.dtype)

    def read(self, row: int, block_ids: torch.Tensor, context: int) -> tuple[torch.Tensor, ...]:
        """The parts, float64 [context, kv_heads, width] each, of the first `context` tokens in these blocks."""
        kv = self._of(row)[self._kernel_blocks(block_ids)].to(torch.float64)
        return tuple(kv[:, number].flatten(0, 1)[:context] for number in range(self.group.num_parts))

    # ---- bytes, for transports, oracles and faults

    def slots(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A copy of every slot of these blocks: uint8 [rows, kv_heads, slots, bytes_per_token] of this rank."""
        ids = self._kernel_blocks(torch.tensor(block_ids, dtype=torch.long))
        copies = []
        for layer in self.layers:
            # [kernel blocks, part, slot, head, element] to [head, kernel blocks, slot, part, element]
            picked = layer[ids.to(layer.device)].permute(3, 0, 2, 1, 4).contiguous()
            shape = (self.num_kv_heads, len(block_ids) * self.block_size, self.bytes_per_token)
            copies.append(picked.view(torch.uint8).reshape(shape).cpu().numpy())
        return np.stack(copies)

    def write_slot(self, row: int, head: int, block_id: int, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite the bytes of one token: uint8 [bytes_per_token]."""
        kernel_block, slot = self._place(block_id, slot)
        target = self._of(row)[kernel_block, :, slot, head - self.heads.start]
        values = torch.from_numpy(data.copy()).view(self.dtype).view(self.group.num_parts, -1)
        target.copy_(values.to(target.device))

    def fill(self, block_ids: tuple[int, ...], pattern: bytes) -> None:
        """Repeat `pattern` (8 bytes) over every slot of these blocks, in every cache and head of this rank."""
        repeats = self.bytes_per_token // len(pattern)
        token = torch.frombuffer(bytearray(pattern * repeats), dtype=self.dtype).view(self.group.num_parts, -1)
        ids = self._kernel_blocks(torch.tensor(block_ids, dtype=torch.long))
        for layer in self.layers:
            layer[ids.to(layer.device)] = token[:, None, None, :].to(layer.device)

    def region(self, row: int, block_id: int, part: int, head: int, first: int, count: int) -> torch.Tensor:
        """A writable view [count, element] of `count` slots, all in one kernel block."""
        kernel_block, slot = self._place(block_id, first)
        return self._of(row)[kernel_block, part, slot : slot + count, head - self.heads.start]

    def _of(self, row: int) -> torch.Tensor:
        return self.layers[row - self.rows[0]]

    def _place(self, block_id: int, slot: int) -> tuple[int, int]:
        """The kernel block of a slot, and the slot in it."""
        return block_id * self.splits + slot // self.kernel_block_size, slot % self.kernel_block_size

    def _kernel_blocks(self, block_ids: torch.Tensor) -> torch.Tensor:
        if self.splits == 1:
            return block_ids
        return (block_ids[:, None] * self.splits + torch.arange(self.splits, device=block_ids.device)).reshape(-1)


class StateCache(PagedKVCache):
    """The caches of a recurrent group: a block is the state of one request before its last token, which is what a
    consumer that computes that token again needs. The state after it is kept beside, and never transferred.
    """

    def __init__(self, config: EngineConfig, group: KVGroup, shard: Shard) -> None:
        super().__init__(config, group, shard)
        self._after = [torch.zeros_like(layer[:, 0, 0]) for layer in self.layers]

    def load(self, row: int, block_id: int, transferred: bool) -> torch.Tensor:
        """The state to go on from, float64 [heads, width]: that of the block, where it was `transferred`."""
        index = row - self.rows[0]
        found = self.layers[index][block_id, 0, 0] if transferred else self._after[index][block_id]
        return found.to(torch.float64)

    def store(self, row: int, block_id: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep the states before and after a request's last token, float64 [heads, width] each."""
        index = row - self.rows[0]
        self.layers[index][block_id, 0, 0] = before.to(self.dtype)
        self._after[index][block_id] = after.to(self.dtype)
