"""All ranks of an engine in lockstep: the forward through its stages, transfers, and what is checksummed when.

The order inside a step is the protocol's: loads are posted, the forward writes KV, finished prompts are summed
(PRO-2), then transfers are polled and finished loads summed before any later forward can write them (CON-2).

Heads are gathered, never partial sums added, so tokens and stored KV are the same for every (TP, PP). What each rank
would compute alike (embedding, projections behind the gather, sampling) is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from engine.batch import make_batch
from engine.cache import KVMemory
from engine.checksum.pending import PendingRecord
from engine.checksum.records import GroupBlocks
from engine.config import EngineConfig, Speculator
from engine.connectors.base import TransferResults, WorkerConnector
from engine.groups import kv_groups
from engine.model import load_model
from engine.numerics import rms_norm
from engine.seams import Checksummed, FirstUse, Forward, KVFinal, LoadFinished, LoadScheduled, Seams, SpeculatorWrote
from engine.sharding import shard_model
from engine.speculator import accept, propose
from engine.step import RankOutput, ScheduledRequest, StepPlan
from engine.worker import Worker


class Ranks:
    """The workers of one engine. `memory` is the KV of all of them; `connector` moves the KV of all of them."""

    def __init__(self, config: EngineConfig, seams: Seams) -> None:
        self._engine = config.engine_id
        self._device = config.device
        self._block_size = config.block_size
        self._seams = seams
        self._speculator = config.speculator
        self._draft_tokens = config.draft_tokens
        self._model = load_model(config.model, config.seed, config.device, config.kv_dtype)
        shards = shard_model(config.model, config.tp_size, config.pp_size)
        self._stages = [[Worker(config, shard) for shard in stage] for stage in shards]
        self.workers = [worker for stage in self._stages for worker in stage]
        groups = kv_groups(config.model)
        self._of_tokens = [group.group_id for group in groups if not group.is_state]
        self.memory = KVMemory.of_groups([[w.caches[group.group_id] for w in self.workers] for group in groups])
        self.connector: WorkerConnector | None = None
        self._last_token: dict[str, int] = {}
        self._loads: dict[str, Mapping[int, GroupBlocks]] = {}

    def execute(self, plan: StepPlan) -> tuple[RankOutput, ...]:
        """Run one step on every rank. Nothing in here waits for the device but the sampled tokens."""
        # First of all: this step may hold a new request with the id of one that has ended.
        self._forget(plan.ended)
        for worker in self.workers:
            worker.checksums.begin_step(plan)
        self._start_loads(plan)
        for request in plan.requests:
            if request.loaded is not None:
                self._seams.emit(FirstUse(self._engine, request.request_id, request.loaded, self.memory))
        sampled = self._forward(plan.requests) if plan.requests else {}
        accepted = self._speculate(self._speculator, plan, sampled) if self._speculator is not None else {}
        self._keep_sums(plan)
        records = self._checksum_prompts(plan)
        transfers = self._poll()
        self._announce_finished(transfers)
        for own, results, worker in zip(records, transfers, self.workers, strict=True):
            own += _finish_loads(worker, results)
        return tuple(
            RankOutput(sampled, tuple(own), results, accepted) for own, results in zip(records, transfers, strict=True)
        )

    def _forget(self, ended: Sequence[str]) -> None:
        """Drop what is known of requests that ended; a load in flight goes on, but is not summed (CON-2)."""
        for request_id in ended:
            self._last_token.pop(request_id, None)
            self._loads.pop(request_id, None)
            for worker in self.workers:
                worker.forget_load(request_id)

    def _start_loads(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self._loads[load.request_id] = load.groups
            self._seams.emit(LoadScheduled(self._engine, load.request_id, load.groups, self.memory))
            for worker in self.workers if load.request_id in plan.checksum_loads else ():
                worker.expect_load(load.request_id, load.groups)
        if self.connector is not None:
            self.connector.take_message(plan.message)
            self.connector.start_loads(plan.loads)

    def _keep_sums(self, plan: StepPlan) -> None:
        """Sum what this step has filled ahead of its prompt's end (EXT-8)."""
        for groups in plan.checksum_writes.values():
            for worker in self.workers:
                worker.checksums.keep(groups)

    def _checksum_prompts(self, plan: StepPlan) -> list[list[PendingRecord]]:
        """The records of each worker."""
        for request_id, groups in plan.kv_final.items():
            self._seams.emit(KVFinal(self._engine, request_id, groups, self.memory))
        records = [
            [worker.checksum_prompt(request_id, groups) for request_id, groups in plan.checksum_sends.items()]
            for worker in self.workers
        ]
        for request_id, groups in plan.kv_final.items():
            self._seams.emit(Checksummed(self._engine, request_id, groups, self.memory))
        return records

    def _poll(self) -> tuple[TransferResults, ...]:
        """What each rank has learnt."""
        if self.connector is None:
            return (TransferResults(),) * len(self.workers)
        return self.connector.poll_ranks(len(self.workers))

    def _announce_finished(self, transfers: Sequence[TransferResults]) -> None:
        """Tell of each load once, when the first rank hears that it has finished and none has summed it."""
        for results in transfers:
            for request_id in results.failed_receiving:
                self._loads.pop(request_id, None)
        for request_id in sorted(frozenset[str]().union(*(results.finished_receiving for results in transfers))):
            groups = self._loads.pop(request_id, None)
            if groups is not None:
                self._seams.emit(LoadFinished(self._engine, request_id, groups, self.memory))

    def _forward(self, requests: tuple[ScheduledRequest, ...]) -> dict[str, int]:
        """One forward over the tokens of all requests; the greedy next token of those that sample."""
        tokens = {request.request_id: self._tokens(request) for request in requests}
        for request in requests if self._seams.listened("worker.forward") else ():
            own, first = tokens[request.request_id], request.first_position
            tables = dict(enumerate(request.tables))
            self._seams.emit(Forward(self._engine, request.request_id, first, own, request.tables[0], tables))
        return self._sample(self._compute(requests, tokens), requests)

    def _compute(self, requests: Sequence[ScheduledRequest], tokens: Mapping[str, Sequence[int]]) -> torch.Tensor:
        """These tokens through all stages, whose KV is written: the residual, float64 [tokens, hidden]."""
        batch = make_batch(requests, tokens, self._block_size, self._of_tokens, self._device)
        x = self._model.embed(batch.token_ids)
        for stage in self._stages:
            for layer in stage[0].shard.layers:
                normed = rms_norm(x)
                heads = [worker.mix(layer, normed, batch) for worker in stage]
                x = self._model.finish_layer(layer, x, torch.cat(heads, dim=1))
        return x

    def _speculate(
        self, speculator: Speculator, plan: StepPlan, sampled: Mapping[str, int]
    ) -> dict[str, tuple[int, ...]]:
        """Guess what follows the sampled tokens, compute it, and keep what was right: tokens by request id."""
        shares, tokens = [], {}
        for request in plan.requests:
            blocks = min(len(request.tables[group_id]) for group_id in self._of_tokens)
            room = min(self._draft_tokens, blocks * self._block_size - request.end)
            if request.sample and room > 0:
                known = (*request.history, sampled[request.request_id])
                guesses = propose(speculator, known, room - 1)
                tokens[request.request_id] = (known[-1], *guesses)
                shares.append(replace(request, first_position=request.end, num_tokens=room))
        if not shares:
            return {}
        greedy = self._greedy(self._compute(shares, tokens))
        accepted, row = {}, 0
        for share in shares:
            request_id, written = share.request_id, tokens[share.request_id]
            accepted[request_id] = accept(written[1:], greedy[row : row + len(written)])
            row += len(written)
            right = written[: len(accepted[request_id])]
            tables = dict(enumerate(share.tables))
            self._seams.emit(Forward(self._engine, request_id, share.first_position, right, share.tables[0], tables))
            if request_id in plan.kv_final:
                at = plan.kv_final[request_id], self.memory, share.first_position, written
                self._seams.emit(SpeculatorWrote(self._engine, request_id, *at))
        return accepted

    def _greedy(self, x: torch.Tensor) -> list[int]:
        """The most likely token after each row."""
        # numpy's argmax takes the first of equal maxima; torch promises nothing.
        chosen: list[int] = self._model.logits(x).cpu().numpy().argmax(axis=-1).tolist()
        return chosen

    def _tokens(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The request's tokens in this step; the last may have been sampled by the step before."""
        if len(request.token_ids) == request.num_tokens:
            return request.token_ids
        return (*request.token_ids, self._last_token[request.request_id])

    def _sample(self, x: torch.Tensor, requests: tuple[ScheduledRequest, ...]) -> dict[str, int]:
        rows, ids, row = [], [], 0
        for request in requests:
            row += request.num_tokens
            if request.sample:
                rows.append(row - 1)
                ids.append(request.request_id)
        if not rows:
            return {}
        sampled = dict(zip(ids, self._greedy(x[rows]), strict=True))
        self._last_token.update(sampled)
        return sampled


def _finish_loads(worker: Worker, results: TransferResults) -> list[PendingRecord]:
    """Sum what this rank was told has finished (CON-2)."""
    for request_id in results.failed_receiving:
        worker.forget_load(request_id)
    found = (worker.checksum_load(request_id) for request_id in sorted(results.finished_receiving))
    return [record for record in found if record is not None]
