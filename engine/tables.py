"""What a request's block table looks like in one KV cache group: which positions have a block, and which need one.

A table has an entry a block position. `NULL_BLOCK` stands where a sliding window has left a block behind, or where a
load brings none.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.blocks import NULL_BLOCK
from engine.checksum.records import GroupBlocks
from engine.groups import KVGroup


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


class GroupTables:
    """The rules for the tables of one group, whose blocks hold `block_size` tokens (BLK-1 to BLK-3)."""

    def __init__(self, group: KVGroup, block_size: int) -> None:
        self.group = group
        self.block_size = group.block_size(block_size)

    def length(self, num_tokens: int) -> int:
        """Entries of a table for so many tokens. A recurrent state is one block, however many they are."""
        return 1 if self.group.is_state else cdiv(num_tokens, self.block_size)

    def first_read(self, position: int) -> int:
        """The first block position that is kept for a token at `position`; nothing before it is read."""
        window = self.group.window
        return 0 if window is None else max(0, position // self.block_size - cdiv(window, self.block_size))

    def first_sent(self, num_tokens: int) -> int:
        """The first block position that a transfer of a prompt of so many tokens brings (BLK-3).

        A window group keeps its last `cdiv(window, block_size) + 1` blocks, the clip that NIXL and Mooncake apply.
        """
        return self.first_read(num_tokens - 1)

    def blocks(self, table: Sequence[int], first_token: int, num_tokens: int) -> GroupBlocks | None:
        """The blocks of a transfer of tokens [first_token, num_tokens), without leading null blocks (BLK-2).

        None: a null block follows another one, so the group is left out.
        """
        stop = self.length(num_tokens)
        start = 0 if self.group.is_state else max(first_token // self.block_size, self.first_sent(num_tokens))
        while start < stop and table[start] == NULL_BLOCK:
            start += 1
        block_ids = tuple(table[start:stop])
        if NULL_BLOCK in block_ids:
            return None
        covered = 1 if self.group.is_state else num_tokens
        return GroupBlocks(self.group.group_id, self.block_size, start, block_ids, covered)
