"""The blocks of an engine's requests: admission, growth, prefix cache, and giving back behind a fence.

Freed blocks reach the pool only when every step scheduled before has been executed and collected: a step in
flight may still write the slots of a request that has just ended (the shape of vllm-ascend#14055).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.blocks import BlockPool, block_hashes
from engine.checksum.records import GroupBlocks
from engine.request import Request
from engine.seams import BlocksAllocated, BlocksFreed, Seams

GROUP = 0  # the one full-attention KV cache group


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


class KVManager:
    """Owns the pool of one engine."""

    def __init__(self, engine: str, num_blocks: int, block_size: int, prefix_caching: bool, seams: Seams) -> None:
        self._engine = engine
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._seams = seams
        self._fenced: list[tuple[int, str, list[int]]] = []
        self.pool = BlockPool(num_blocks)

    @property
    def num_fenced(self) -> int:
        """References that wait for steps in flight."""
        return sum(len(block_ids) for _, _, block_ids in self._fenced)

    def cached_prefix(self, request: Request) -> list[int]:
        """Blocks of the request's longest cached prefix; at least one token is left to compute."""
        if not self._prefix_caching or request.recomputed:
            return []
        usable = request.all_token_ids[: request.num_tokens - 1]
        return self.pool.lookup(block_hashes(usable, self._block_size))

    def admit(self, request: Request, shared: Sequence[int], num_tokens: int) -> bool:
        """Give a request without blocks a cached prefix and fresh blocks for `num_tokens` tokens, or nothing."""
        fresh = cdiv(num_tokens, self._block_size) - len(shared)
        waking = sum(self.pool.references(block_id) == 0 for block_id in shared)
        if not self.pool.can_allocate(fresh + waking):
            return False
        self.pool.share(shared)
        request.block_ids = [*shared, *self._allocate(request, fresh)]
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request the blocks that its first `num_tokens` tokens need, or nothing."""
        missing = cdiv(num_tokens, self._block_size) - len(request.block_ids)
        if not self.pool.can_allocate(max(missing, 0)):
            return False
        request.block_ids += self._allocate(request, max(missing, 0))
        return True

    def blocks(self, request: Request, start: int, num_tokens: int) -> GroupBlocks:
        """The request's blocks from block position `start` on, as far as its first `num_tokens` tokens go (BLK-1)."""
        block_ids = tuple(request.block_ids[start : cdiv(num_tokens, self._block_size)])
        return GroupBlocks(GROUP, self._block_size, start, block_ids, num_tokens)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the request's first `num_tokens` tokens shareable."""
        if not self._prefix_caching:
            return
        full = min(num_tokens, request.num_tokens) // self._block_size
        # The hashes are a chain: nothing to do where the last full block is known already.
        if full == 0 or self.pool.is_cached(request.block_ids[full - 1]):
            return
        for block_id, block_hash in zip(
            request.block_ids, block_hashes(request.all_token_ids[:num_tokens], self._block_size), strict=False
        ):
            self.pool.cache(block_id, block_hash)

    def free(self, request_id: str, block_ids: list[int], last_step: int) -> None:
        """Give back one reference to each block once step `last_step` has been collected."""
        if block_ids:
            self._fenced.append((last_step, request_id, block_ids))

    def release(self, collected_step: int) -> None:
        """Let blocks through the fence whose steps have been collected."""
        waiting = []
        for step_id, request_id, block_ids in self._fenced:
            if step_id > collected_step:
                waiting.append((step_id, request_id, block_ids))
            else:
                self.pool.free(block_ids)
                self._seams.emit(BlocksFreed(self._engine, request_id, tuple(block_ids)))
        self._fenced = waiting

    def _allocate(self, request: Request, count: int) -> list[int]:
        if count == 0:
            return []
        block_ids = self.pool.allocate(count)
        self._seams.emit(BlocksAllocated(self._engine, request.request_id, tuple(block_ids)))
        return block_ids
