"""Drives the ranks of an engine and merges what they return (PRO-5): the only place between them and the scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from engine.checksum.records import WorkerRecord, WorldShape
from engine.connectors.base import TransferResults
from engine.seams import RecordArrives, RecordLeaves, Seams
from engine.step import RankOutput, StepOutput, StepPlan


class RunsSteps(Protocol):
    """All ranks of an engine, as `engine.ranks.Ranks` is."""

    def execute(self, plan: StepPlan) -> tuple[RankOutput, ...]:
        """Run one step. What each rank returns."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A step that the workers have run and whose output has not been finalised."""

    plan: StepPlan
    ranks: tuple[RankOutput, ...]


class TransferAggregator:
    """Reports a transfer once every rank has (CON-3): as failed if one rank says so, else as finished.

    A failure waits for the other ranks as well: until they are done they may still write the blocks, which the
    scheduler gives back when it hears of it (the shape of vllm-project/vllm#56104).
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sending: dict[str, set[int]] = {}
        self._receiving: dict[str, set[int]] = {}
        self._failed: set[str] = set()

    def merge(self, ranks: tuple[TransferResults, ...]) -> TransferResults:
        """Take what each rank learnt in one step."""
        checksums: dict[str, str] = {}
        for rank in ranks:
            self._failed |= rank.failed_receiving
            checksums |= rank.checksums
        sent = self._complete(self._sending, [rank.finished_sending for rank in ranks])
        received = self._complete(self._receiving, [rank.finished_receiving | rank.failed_receiving for rank in ranks])
        failed = received & self._failed
        self._failed -= failed
        return TransferResults(sent, received - failed, failed, checksums)

    def _complete(self, done_by: dict[str, set[int]], reported: list[frozenset[str]]) -> frozenset[str]:
        for rank, request_ids in enumerate(reported):
            for request_id in request_ids:
                done_by.setdefault(request_id, set()).add(rank)
        complete = frozenset(request_id for request_id, ranks in done_by.items() if len(ranks) == self._num_ranks)
        for request_id in complete:
            del done_by[request_id]
        return complete


class Executor:
    """Executes steps in order on every rank."""

    def __init__(self, engine: str, world: WorldShape, ranks: RunsSteps, seams: Seams) -> None:
        self._engine = engine
        self._world = world
        self._ranks = ranks
        self._seams = seams
        self._transfers = TransferAggregator(world.size)
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
        """Run one step on all ranks."""
        ranks = self._ranks.execute(plan)
        if len(ranks) != self._world.size:
            raise ValueError(f"{len(ranks)} ranks for a world of {self._world.size}")
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
        return step.plan, StepOutput(step.ranks[0].sampled, records, transfers, step.ranks[0].accepted)

    def _pass_on(self, record: WorkerRecord) -> WorkerRecord | None:
        leaves = self._seams.emit(RecordLeaves(self._engine, record))
        if leaves.dropped:
            return None
        arrives = self._seams.emit(RecordArrives(self._engine, leaves.event.record))
        return None if arrives.dropped else arrives.event.record
