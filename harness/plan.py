"""What will be run: a cell per scenario and policy, and the clean twins that go with them.

Three seeds drive a cell. `data` (weights, prompts) depends on the model and the workload only, so that policies are
compared over the same prompts. `world` (arrivals, interleaving) adds topology and policy, and is shared with the twin,
which therefore differs from its cells by the fault alone. `seed` is the cell's own and drives the fault's choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.connectors import DEFAULT_CONNECTOR
from engine.connectors.registry import CONNECTORS, transfer_of
from faults.levers import BIDIRECTIONAL, CHECKSUMS, PUSH, RANKS
from faults.levers import CONNECTORS as CHOICE
from faults.noop import NoopParams
from faults.registry import FAULTS
from harness.seeds import derive, short_hash
from scenarios.clean import clean_expectation
from scenarios.schema import Scenario
from scenarios.words import Policy, Role

TWIN_SUMMARY = "Clean twin: the same seed and workload, each fault replaced by noop."


@dataclass(frozen=True, slots=True)
class Cell:
    """The unit that is run and judged. `missing` names what the target lacks for it: then it is not run.

    `provenance` says whether every attention read is checked; without it `read` is judged by the bytes alone.
    `connector` names what moves the KV, on a target that lets one choose (`connector_of`).
    `repeats` is the cell that this one runs once more, to see that its history comes out the same.
    """

    id: str
    scenario: Scenario
    policy: Policy
    role: Role
    seed: int
    world_seed: int
    data_seed: int
    twin: str | None
    missing: tuple[str, ...]
    provenance: bool = True
    repeats: str | None = None
    connector: str = DEFAULT_CONNECTOR


def plan_cells(
    scenarios: Sequence[Scenario],
    policies: Iterable[Policy],
    run_seed: int,
    provides: frozenset[str],
    provenance: bool = True,
    connector: str = DEFAULT_CONNECTOR,
) -> list[Cell]:
    """All fault cells in the order of the scenarios, then the twins they need, each once, by id."""
    wanted = set(policies)
    cells: list[Cell] = []
    twins: dict[str, Cell] = {}
    for scenario in scenarios:
        for policy in scenario.policies:
            if policy not in wanted:
                continue
            missing = missing_names(scenario, policy, provides, connector)
            twin = None
            if scenario.twin and scenario.faults and not missing:
                twin_cell = _cell(twin_scenario(scenario, policy), policy, Role.TWIN, run_seed, None, ())
                twins[twin_cell.id] = twin_cell
                twin = twin_cell.id
            cells.append(_cell(scenario, policy, Role.FAULT, run_seed, twin, missing))
    planned = cells + [twins[cell_id] for cell_id in sorted(twins)]
    return [replace(cell, provenance=provenance, connector=connector_of(cell.scenario, connector)) for cell in planned]


def connector_of(scenario: Scenario, connector: str) -> str:
    """What moves the KV: the scenario's own connector, else the one that was asked for, else that of its transfer."""
    topology = scenario.topology
    return topology.connector or (topology.transfer if connector == DEFAULT_CONNECTOR else connector)


def missing_names(
    scenario: Scenario, policy: Policy, provides: frozenset[str], connector: str = DEFAULT_CONNECTOR
) -> tuple[str, ...]:
    """What the scenario and its faults need, and neither the target nor the policy nor the connector provides."""
    if policy is not Policy.OFF:
        provides = provides | {CHECKSUMS}
    topology = scenario.topology
    uses = {
        PUSH: topology.transfer == "push",
        CHOICE: topology.connector is not None,
        RANKS: topology.needs_one_process,
        BIDIRECTIONAL: scenario.workload.bidirectional,
    }
    needed = {name for name, used in uses.items() if used}
    if transfer_of(CONNECTORS[connector_of(scenario, connector)]) != topology.transfer:
        needed.add(f"transfer.{topology.transfer} with the connector {connector}")
    for fault in scenario.faults:
        needed |= FAULTS[fault.kind].needs(fault)
    return tuple(sorted(needed - provides))


def twin_scenario(scenario: Scenario, policy: Policy) -> Scenario:
    """The clean twin, named by everything it depends on, so that scenarios that share it run it once."""
    moments = sorted({(fault.when.load, fault.when.at) for fault in scenario.faults})
    expected = (scenario.others or {}).get(policy) or clean_expectation(policy)
    plain = {
        "topology": scenario.topology.model_dump(mode="json"),
        "checksum": scenario.checksum.identity,
        "workload": scenario.workload.identity,
        "load_failure": scenario.load_failure,
        "moments": moments,
        "expected": expected.model_dump(mode="json"),
    }
    noops = tuple(NoopParams.model_validate({"kind": "noop", "when": {"load": load, "at": at}}) for load, at in moments)
    return scenario.model_copy(
        update={
            "name": f"twin-{short_hash(plain)}",
            "summary": TWIN_SUMMARY,
            "incidents": (),
            "faults": noops,
            "policies": (policy,),
            "expect": {policy: expected},
            "others": {policy: expected},
            "known_gap": {},
            "twin": False,
        }
    )


def _cell(
    scenario: Scenario, policy: Policy, role: Role, run_seed: int, twin: str | None, missing: tuple[str, ...]
) -> Cell:
    topology = scenario.topology
    workload = scenario.workload.identity
    return Cell(
        id=f"{scenario.name}--{policy}",
        scenario=scenario,
        policy=policy,
        role=role,
        seed=derive("cell", run_seed, scenario.name, policy, topology.id),
        world_seed=derive("world", run_seed, topology.id, workload, policy, scenario.load_failure),
        data_seed=derive("data", run_seed, topology.model, topology.kv_dtype, workload),
        twin=twin,
        missing=missing,
    )
