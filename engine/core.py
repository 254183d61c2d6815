"""An engine: a scheduler and its ranks, with several steps in flight.

The three halves of a step (plan it, execute it, collect its output) are separate calls, so that whoever drives the
engine decides how they interleave with everything else. `step` does all three, for an engine that runs alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.cache import KVMemory
from engine.checksum.records import WorldShape
from engine.clock import Clock
from engine.config import EngineConfig
from engine.connectors.base import SchedulerConnector, WorkerConnector
from engine.connectors.fabric import Fabric
from engine.connectors.pull import PULL
from engine.connectors.registry import ConnectorFactory
from engine.executor import Executor
from engine.ranks import Ranks
from engine.request import FinishReason, Request, RequestOutput
from engine.scheduler import Scheduler
from engine.seams import Hold, OutputFinalised, Seams, StepEnd, StepStart, Verified
from engine.startup import usable_policy
from engine.step import StepPlan


class EngineCore:
    """One engine. Without a connector it serves requests by itself; `connect` makes the side that moves bytes."""

    def __init__(
        self,
        config: EngineConfig,
        seams: Seams | None = None,
        connector: SchedulerConnector | None = None,
        connect: Callable[[KVMemory], WorkerConnector] | None = None,
    ) -> None:
        self.config = config
        self.connector = connector
        self._seams = seams or Seams()
        self.policy = usable_policy(config, connector)
        world = WorldShape(config.tp_size, config.pp_size)
        ranks = Ranks(config, self._seams)
        if connect is not None:
            ranks.connector = connect(ranks.memory)
        self.memory: KVMemory = ranks.memory
        self.checksum_times = [worker.checksums.times for worker in ranks.workers]
        self.scheduler = Scheduler(config, self.policy, world, connector, self._seams)
        self._executor = Executor(config.engine_id, world, ranks, self._seams)
        self._planned: deque[StepPlan] = deque()
        self._start_holds: tuple[Hold, ...] | None = None
        self._output_holds: tuple[Hold, ...] | None = None

    def add_request(self, request: Request) -> None:
        """Queue a request; RequestError if it can never run here."""
        self.scheduler.add_request(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, why: str = "aborted") -> None:
        """End a request early; unknown ids are ignored."""
        self.scheduler.abort(request_id, reason, why)

    def take_finished(self) -> list[RequestOutput]:
        """Outputs of requests that ended since the last call."""
        return self.scheduler.take_finished()

    @property
    def steps_in_flight(self) -> int:
        return len(self._planned) + self._executor.num_executed

    def can_schedule(self) -> bool:
        return self.scheduler.has_work and self.steps_in_flight < self.config.steps_in_flight

    def schedule(self) -> bool:
        """Plan a step; False if there was nothing to do."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self._planned.append(plan)
        return True

    def can_execute(self) -> bool:
        if not self._planned:
            return False
        if self._start_holds is None:
            event = StepStart(self.config.engine_id, self._planned[0].step_id)
            self._start_holds = self._seams.emit(event).holds
        return all(hold.until() for hold in self._start_holds)

    def execute(self) -> None:
        """Run the oldest planned step on the workers."""
        plan = self._planned.popleft()
        self._start_holds = None
        self._executor.execute(plan)
        self._seams.emit(StepEnd(self.config.engine_id, plan.step_id))

    def can_collect(self) -> bool:
        plan = self._executor.next_output
        if plan is None:
            return False
        if self._output_holds is None:
            event = OutputFinalised(self.config.engine_id, plan.step_id)
            self._output_holds = self._seams.emit(event).holds
        return all(hold.until() for hold in self._output_holds)

    def collect(self) -> None:
        """Give the output of the oldest executed step to the scheduler."""
        plan, output = self._executor.collect()
        self._output_holds = None
        for load in self.scheduler.update(plan, output):
            request = load.request
            self._seams.emit(
                Verified(self.config.engine_id, request.request_id, request.verdict, load.groups, self.memory)
            )

    def step(self) -> list[RequestOutput]:
        """Plan, execute and collect one step, and return what finished."""
        if self.can_schedule():
            self.schedule()
        if self.can_execute():
            self.execute()
        if self.can_collect():
            self.collect()
        return self.take_finished()


def connected_engine(
    factory: ConnectorFactory, config: EngineConfig, seams: Seams, clock: Clock, fabric: Fabric
) -> EngineCore:
    """An engine with a connector, for either side."""

    def connect(memory: KVMemory) -> WorkerConnector:
        return factory.worker(config, memory, fabric)

    return EngineCore(config, seams, factory.scheduler(config, clock), connect)


def pull_engine(config: EngineConfig, seams: Seams, clock: Clock, fabric: Fabric) -> EngineCore:
    """An engine with the pull connector, for either side."""
    return connected_engine(PULL, config, seams, clock, fabric)
