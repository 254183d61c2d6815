"""Which of a request's blocks are checksummed (BLK-1 to BLK-3), from its block table of one KV cache group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvchaos_vllm.records import GroupBlocks

NULL_BLOCK = 0
"""vLLM's id of the block that stands for one out of a sliding window."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the scheduler knows of a group: tokens a block, and its window in tokens if it has one."""

    group_id: int
    block_size: int
    window: int | None = None

    @property
    def max_blocks(self) -> int | None:
        """How many blocks of the window NIXL transfers at most: its own clip (BLK-3)."""
        return None if self.window is None else -(-self.window // self.block_size) + 1


def blocks_of(shape: GroupShape, table: Sequence[int], first_token: int, num_tokens: int) -> GroupBlocks | None:
    """The blocks that hold tokens `[first_token, num_tokens)` of a request and that a transfer moves.

    Args:
        table: block ids by block position, the null block where there is none.
        first_token: at the start of a block, or the block that holds it is taken whole.
        num_tokens: tokens of the request that the blocks hold, from its first.

    Returns:
        None if the group is left out: nothing is left of it, the table is too short, or a null block comes after
        another one (BLK-2).
    """
    stop = -(-num_tokens // shape.block_size)
    start = first_token // shape.block_size
    if stop > len(table) or start >= stop:
        return None
    if shape.max_blocks is not None:
        start = max(start, stop - shape.max_blocks)
    while start < stop and table[start] == NULL_BLOCK:
        start += 1
    ids = tuple(table[start:stop])
    if not ids or NULL_BLOCK in ids:
        return None
    return GroupBlocks(shape.group_id, shape.block_size, start, ids, num_tokens)
