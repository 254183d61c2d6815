"""The pool of KV blocks of one engine: references, the free queue, and the prefix cache on top of it."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from engine.errors import KVChaosError

NULL_BLOCK = 0


class DoubleFreeError(KVChaosError):
    """A block was given back more often than it was taken: a bookkeeping bug."""


class BlockPool:
    """Blocks 1 to num_blocks - 1. A block with no reference waits in the free queue, oldest first.

    A free block keeps its prefix-cache hash until it is allocated again, so a later request may still share it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take the `count` blocks that have been free longest; what they cached is forgotten."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free: ask can_allocate first")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._references[block_id] = 1
            self._forget(block_id)
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks found by `lookup`."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._free[block_id]
            self._references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference each; the last block is queued first, so that prefixes live longest."""
        for block_id in reversed(block_ids):
            if self._references[block_id] == 0:
                raise DoubleFreeError(f"block {block_id} is freed, but nobody holds it")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block shareable. The first block of a hash wins."""
        if block_id not in self._hash_of_block and block_hash not in self._block_of_hash:
            self._block_of_hash[block_hash] = block_id
            self._hash_of_block[block_id] = block_hash

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`."""
        return held_prefix(hashes, self._block_of_hash)

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._hash_of_block

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_of_hash[block_hash]


def block_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """A hash per full block, each over the block's tokens and the hash before it."""
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = ",".join(map(str, token_ids[start : start + block_size]))
        parent = hashlib.sha256(parent + block.encode()).digest()
        hashes.append(parent)
    return hashes


def held_prefix(hashes: Sequence[bytes], block_of_hash: Mapping[bytes, int]) -> list[int]:
    """The blocks of the longest prefix of `hashes` that has some."""
    held = itertools.takewhile(lambda block_hash: block_hash in block_of_hash, hashes)
    return [block_of_hash[block_hash] for block_hash in held]
