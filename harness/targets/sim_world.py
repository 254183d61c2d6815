"""The simulated world of one cell: two engines, a proxy and a transport in one process, in virtual time.

Everything that can happen next is an action. One seeded generator picks among them, one at a time, so a seed gives
one run, and different seeds give different interleavings of arrivals, steps, copies and notices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from engine.clock import VirtualClock
from engine.config import preset
from engine.connectors.base import SchedulerConnector
from engine.connectors.fabric import Fabric
from engine.connectors.registry import CONNECTORS, transfer_of
from engine.core import EngineCore, connected_engine
from engine.groups import kv_groups
from engine.proxy import Prompt, Proxy
from engine.request import Request, RequestOutput
from engine.seams import Seams
from harness.plan import Cell
from harness.targets.workload import CONSUMER, LEASE_TICKS, PRODUCER, engine_config, make_competitors, make_prompts
from scenarios.topology import Topology

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


def deadline_of(topology: Topology, prompts: Sequence[Prompt]) -> int:
    """Actions that no clean run comes near: several times its copy operations and steps."""
    longest = max(len(prompt.token_ids) + prompt.max_tokens for prompt in prompts)
    smallest = min(side.block_size // side.kernel_block_splits for side in (topology.producer, topology.consumer))
    copies = (longest // smallest + 1) * sum(
        len(group.rows) * group.num_parts * max(group.num_heads, topology.consumer.tp)
        for group in kv_groups(preset(topology.model))
    )
    return 10_000 + len(prompts) * (4 * copies + 100 * longest)


class SimWorld:
    """Two engines and everything between them. Raises what the engines raise."""

    def __init__(self, cell: Cell, seams: Seams, on_output: Callable[[str, RequestOutput], None]) -> None:
        scenario = cell.scenario
        self._rng = random.Random(cell.world_seed)
        self._on_output = on_output
        self.clock = VirtualClock()
        self.fabric = Fabric(seams)
        self.prompts = make_prompts(scenario, cell.data_seed)
        self.deadline = deadline_of(scenario.topology, self.prompts)
        factory = CONNECTORS[cell.connector]
        self.producer, self.consumer = (
            # A load that waits for a push fails long after any clean one, and before the run is given up.
            connected_engine(
                factory,
                replace(engine_config(cell, name, side), load_ticks=self.deadline // 2),
                seams,
                self.clock,
                self.fabric,
            )
            for name, side in ((PRODUCER, scenario.topology.producer), (CONSUMER, scenario.topology.consumer))
        )
        self._arrivals = list(self.prompts)
        self._leases_ended = False
        self._in_turn = scenario.workload.in_turn
        self._unanswered = {prompt.request_id for prompt in self.prompts}
        self._proxy = Proxy(
            self.producer,
            self.consumer,
            seams,
            push=transfer_of(factory) == "push",
            bidirectional=scenario.workload.bidirectional,
        )
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
        for _ in range(self.deadline):
            actions = self._actions()
            if actions:
                self._rng.choice(actions)()
                self.clock.advance()
                self._take_outputs()
            elif not self._wind_down():
                break
        return not self._unanswered and self.quiet

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
        held = [e for e in (self.producer, self.consumer) if e.connector is not None and e.connector.num_leases]
        if held and not self._leases_ended:
            self._leases_ended = True
            self.clock.advance(LEASE_TICKS)
            for engine in held:
                engine.schedule()
            return True
        return False

    def _actions(self) -> list[Action]:
        actions: list[Action] = []
        if self._arrivals and not (self._in_turn and self._waiting_for_answer):
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
        told = engine.connector is not None and engine.connector.has_message
        waiting = scheduler.num_unfinished or fabric.num_pending or fabric.has_mail(engine.config.engine_id) or told
        return not self._unanswered and not waiting

    def _forward(self, request_id: str) -> None:
        refused = self._proxy.forward(request_id)
        if refused is not None:
            self._answer(CONSUMER, refused)

    @property
    def _waiting_for_answer(self) -> bool:
        """Whether a request that was sent has not been answered."""
        return len(self._unanswered) > len(self._arrivals)

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
