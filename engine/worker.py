"""One rank: runs the forward of a step over its paged cache, moves KV, and checksums what it was told to.

The order inside a step is the protocol's: loads are posted, the forward writes KV, finished prompts are summed
(PRO-2), then transfers are polled and finished loads summed before any later forward can write them (CON-2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.cache import KVMemory, PagedKVCache
from engine.checksum.records import GroupBlocks
from engine.checksum.worker import ChecksumWorker, LayerSpec, PendingRecord
from engine.config import EngineConfig
from engine.connectors.base import TransferResults, WorkerConnector
from engine.model import load_model
from engine.seams import Checksummed, FirstUse, Forward, KVFinal, LoadFinished, LoadScheduled, Seams
from engine.step import RankOutput, ScheduledRequest, StepPlan


class Worker:
    """Rank (0, 0) of one. Everything that TP x PP will shard is reached through `cache` and `checksums`."""

    def __init__(self, config: EngineConfig, seams: Seams) -> None:
        self._engine = config.engine_id
        self._device = config.device
        self._seams = seams
        self._block_size = config.block_size
        self._model = load_model(config.model, config.seed, config.device)
        self.cache = PagedKVCache(config)
        self.memory = KVMemory(self.cache)
        specs = [
            LayerSpec(f"model.layers.{i}.self_attn.attn", "full_attention", config.kv_dtype)
            for i in range(config.model.num_layers)
        ]
        trigger = config.checksum.kv_checksum_trigger
        self._checksums = ChecksumWorker(self.cache, specs, tp_rank=0, pp_rank=0, first_head=0, trigger=trigger)
        self.checksum_times = self._checksums.times
        self.connector: WorkerConnector | None = None
        self._last_token: dict[str, int] = {}
        self._loads: dict[str, Mapping[int, GroupBlocks]] = {}
        self._checksum_loads: set[str] = set()

    def execute(self, plan: StepPlan) -> RankOutput:
        """Run one step. Nothing in here waits for the device but the sampled tokens."""
        # First of all: this step may hold a new request with the id of one that has ended.
        self._forget(plan.ended)
        self._checksums.begin_step(plan)
        self._start_loads(plan)
        for request in plan.requests:
            if request.loaded is not None:
                self._seams.emit(FirstUse(self._engine, request.request_id, request.loaded, self.memory))
        sampled = self._forward(plan.requests) if plan.requests else {}
        for groups in plan.checksum_writes.values():
            self._checksums.keep(groups)
        records = self._checksum_prompts(plan)
        transfers = self.connector.poll() if self.connector is not None else TransferResults()
        records += self._finish_loads(transfers)
        return RankOutput(sampled, tuple(records), transfers)

    def _forget(self, ended: Sequence[str]) -> None:
        """Drop what is known of requests that ended; a load in flight goes on, but is not summed (CON-2)."""
        for request_id in ended:
            self._last_token.pop(request_id, None)
            self._loads.pop(request_id, None)
            self._checksum_loads.discard(request_id)

    def _start_loads(self, plan: StepPlan) -> None:
        self._checksum_loads |= plan.checksum_loads
        for load in plan.loads:
            self._loads[load.request_id] = load.groups
            self._seams.emit(LoadScheduled(self._engine, load.request_id, load.groups, self.memory))
        if self.connector is not None:
            self.connector.start_loads(plan.loads)

    def _checksum_prompts(self, plan: StepPlan) -> list[PendingRecord]:
        for request_id, groups in plan.kv_final.items():
            self._seams.emit(KVFinal(self._engine, request_id, groups, self.memory))
        records = [self._checksums.checksum(request_id, groups) for request_id, groups in plan.checksum_sends.items()]
        for request_id, groups in plan.kv_final.items():
            self._seams.emit(Checksummed(self._engine, request_id, groups, self.memory))
        return records

    def _finish_loads(self, transfers: TransferResults) -> list[PendingRecord]:
        for request_id in transfers.failed_receiving:
            self._loads.pop(request_id, None)
            self._checksum_loads.discard(request_id)
        records = []
        for request_id in sorted(transfers.finished_receiving):
            groups = self._loads.pop(request_id, None)
            if groups is None:
                continue
            self._seams.emit(LoadFinished(self._engine, request_id, groups, self.memory))
            if request_id in self._checksum_loads:
                self._checksum_loads.discard(request_id)
                records.append(self._checksums.checksum(request_id, groups, received=True))
        return records

    def _forward(self, requests: tuple[ScheduledRequest, ...]) -> dict[str, int]:
        """One forward over the tokens of all requests; the greedy next token of those that sample."""
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for request in requests:
            last = [self._last_token[request.request_id]] if len(request.token_ids) < request.num_tokens else []
            tokens += [*request.token_ids, *last]
            span = range(request.first_position, request.first_position + request.num_tokens)
            positions += span
            blocks += [request.block_ids[position // self._block_size] for position in span]
            if self._seams.listened("worker.forward"):
                own = tuple(tokens[-request.num_tokens :])
                first = request.first_position
                self._seams.emit(Forward(self._engine, request.request_id, first, own, request.block_ids))
        where = torch.tensor(positions, dtype=torch.long, device=self._device)
        block_ids = torch.tensor(blocks, dtype=torch.long, device=self._device)
        tables = [torch.tensor(request.block_ids, dtype=torch.long, device=self._device) for request in requests]
        x = self._model.embed(torch.tensor(tokens, dtype=torch.long, device=self._device))
        for layer in range(self._model.config.num_layers):
            q, k, v = self._model.qkv(layer, x, where)
            self.cache.write(layer, block_ids, where % self._block_size, k, v)
            x = self._model.finish_layer(layer, x, self._attend(layer, q, requests, tables))
        return self._sample(x, requests)

    def _attend(
        self, layer: int, q: torch.Tensor, requests: tuple[ScheduledRequest, ...], tables: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attention over the paged cache, also for this step's own tokens: float64 [tokens, heads, head_dim]."""
        attended, row = [], 0
        for request, table in zip(requests, tables, strict=True):
            context = request.first_position + request.num_tokens
            used = table[: -(-context // self._block_size)]
            k, v = self.cache.read(layer, used, context)
            attended.append(self._model.attend(q[row : row + request.num_tokens], k, v, request.first_position))
            row += request.num_tokens
        return torch.cat(attended)

    def _sample(self, x: torch.Tensor, requests: tuple[ScheduledRequest, ...]) -> dict[str, int]:
        rows, ids, row = [], [], 0
        for request in requests:
            row += request.num_tokens
            if request.sample:
                rows.append(row - 1)
                ids.append(request.request_id)
        if not rows:
            return {}
        # numpy's argmax takes the first of equal maxima; torch promises nothing.
        chosen = self._model.logits(x[rows]).cpu().numpy().argmax(axis=-1)
        sampled = {request_id: int(token) for request_id, token in zip(ids, chosen, strict=True)}
        self._last_token.update(sampled)
        return sampled
