"""Blocks of KV as faults see them: which slots count, giving them other bytes, and what came of it.

Evidence counts only slots that hold prompt tokens: what lies behind the last of them is nobody's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.seams import LoadFinished
from faults.base import digest

Bytes = npt.NDArray[np.uint8]
Rearrange = Callable[[Bytes], Bytes]
"""Makes other bytes of those of a load: uint8 [layers, kv_heads, blocks, slots, bytes_per_token], same shape."""


@dataclass(frozen=True, slots=True)
class ChangedBlock:
    """A block whose prompt tokens are not what they should be, or were: digests of them before and after."""

    position: int
    block_id: int
    before: str
    after: str
    group: int = 0


def tokens_in(blocks: GroupBlocks, position: int) -> int:
    """How many prompt tokens the block at this position holds."""
    return min(blocks.block_size, blocks.num_tokens - position * blocks.block_size)


def place_of(blocks: GroupBlocks, token: int) -> tuple[int, int] | None:
    """Block and slot of the token at this position in the request; None if it is in none of these blocks."""
    position, slot = divmod(token, blocks.block_size)
    return (blocks.block_ids[position - blocks.start], slot) if position in blocks.positions else None


def write_block(memory: KVMemory, block_id: int, kv: Bytes) -> None:
    """Let a block hold uint8 [layers, kv_heads, slots, bytes_per_token]; slots that hold it already are left alone."""
    now = memory.slots((block_id,))
    for layer, head, slot in np.argwhere((now != kv).any(axis=-1)):
        memory.write_slot(int(layer), int(head), block_id, int(slot), kv[layer, head, slot])


def rearrange_load(event: LoadFinished, rearrange: Rearrange) -> Iterator[ChangedBlock]:
    """Give all blocks of a load other bytes, made of their own. Yields those whose prompt tokens changed."""
    for blocks in event.groups.values():
        memory = event.memory.group(blocks.group_id)
        old = memory.slots(blocks.block_ids)
        old = old.reshape(*old.shape[:2], len(blocks.block_ids), blocks.block_size, -1)
        new = rearrange(old)
        for index, (position, block_id) in enumerate(zip(blocks.positions, blocks.block_ids, strict=True)):
            write_block(memory, block_id, new[:, :, index])
            valid = slice(tokens_in(blocks, position))
            before, after = digest(old[:, :, index, valid]), digest(memory.slots((block_id,))[:, :, valid])
            if before != after:
                yield ChangedBlock(position, block_id, before, after, blocks.group_id)
