"""One rank: its part of the paged caches, of every mixer, and of every checksum.

The ranks of an engine live in one process and run in lockstep (`engine.ranks`), which stands in for what collectives
do elsewhere: a rank gets the whole residual and gives back its heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.batch import Batch
from engine.checksum.pending import PendingRecord
from engine.checksum.records import GroupBlocks
from engine.checksum.worker import ChecksumWorker
from engine.config import EngineConfig
from engine.groups import cache_places, kv_groups
from engine.model import load_model
from engine.model.mixer import AttentionMixer, Parts
from engine.model.state import RecurrentMixer
from engine.paged import PagedKVCache, StateCache
from engine.sharding import Shard
from engine.tables import cdiv


class Worker:
    """Rank (shard.tp_rank, shard.pp_rank) of an engine. `caches` has an item for each KV cache group."""

    def __init__(self, config: EngineConfig, shard: Shard) -> None:
        self.shard = shard
        self._block_size = config.block_size
        self._model = load_model(config.model, config.seed, config.device, config.kv_dtype)
        self._places = cache_places(config.model)
        self.caches = [
            (StateCache if group.is_state else PagedKVCache)(config, group, shard) for group in kv_groups(config.model)
        ]
        self.checksums = ChecksumWorker(self.caches, shard.tp_rank, shard.pp_rank, config.checksum)
        self._loads_to_check: dict[str, Mapping[int, GroupBlocks]] = {}

    def mix(self, layer: int, normed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Run the layer's mixer over the paged caches: what it keeps of the batch's tokens goes there first.

        Args:
            normed: the normed residual, float64 [tokens, hidden].

        Returns:
            float64 [tokens, heads, head_dim] of this rank's heads.
        """
        mixer = self._model.mixers[layer]
        projected = mixer.project(normed, batch.positions, self.shard)
        if isinstance(mixer, RecurrentMixer):
            return self._scan(layer, mixer, projected.query, batch)
        written = [place for place in self._places[layer] if place.writes]
        for place, parts in zip(written, projected.entries, strict=True):
            where = batch.groups[place.group_id]
            self.caches[place.group_id].write(place.row, where.block_ids, where.slots, *parts)
        return self._attend(layer, mixer, projected.query, batch)

    def _attend(self, layer: int, mixer: AttentionMixer, query: Parts, batch: Batch) -> torch.Tensor:
        """Attention over what the caches hold, also of this step's own tokens."""
        size, places = self._block_size, self._places[layer]
        window = self.caches[places[0].group_id].group.window
        mixed = []
        for number, request, rows in batch.shares():
            first, context = request.first_position, request.first_position + request.num_tokens
            block = 0 if window is None else max(0, first - window + 1) // size
            held = []
            for place in places:
                table = batch.groups[place.group_id].tables[number][block : cdiv(context, size)]
                held.append(self.caches[place.group_id].read(place.row, table, context - block * size))
            own = tuple(part[rows] for part in query)
            mixed.append(mixer.attend(own, held, first, block * size, self.shard))
        return torch.cat(mixed)

    def _scan(self, layer: int, mixer: RecurrentMixer, query: Parts, batch: Batch) -> torch.Tensor:
        """Take each request's state on over its tokens."""
        (place,) = self._places[layer]
        cache = self.caches[place.group_id]
        if not isinstance(cache, StateCache):
            raise TypeError(f"group {place.group_id} holds no states")
        mixed = []
        for _, request, rows in batch.shares():
            (block_id,) = request.tables[place.group_id]
            state = cache.load(place.row, block_id, transferred=request.loaded is not None)
            if request.first_position == 0:
                state = torch.zeros_like(state)
            outputs, before, after = mixer.scan(tuple(part[rows] for part in query), state, self.shard)
            cache.store(place.row, block_id, before, after)
            mixed.append(outputs)
        return torch.cat(mixed)

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
