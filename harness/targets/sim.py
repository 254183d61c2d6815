"""Target `sim`: both engines in one process, virtual time, one seeded sequence of choices."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.errors import StartupError
from engine.request import RequestOutput
from engine.seams import SEAMS, Seams
from faults.base import Evidence, FaultContext
from faults.levers import CLOCK, COMPETITORS, Levers
from faults.registry import FAULTS
from harness.errors import CheckerError
from harness.guard import GuardedSeams
from harness.history import History, error_text
from harness.oracles.bookkeeping import BookkeepingOracle
from harness.oracles.kv_bytes import BytesOracle
from harness.oracles.provenance import ProvenanceOracle
from harness.oracles.tokens import oracle_tokens
from harness.plan import Cell
from harness.recorder import Recorder, plain_verdict
from harness.seeds import derive
from harness.targets.sim_world import SimClock, SimWorld, make_prompts, request_id


class SimTarget:
    """The default target: thousands of cells, no processes, no network."""

    name = "sim"
    summary = "both engines in one process, virtual time, one seeded sequence of choices"
    provides = frozenset(SEAMS) | {CLOCK, COMPETITORS}
    takes_connector = True

    def __init__(self, watch: Callable[[Seams], None] | None = None) -> None:
        """`watch` hangs more handlers on the seams of every cell, after all others."""
        self._watch = watch

    def run(self, cell: Cell, history: History) -> None:
        """Run the cell and write its history."""
        history.add(
            "cell",
            id=cell.id,
            target=self.name,
            connector=cell.connector,
            scenario=cell.scenario.to_plain(),
            policy=str(cell.policy),
            role=str(cell.role),
            seed=cell.seed,
            twin=cell.twin,
            missing=list(cell.missing),
            repeats=cell.repeats,
        )
        if cell.missing:
            return
        try:
            self._run(cell, history)
        except CheckerError as error:
            history.add("checker.crashed", error=str(error))

    def _run(self, cell: Cell, history: History) -> None:
        prompts = make_prompts(cell.scenario, cell.data_seed)
        for load, prompt in enumerate(prompts, start=1):
            history.add("request", request=prompt.request_id, load=load, tokens=len(prompt.token_ids))
        topology = cell.scenario.topology
        tokens = oracle_tokens(topology.model, topology.kv_dtype, cell.data_seed, prompts)
        for prompt in prompts:
            history.add("oracle.tokens", request=prompt.request_id, tokens=list(tokens[prompt.request_id]))
        seams = GuardedSeams()

        def answered(engine: str, output: RequestOutput) -> None:
            history.add("answer", t=world.clock.now, engine=engine, **plain_output(output))

        try:
            world = SimWorld(cell, seams, answered)
        except StartupError as error:
            history.add("engine.refused", error=str(error))
            return
        contexts = self._attach(cell, history, seams, world)
        finished = None
        try:
            finished = world.run()
        except CheckerError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is a finding
            history.add("engine.crashed", error=error_text(error))
        for kind, context in contexts:
            history.add("fault.done", fault=kind, request=context.request_id, evidence=len(context.evidence))
        self._bookkeeping.finish()
        history.add("end", t=world.clock.now, finished=finished, held=world.fabric.held())

    def _attach(
        self, cell: Cell, history: History, seams: GuardedSeams, world: SimWorld
    ) -> list[tuple[str, FaultContext]]:
        """Hang oracles, recorder and faults on the seams. Returns the kind and notebook of each fault."""
        topology = cell.scenario.topology
        Recorder(history, lambda: world.clock.now).attach(seams)
        BytesOracle(history, min(topology.producer.block_size, topology.consumer.block_size)).attach(seams)
        if cell.provenance:
            ProvenanceOracle(history, world.producer, world.consumer, world.all_prompts).attach(seams)
        self._bookkeeping = BookkeepingOracle(history, (world.producer, world.consumer))
        self._bookkeeping.attach(seams)
        levers = Levers(SimClock(world.leases), world.competitors)

        def note(evidence: Evidence) -> None:
            history.add("evidence", t=world.clock.now, **plain_evidence(evidence))

        requests = {load: request_id(load) for load in range(1, cell.scenario.workload.requests + 1)}
        contexts = []
        for index, params in enumerate(cell.scenario.faults):
            rng = random.Random(derive(cell.seed, index))
            context = FaultContext(request_id(params.when.load), rng, levers, notify=note, requests=requests)
            FAULTS[params.kind](params, context).attach(seams)
            contexts.append((params.kind, context))
        if self._watch is not None:
            self._watch(seams)
        return contexts


def plain_evidence(evidence: Evidence) -> dict[str, object]:
    """A piece of evidence as JSON values."""
    return {
        "fault": evidence.fault,
        "seam": evidence.seam,
        "request": evidence.request_id,
        "what": evidence.what,
        "before": evidence.before,
        "after": evidence.after,
    }


def plain_output(output: RequestOutput) -> dict[str, object]:
    """An answer as JSON values, without its parameters."""
    return {
        "request": output.request_id,
        "tokens": list(output.token_ids),
        "finish_reason": str(output.finish_reason),
        "error": output.error,
        "verdict": plain_verdict(output.verdict),
        "recomputed": output.recomputed,
    }
