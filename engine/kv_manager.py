"""The blocks of an engine's requests: admission, growth, prefix cache, and giving back behind a fence.

Blocks of all KV cache groups come from one pool. Freed blocks reach it only when every step scheduled before has been
executed and collected: a step in flight may still write the slots of a request that has just ended (the shape of
vllm-ascend#14055).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.blocks import NULL_BLOCK, BlockPool, block_hashes
from engine.checksum.records import GroupBlocks
from engine.groups import KVGroup
from engine.request import Request
from engine.seams import BlocksAllocated, BlocksFreed, Seams
from engine.tables import GroupTables

GROUP = 0
"""The first KV cache group, which every model has."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Tokens that need not be computed, and the blocks that hold them: the beginning of a table in each group."""

    num_tokens: int
    tables: tuple[tuple[int, ...], ...]


class KVManager:
    """Owns the pool of one engine. `groups` are those of its model."""

    def __init__(
        self,
        engine: str,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        seams: Seams,
        groups: Sequence[KVGroup],
    ) -> None:
        self._engine = engine
        self._block_size = block_size
        # A recurrent state is that after the last token alone: no earlier one can be shared.
        self._prefix_caching = prefix_caching and not any(group.is_state for group in groups)
        self._seams = seams
        self._groups = [GroupTables(group, block_size) for group in groups]
        self._fenced: list[tuple[int, str, list[int]]] = []
        self.no_prefix = CachedPrefix(0, ((),) * len(groups))
        self.pool = BlockPool(num_blocks)

    @property
    def num_fenced(self) -> int:
        """References that wait for steps in flight."""
        return sum(len(block_ids) for _, _, block_ids in self._fenced)

    # ---- giving blocks to requests

    def cached_prefix(self, request: Request) -> CachedPrefix:
        """The request's longest prefix that every group has cached; at least one token is left to compute."""
        if not self._prefix_caching or request.recomputed:
            return self.no_prefix
        hashes = block_hashes(request.all_token_ids[: request.num_tokens - 1], self._block_size)
        whole = [tables for tables in self._groups if tables.group.window is None]
        length = min((len(self.pool.lookup(_keys(tables, hashes))) for tables in whole), default=len(hashes))
        while length:
            found = [self._cached(tables, hashes[:length]) for tables in self._groups]
            complete = tuple(table for table in found if table is not None)
            if len(complete) == len(found):
                return CachedPrefix(length * self._block_size, complete)
            length -= 1
        return self.no_prefix

    def _cached(self, tables: GroupTables, hashes: Sequence[bytes]) -> tuple[int, ...] | None:
        """A table of cached blocks for a prefix with these hashes; None if one that will be read is missing."""
        first = tables.first_read(len(hashes) * self._block_size)
        found = self.pool.lookup(_keys(tables, hashes)[first:])
        return (NULL_BLOCK,) * first + tuple(found) if len(found) == len(hashes) - first else None

    def admit(self, request: Request, prefix: CachedPrefix, num_tokens: int, loading: bool = False) -> bool:
        """Give a request without blocks a cached prefix and fresh blocks for `num_tokens` tokens, or nothing.

        `loading` says that the tokens behind the prefix are loaded, not computed: then groups have no blocks for
        positions that no transfer brings.
        """
        missing = []
        for tables, shared in zip(self._groups, prefix.tables, strict=True):
            first = max(len(shared), tables.first_sent(num_tokens) if loading else 0)
            missing.append((first - len(shared), tables.length(num_tokens) - first))
        held = [block_id for shared in prefix.tables for block_id in shared if block_id != NULL_BLOCK]
        waking = sum(self.pool.references(block_id) == 0 for block_id in held)
        if not self.pool.can_allocate(sum(fresh for _, fresh in missing) + waking):
            return False
        self.pool.share(held)
        fresh_ids = iter(self._allocate(request, sum(fresh for _, fresh in missing)))
        request.tables = [
            [*shared, *[NULL_BLOCK] * left_out, *(next(fresh_ids) for _ in range(fresh))]
            for shared, (left_out, fresh) in zip(prefix.tables, missing, strict=True)
        ]
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request the blocks that its first `num_tokens` tokens need, or nothing."""
        missing = [
            max(0, tables.length(num_tokens) - len(table))
            for tables, table in zip(self._groups, request.tables, strict=True)
        ]
        if not self.pool.can_allocate(sum(missing)):
            return False
        fresh_ids = iter(self._allocate(request, sum(missing)))
        for table, count in zip(request.tables, missing, strict=True):
            table += [next(fresh_ids) for _ in range(count)]
        return True

    def slide(self, request: Request, last_step: int) -> None:
        """Give back what lies out of the windows of the next token, once step `last_step` has been collected.

        What a consumer will read of a prompt stays.
        """
        position = request.num_computed_tokens
        if request.wants_remote_decode:
            position = min(position, request.num_prompt_tokens - 1)
        for tables, table in zip(self._groups, request.tables, strict=True):
            out = [p for p in range(tables.first_read(position)) if table[p] != NULL_BLOCK]
            if out:
                self.free(request.request_id, [table[position] for position in out], last_step)
                for position in out:
                    table[position] = NULL_BLOCK

    def blocks(self, request: Request, first_token: int, num_tokens: int) -> Mapping[int, GroupBlocks]:
        """Per group the request's blocks of tokens [first_token, num_tokens), as far as they are transferred (BLK)."""
        found = (
            tables.blocks(table, first_token, num_tokens)
            for tables, table in zip(self._groups, request.tables, strict=True)
        )
        return {blocks.group_id: blocks for blocks in found if blocks is not None}

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the request's first `num_tokens` tokens shareable."""
        if not self._prefix_caching:
            return
        full = min(num_tokens, request.num_tokens) // self._block_size
        # The hashes are a chain: nothing to do where the last full block is known already.
        if full == 0 or all(self.pool.is_cached(table[full - 1]) for table in request.tables):
            return
        hashes = block_hashes(request.all_token_ids[:num_tokens], self._block_size)
        for tables, table in zip(self._groups, request.tables, strict=True):
            for block_id, key in zip(table, _keys(tables, hashes), strict=False):
                if block_id != NULL_BLOCK:
                    self.pool.cache(block_id, key)

    # ---- taking them back

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


def _keys(tables: GroupTables, hashes: Sequence[bytes]) -> list[bytes]:
    """What a group's blocks are cached under: blocks of two groups hold different things of the same tokens."""
    return [bytes((tables.group.group_id,)) + block_hash for block_hash in hashes]
