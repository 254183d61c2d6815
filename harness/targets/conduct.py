"""What every target does with a cell: write down what is known before it runs, hang oracles and faults on the seams,
and write down what they found. The target brings the engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.cache import KVMemory
from engine.config import EngineConfig
from engine.proxy import Prompt
from engine.request import RequestOutput
from engine.seams import Seams
from faults.base import Evidence, FaultContext
from faults.levers import Levers
from faults.registry import FAULTS
from harness.guard import GuardedSeams
from harness.history import History
from harness.oracles.bookkeeping import BookkeepingOracle
from harness.oracles.diagnosis import DiagnosisOracle
from harness.oracles.kv_bytes import BytesOracle
from harness.oracles.provenance import ProvenanceOracle
from harness.oracles.tokens import oracle_tokens
from harness.oracles.view import EngineView
from harness.plan import Cell
from harness.recorder import Recorder, plain_verdict
from harness.seeds import derive
from harness.targets.workload import request_id


@dataclass(frozen=True, slots=True)
class Stage:
    """What a target brings to a cell: both engines as oracles see them, levers, the time, and every prompt by id."""

    producer: EngineView
    consumer: EngineView
    levers: Levers
    now: Callable[[], int]
    prompts: Mapping[str, tuple[int, ...]]


class Conductor:
    """One run of one cell. `seams` never lets a bug of an oracle or a fault pass for one of the engine."""

    def __init__(self, cell: Cell, history: History) -> None:
        self.seams = GuardedSeams()
        self._cell = cell
        self._history = history
        self._contexts: list[tuple[str, FaultContext]] = []
        self._bookkeeping: BookkeepingOracle | None = None
        self._provenance: ProvenanceOracle | None = None

    @staticmethod
    def begin(cell: Cell, history: History, target: str) -> None:
        """The first line: what the cell is."""
        history.add(
            "cell",
            id=cell.id,
            target=target,
            connector=cell.connector,
            scenario=cell.scenario.to_plain(),
            policy=str(cell.policy),
            role=str(cell.role),
            seed=cell.seed,
            twin=cell.twin,
            missing=list(cell.missing),
            repeats=cell.repeats,
            provenance=cell.provenance,
        )

    def expect(self, prompts: tuple[Prompt, ...]) -> None:
        """The requests that will be made, and the tokens that they must give."""
        for load, prompt in enumerate(prompts, start=1):
            self._history.add("request", request=prompt.request_id, load=load, tokens=len(prompt.token_ids))
        topology = self._cell.scenario.topology
        tokens = oracle_tokens(topology.model, topology.kv_dtype, self._cell.data_seed, prompts)
        for prompt in prompts:
            self._history.add("oracle.tokens", request=prompt.request_id, tokens=list(tokens[prompt.request_id]))

    def attach(self, stage: Stage, watch: Callable[[Seams], None] | None = None) -> None:
        """Hang recorder, oracles and faults on the seams; `watch` hangs more, after all others."""
        cell, history, seams = self._cell, self._history, self.seams
        topology = cell.scenario.topology
        Recorder(history, stage.now).attach(seams)
        grid = min(topology.producer.block_size, topology.consumer.block_size)
        BytesOracle(history, grid, cell.scenario.checksum.version).attach(seams)
        DiagnosisOracle(history).attach(seams)
        if cell.provenance:
            self._provenance = ProvenanceOracle(history, stage.producer, stage.consumer, stage.prompts)
            self._provenance.attach(seams)
        self._bookkeeping = BookkeepingOracle(history, (stage.producer, stage.consumer))
        self._bookkeeping.attach(seams)

        def note(evidence: Evidence) -> None:
            history.add("evidence", t=stage.now(), **plain_evidence(evidence))

        requests = {load: request_id(load) for load in range(1, cell.scenario.workload.requests + 1)}
        for index, params in enumerate(cell.scenario.faults):
            rng = random.Random(derive(cell.seed, index))
            context = FaultContext(request_id(params.when.load), rng, stage.levers, notify=note, requests=requests)
            FAULTS[params.kind](params, context).attach(seams)
            self._contexts.append((params.kind, context))
        if watch is not None:
            watch(seams)

    def restarted(self, config: EngineConfig, memory: KVMemory, now: int) -> None:
        """An engine is there again in the middle of the run, with nothing in its memory."""
        if self._provenance is not None:
            self._provenance.begin_again(config.engine_id, memory)
        self._history.add(
            "engine.restarted", t=now, engine=config.engine_id, block_size=config.block_size, layout=config.layout
        )

    def end(self, now: int, finished: bool | None, held: list[str]) -> None:
        """The last lines: which faults proved themselves, what the pools say, whether everything came to its end."""
        for kind, context in self._contexts:
            self._history.add("fault.done", fault=kind, request=context.request_id, evidence=len(context.evidence))
        if self._bookkeeping is not None:
            self._bookkeeping.finish()
        self._history.add("end", t=now, finished=finished, held=held)


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
