"""Runs a scenario of the kit with a connector, and says what went wrong and what was damaged how."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.connectors.registry import CONNECTORS, ConnectorFactory, transfer_of
from harness.conformance.seen import SeenKV
from harness.history import History, Line
from harness.judge import judge
from harness.observe import observe
from harness.plan import plan_cells
from harness.targets.sim import SimTarget
from reports.results import CellResult
from scenarios.loader import parse_scenario
from scenarios.words import Policy, Result


@dataclass(frozen=True, slots=True)
class Ran:
    """One cell that ran: its history, the judgement, and the KV of its requests."""

    lines: list[Line]
    result: CellResult
    seen: SeenKV

    @property
    def trouble(self) -> str | None:
        """What is not as the scenario expects it, and what every damaged load was delivered. None: nothing."""
        if self.result.result is Result.PASS:
            return None
        told = [f"Under {self.result.policy} on {self.result.topology}:", *self.result.why]
        told += [
            f"{load.request_id}: {load.verdict} because {load.reason}" for load in self.result.loads if load.reason
        ]
        return "\n".join([*told, *self.seen.damages()])


@contextmanager
def in_use(factory: ConnectorFactory) -> Iterator[str]:
    """Let the simulator find this connector by its name, whatever else has that name."""
    before = CONNECTORS.get(factory.name)
    CONNECTORS[factory.name] = factory
    try:
        yield factory.name
    finally:
        del CONNECTORS[factory.name]
        if before is not None:
            CONNECTORS[factory.name] = before


def run_scenario(factory: ConnectorFactory, scenario: Mapping[str, Any], policy: Policy, seed: int) -> Ran:
    """Run one cell on the simulator, in the connector's kind of transfer."""
    seen, history = SeenKV(), History()
    scenario = _fitted(scenario, transfer_of(factory))
    target = SimTarget(watch=seen.attach)
    with in_use(factory) as connector:
        parsed = parse_scenario(json.dumps(scenario))
        (cell,) = plan_cells([parsed], [policy], seed, target.provides, connector=connector)
        target.run(cell, history)
    result = judge(observe(history.lines), f"kvchaos run ... --connector {factory.name}")
    return Ran(history.lines, result, seen)


def _fitted(scenario: Mapping[str, Any], transfer: str) -> dict[str, Any]:
    """The scenario for this transfer. In a push the checksums pass with the connector's own messages."""
    topology = {**scenario["topology"], "transfer": transfer}
    faults = [
        {**fault, "when": {**fault["when"], "at": "carrier_pass"}}
        if transfer == "push" and fault["kind"] == "drop_checksums"
        else fault
        for fault in scenario.get("faults", [])
    ]
    return {**scenario, "topology": topology, "faults": faults}
