"""One rank: its part of the paged cache, of every attention, and of every checksum.

The ranks of an engine live in one process and run in lockstep (`engine.ranks`), which stands in for what collectives
do elsewhere: a rank gets the whole residual and gives back its heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.batch import Batch
from engine.checksum.records import GroupBlocks
from engine.checksum.worker import ChecksumWorker, LayerSpec, PendingRecord
from engine.config import EngineConfig
from engine.model import load_model
from engine.paged import PagedKVCache
from engine.sharding import Shard


class Worker:
    """Rank (shard.tp_rank, shard.pp_rank) of an engine."""

    def __init__(self, config: EngineConfig, shard: Shard) -> None:
        self.shard = shard
        self.cache = PagedKVCache(config, shard)
        self._block_size = config.block_size
        self._model = load_model(config.model, config.seed, config.device)
        specs = [
            LayerSpec(f"model.layers.{layer}.self_attn.attn", "full_attention", config.kv_dtype)
            for layer in shard.layers
        ]
        self.checksums = ChecksumWorker(
            self.cache,
            specs,
            shard.tp_rank,
            shard.pp_rank,
            shard.kv_heads.start,
            replica=shard.replica,
            num_replicas=shard.num_replicas,
            check_replicas=config.checksum.check_replicas,
            trigger=config.checksum.kv_checksum_trigger,
        )
        self._loads_to_check: dict[str, Mapping[int, GroupBlocks]] = {}

    def attend(self, layer: int, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write K and V of the batch's tokens, and attend over the paged cache, also for these very tokens.

        Args:
            x: the residual, float64 [tokens, hidden].

        Returns:
            float64 [tokens, heads, head_dim] of this rank's heads.
        """
        q, k, v = self._model.qkv(layer, x, batch.positions, self.shard)
        self.cache.write(layer, batch.block_ids, batch.slots, k, v)
        attended = []
        for request, rows, table in batch.shares():
            context = request.first_position + request.num_tokens
            k, v = self.cache.read(layer, table[: -(-context // self._block_size)], context)
            attended.append(self._model.attend(q[rows], k, v, request.first_position))
        return torch.cat(attended)

    def expect_load(self, request_id: str, groups: Mapping[int, GroupBlocks]) -> None:
        """This load is to be checksummed once it has finished (CON-1)."""
        self._loads_to_check[request_id] = groups

    def forget_load(self, request_id: str) -> None:
        """The load failed or its request ended: it is not checksummed (CON-2)."""
        self._loads_to_check.pop(request_id, None)

    def checksum_load(self, request_id: str) -> PendingRecord | None:
        """Sum a load that this rank was told has finished; None if it is not to be summed."""
        groups = self._loads_to_check.pop(request_id, None)
        return None if groups is None else self.checksums.checksum(request_id, groups, received=True)

    def checksum_prompt(self, request_id: str, groups: Mapping[int, GroupBlocks]) -> PendingRecord:
        """Sum a prompt's blocks for its consumer."""
        return self.checksums.checksum(request_id, groups)
