"""The simulated world of one cell: two engines, a proxy and a transport in one process, in virtual time.

Everything that can happen next is an action. One seeded generator picks among them, one at a time, so a seed gives
one run, and different seeds give different interleavings of arrivals, steps, copies and notices.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.clock import VirtualClock
from engine.connectors.base import SchedulerConnector
from engine.connectors.fabric import Fabric
from engine.connectors.registry import CONNECTORS
from engine.core import EngineCore, connected_engine
from engine.proxy import Prompt, Proxy
from engine.request import Request, RequestOutput
from engine.seams import Seams
from harness.plan import Cell
from harness.targets.workload import CONSUMER, LEASE_TICKS, PRODUCER, engine_config, make_competitors, make_prompts

Action = Callable[[], object]


@dataclass(slots=True, eq=False)
class SimClock:
    """The clock lever: leases of the producer."""

    leases: SchedulerConnector

    def end_lease(self, request_id: str) -> bool:
        if not self.leases.holds_lease(request_id):
            return False
        self.leases.end_lease(request_id)
        return True


@dataclass(slots=True, eq=False)
class SimCompetitors:
    """The competitor lever: prefills that fill the producer's whole pool."""

    producer: EngineCore
    waiting: list[Prompt]
    running: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    def release(self) -> str | None:
        if not self.waiting:
            return None
        prompt = self.waiting.pop(0)
        self.running.add(prompt.request_id)
        self.producer.add_request(Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens))
        return prompt.request_id

    def has_finished(self, request_id: str) -> bool:
        return request_id in self.finished

    def take(self, output: RequestOutput) -> bool:
        """Whether an output of the producer was a competitor's."""
        if output.request_id not in self.running:
            return False
        self.running.remove(output.request_id)
        self.finished.add(output.request_id)
        return True


class SimWorld:
    """Two engines and everything between them. Raises what the engines raise."""

    def __init__(self, cell: Cell, seams: Seams, on_output: Callable[[str, RequestOutput], None]) -> None:
        scenario = cell.scenario
        self._rng = random.Random(cell.world_seed)
        self._on_output = on_output
        self.clock = VirtualClock()
        self.fabric = Fabric(seams)
        self.producer, self.consumer = (
            connected_engine(
                CONNECTORS[cell.connector], engine_config(cell, name, side), seams, self.clock, self.fabric
            )
            for name, side in ((PRODUCER, scenario.topology.producer), (CONSUMER, scenario.topology.consumer))
        )
        self.prompts = make_prompts(scenario, cell.data_seed)
        self._arrivals = list(self.prompts)
        self._leases_ended = False
        self._unanswered = {prompt.request_id for prompt in self.prompts}
        self._proxy = Proxy(self.producer, self.consumer, seams)
        self.competitors = SimCompetitors(self.producer, make_competitors(scenario, self._rng, self.producer.config))

    @property
    def all_prompts(self) -> dict[str, tuple[int, ...]]:
        """The prompt of every request that either engine may see."""
        return {prompt.request_id: prompt.token_ids for prompt in (*self.prompts, *self.competitors.waiting)}

    @property
    def leases(self) -> SchedulerConnector:
        connector = self.producer.connector
        if connector is None:
            raise TypeError("the simulated producer has a connector")
        return connector

    def run(self) -> bool:
        """Run until every request is answered and nothing is left to do. False: the deadline came first."""
        for _ in range(self._deadline()):
            actions = self._actions()
            if actions:
                self._rng.choice(actions)()
                self.clock.advance()
                self._take_outputs()
            elif not self._wind_down():
                break
        return not self._unanswered and self.quiet

    def _deadline(self) -> int:
        """Actions that no clean run comes near: several times its copy operations and steps."""
        model = self.consumer.config.model
        longest = max(len(prompt.token_ids) + prompt.max_tokens for prompt in self.prompts)
        smallest = min(self.producer.memory.kernel_block_size, self.consumer.memory.kernel_block_size)
        copies = (longest // smallest + 1) * model.num_layers * 2 * model.num_kv_heads
        copies *= self.consumer.memory.num_replicas
        return 10_000 + len(self.prompts) * (4 * copies + 100 * longest)

    @property
    def quiet(self) -> bool:
        """No request, load, lease, copy or step is left anywhere."""
        engines = (self.producer, self.consumer)
        busy = any(engine.scheduler.has_work or engine.steps_in_flight for engine in engines)
        return not busy and not self.fabric.num_pending and not self._proxy.num_pending

    def _wind_down(self) -> bool:
        """Nothing can happen by itself: let in who still waits for time. False: nobody does."""
        if not self._unanswered and self.competitors.waiting:
            self.competitors.release()
            return True
        if self.leases.num_leases and not self._leases_ended:
            self._leases_ended = True
            self.clock.advance(LEASE_TICKS)
            self.producer.schedule()
            return True
        return False

    def _actions(self) -> list[Action]:
        actions: list[Action] = []
        if self._arrivals:
            actions.append(self._arrive)
        for engine in (self.producer, self.consumer):
            if engine.can_schedule() and not self._idle(engine):
                actions.append(engine.schedule)
            if engine.can_execute():
                actions.append(engine.execute)
            if engine.can_collect():
                actions.append(engine.collect)
        actions += [partial(self._forward, request_id) for request_id in self._proxy.ready()]
        return actions + self.fabric.ready()

    def _idle(self, engine: EngineCore) -> bool:
        """Polling for a notice that nothing will send any more: time alone would end it."""
        scheduler, fabric = engine.scheduler, self.fabric
        waiting = scheduler.num_unfinished or fabric.num_pending or fabric.has_mail(engine.config.engine_id)
        return not self._unanswered and not waiting

    def _forward(self, request_id: str) -> None:
        refused = self._proxy.forward(request_id)
        if refused is not None:
            self._answer(CONSUMER, refused)

    def _arrive(self) -> None:
        self._proxy.submit(self._arrivals.pop(0))

    def _take_outputs(self) -> None:
        for output in self.producer.take_finished():
            if self.competitors.take(output):
                continue
            failed = self._proxy.prefilled(output)
            if failed is not None:
                self._answer(PRODUCER, failed)
        for output in self.consumer.take_finished():
            self._answer(CONSUMER, output)

    def _answer(self, engine: str, output: RequestOutput) -> None:
        self._unanswered.discard(output.request_id)
        self._on_output(engine, output)
