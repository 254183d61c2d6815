"""Drives the ranks of an engine and merges what they return: the rank/aggregator interface of TP x PP."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.checksum.records import WorkerRecord, WorldShape
from engine.connectors.base import TransferResults
from engine.seams import RecordArrives, RecordLeaves, Seams
from engine.step import RankOutput, StepOutput, StepPlan
from engine.worker import Worker


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A step that the workers have run and whose output has not been finalised."""

    plan: StepPlan
    ranks: tuple[RankOutput, ...]


class TransferAggregator:
    """Reports a transfer as finished once every rank has, and as failed as soon as one rank does (CON-3)."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sending: dict[str, int] = {}
        self._receiving: dict[str, int] = {}

    def merge(self, ranks: tuple[TransferResults, ...]) -> TransferResults:
        failed = frozenset().union(*(rank.failed_receiving for rank in ranks))
        for request_id in failed:
            self._receiving.pop(request_id, None)
        return TransferResults(
            finished_sending=self._count(self._sending, [rank.finished_sending for rank in ranks]),
            finished_receiving=self._count(self._receiving, [rank.finished_receiving for rank in ranks]) - failed,
            failed_receiving=failed,
        )

    def _count(self, counts: dict[str, int], finished: list[frozenset[str]]) -> frozenset[str]:
        done = set()
        for request_ids in finished:
            for request_id in request_ids:
                counts[request_id] = counts.get(request_id, 0) + 1
                if counts[request_id] == self._num_ranks:
                    done.add(request_id)
        for request_id in done:
            del counts[request_id]
        return frozenset(done)


class Executor:
    """Executes steps in order on every worker."""

    def __init__(self, engine: str, world: WorldShape, workers: list[Worker], seams: Seams) -> None:
        if len(workers) != world.size:
            raise ValueError(f"{len(workers)} workers for a world of {world.size}")
        self._engine = engine
        self._workers = workers
        self._seams = seams
        self._transfers = TransferAggregator(len(workers))
        self._executed: deque[ExecutedStep] = deque()

    @property
    def num_executed(self) -> int:
        """Steps whose output waits to be collected."""
        return len(self._executed)

    @property
    def next_output(self) -> StepPlan | None:
        """The plan of the step whose output is collected next."""
        return self._executed[0].plan if self._executed else None

    def execute(self, plan: StepPlan) -> None:
        """Run one step on all workers."""
        ranks = tuple(worker.execute(plan) for worker in self._workers)
        self._executed.append(ExecutedStep(plan, ranks))

    def collect(self) -> tuple[StepPlan, StepOutput]:
        """Finalise and merge the output of the oldest executed step."""
        step = self._executed.popleft()
        records: dict[str, list[WorkerRecord]] = {}
        for rank in step.ranks:
            for pending in rank.records:
                record = self._pass_on(pending.finalise())
                if record is not None:
                    records.setdefault(record.request_id, []).append(record)
        transfers = self._transfers.merge(tuple(rank.transfers for rank in step.ranks))
        return step.plan, StepOutput(step.ranks[0].sampled, records, transfers)

    def _pass_on(self, record: WorkerRecord) -> WorkerRecord | None:
        leaves = self._seams.emit(RecordLeaves(self._engine, record))
        if leaves.dropped:
            return None
        arrives = self._seams.emit(RecordArrives(self._engine, leaves.event.record))
        return None if arrives.dropped else arrives.event.record
