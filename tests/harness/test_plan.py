from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.levers import CHECKSUMS, CLOCK, COMPETITORS
from harness.plan import Cell, missing_names, plan_cells, twin_scenario
from harness.targets import TARGETS
from scenarios.loader import load_scenarios
from scenarios.schema import Scenario
from scenarios.words import Policy, Role

PROVIDES = TARGETS["sim"].provides
ALL = tuple(Policy)
Make = Callable[..., Scenario]


def plan(*scenarios: Scenario, policies: tuple[Policy, ...] = ALL, seed: int = 0) -> list[Cell]:
    return plan_cells(scenarios, policies, seed, PROVIDES)


def drop(**changes: Any) -> dict[str, Any]:
    return {"faults": [{"kind": "drop_checksums", "when": {"load": 1, "at": "params_pass"}}], **changes}


def test_a_cell_for_each_scenario_and_policy_and_then_the_twins(scenario_of: Make, clean: dict[str, Any]) -> None:
    cells = plan(scenario_of("b"), scenario_of("a", **clean))
    assert [cell.id for cell in cells[:4]] == ["b--off", "b--fail_open", "a--off", "a--fail_open"]
    twins = cells[4:]
    assert [cell.role for cell in cells] == [Role.FAULT] * 4 + [Role.TWIN] * 2
    assert [cell.id for cell in twins] == sorted(cell.twin for cell in cells[:2])
    assert all(cell.twin is None for cell in (*cells[2:4], *twins)), "a scenario without a fault is its own twin"


def test_only_the_policies_that_are_asked_for(scenario_of: Make) -> None:
    cells = plan(scenario_of(), policies=(Policy.FAIL_OPEN, Policy.FAIL_CLOSED_FAIL))
    assert [(cell.role, cell.policy) for cell in cells] == [
        (Role.FAULT, Policy.FAIL_OPEN),
        (Role.TWIN, Policy.FAIL_OPEN),
    ]
    assert plan(scenario_of(), policies=(Policy.FAIL_CLOSED_FAIL,)) == []


def test_a_scenario_may_do_without_a_twin(scenario_of: Make) -> None:
    assert [cell.role for cell in plan(scenario_of(twin=False))] == [Role.FAULT, Role.FAULT]


# ---- seeds


def test_what_else_is_run_changes_no_cell(scenario_of: Make, clean: dict[str, Any]) -> None:
    a, b = scenario_of("a"), scenario_of("b", **clean)
    whole = {cell.id: cell for cell in plan(a, b)}
    assert {cell.id: cell for cell in plan(b, a)} == whole
    for part in (plan(a), plan(b), plan(a, policies=(Policy.OFF,)), plan(b, a, policies=(Policy.FAIL_OPEN,))):
        assert part
        for cell in part:
            assert cell == whole[cell.id]


def test_another_seed_is_another_world(scenario_of: Make) -> None:
    for one, two in zip(plan(scenario_of(), seed=7), plan(scenario_of(), seed=8), strict=True):
        assert one.id == two.id
        assert one.seed != two.seed
        assert one.world_seed != two.world_seed
        assert one.data_seed != two.data_seed


def test_policies_are_compared_over_the_same_prompts(scenario_of: Make) -> None:
    off, opened = plan(scenario_of())[:2]
    assert off.data_seed == opened.data_seed
    assert off.world_seed != opened.world_seed
    assert off.seed != opened.seed


def test_scenarios_of_one_workload_share_prompts_and_world_but_not_the_faults_choices(scenario_of: Make) -> None:
    (a, *_), (b, *_) = plan(scenario_of("a")), plan(scenario_of("b"))
    assert (a.data_seed, a.world_seed) == (b.data_seed, b.world_seed)
    assert a.seed != b.seed


@pytest.mark.parametrize(
    ("changes", "data", "world"),
    [
        ({"workload": {"requests": 3}}, True, True),
        ({"topology": {"kv_dtype": "float16"}}, True, True),
        ({"topology": {"model": "small"}}, True, True),
        ({"topology": {"consumer": {"block_size": 8}}}, False, True),
        ({"topology": {"consumer": {"max_num_seqs": 3}}}, False, True),
        ({"load_failure": "recompute"}, False, True),
        ({"summary": "Other words."}, False, False),
        ({"incidents": ["a/b#1"]}, False, False),
    ],
)
def test_what_the_seeds_depend_on(scenario_of: Make, changes: dict[str, Any], data: bool, world: bool) -> None:
    before, after = plan(scenario_of())[0], plan(scenario_of(**changes))[0]
    assert (before.data_seed != after.data_seed) is data
    assert (before.world_seed != after.world_seed) is world


def test_the_plan_is_the_same_in_every_process(root: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from harness.plan import plan_cells;"
        "from harness.targets import TARGETS; from scenarios.loader import load_scenarios;"
        "from scenarios.words import Policy;"
        "cells = plan_cells(load_scenarios([Path(sys.argv[1])]), list(Policy), 5, TARGETS['sim'].provides);"
        "print(json.dumps([[c.id, c.seed, c.world_seed, c.data_seed, c.twin] for c in cells]))"
    )
    smoke = root / "scenarios" / "smoke"
    done = subprocess.run(
        [sys.executable, "-c", code, str(smoke)],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    cells = plan_cells(load_scenarios([smoke]), ALL, 5, PROVIDES)
    assert json.loads(done.stdout) == [[c.id, c.seed, c.world_seed, c.data_seed, c.twin] for c in cells]


# ---- twins


def test_the_twin_has_noops_in_place_of_faults(scenario_of: Make) -> None:
    at = [{"load": 1, "at": "after_verify"}, {"load": 2, "at": "before_verify"}]
    flips = [{"kind": "bit_flip", "when": when} for when in reversed(at)]
    twin = twin_scenario(scenario_of(faults=flips), Policy.OFF)
    assert [(fault.kind, fault.when.load, fault.when.at) for fault in twin.faults] == [
        ("noop", 1, "after_verify"),
        ("noop", 2, "before_verify"),
    ]
    assert (twin.twin, dict(twin.known_gap), twin.incidents) == (False, {}, ())
    assert twin.policies == (Policy.OFF,)


def test_the_twin_shares_the_world_of_its_cell_and_keeps_its_own_choices(scenario_of: Make) -> None:
    cell, _, *twins = plan(scenario_of())
    twin = next(twin for twin in twins if twin.id == cell.twin)
    assert (twin.data_seed, twin.world_seed) == (cell.data_seed, cell.world_seed)
    assert twin.seed != cell.seed
    assert twin.scenario.topology == cell.scenario.topology
    assert twin.scenario.workload == cell.scenario.workload


def test_scenarios_that_differ_only_in_what_goes_wrong_share_their_twin(scenario_of: Make) -> None:
    at = {"load": 2, "at": "before_verify"}
    others = [
        scenario_of("b", faults=[{"kind": "bit_flip", "when": at, "flips": 7}]),
        scenario_of("c", faults=[{"kind": "bit_flip", "when": at, "pattern": "bit63_pair"}]),
        scenario_of("d", summary="Other words."),
        scenario_of("e", known_gap={"fail_open": "GAP-8"}),
    ]
    cells = plan(scenario_of("a"), *others)
    assert len({cell.twin for cell in cells[:10] if cell.policy is Policy.OFF}) == 1
    assert len(cells) == 12


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": [{"kind": "bit_flip", "when": {"load": 1, "at": "before_verify"}}]},
        {"faults": [{"kind": "bit_flip", "when": {"load": 2, "at": "after_verify"}}]},
        {"workload": {"requests": 3}},
        {"topology": {"producer": {"layout": "NHD"}}},
        {"load_failure": "recompute"},
        {"others": {"off": {"verdict": "not_checked"}, "fail_open": {"verdict": "unverified"}}},
    ],
)
def test_whatever_a_clean_run_depends_on_names_another_twin(scenario_of: Make, changes: dict[str, Any]) -> None:
    names = {twin_scenario(scenario_of(**given), Policy.OFF).name for given in ({}, changes)}
    assert len(names) == 2


def test_the_twin_is_judged_as_the_requests_without_a_fault(scenario_of: Make) -> None:
    others = {"off": {"verdict": "not_checked", "outcome": "served"}, "fail_open": {"verdict": "unverified"}}
    twin = twin_scenario(scenario_of(others=others), Policy.FAIL_OPEN)
    assert twin.expect[Policy.FAIL_OPEN].verdict == "unverified"
    clean = twin_scenario(scenario_of(), Policy.FAIL_OPEN).expect[Policy.FAIL_OPEN]
    assert (clean.verdict, clean.outcome, clean.truth, clean.tokens) == ("verified", "served", "intact", "right")


# ---- not applicable


def test_a_policy_without_checksums_has_none_to_drop(scenario_of: Make) -> None:
    scenario = scenario_of(**drop())
    off, opened, *twins = plan(scenario)
    assert (off.missing, opened.missing) == ((CHECKSUMS,), ())
    assert off.twin is None, "a cell that is not run needs no twin"
    assert [twin.policy for twin in twins] == [Policy.FAIL_OPEN]


def test_a_target_that_lacks_something_is_named_with_what_it_lacks(scenario_of: Make) -> None:
    reuse = {"kind": "early_reuse", "when": {"load": 1, "at": "before_read"}}
    scenario = scenario_of(faults=[reuse, {"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}}])
    assert missing_names(scenario, Policy.OFF, PROVIDES) == ()
    assert missing_names(scenario, Policy.OFF, PROVIDES - {CLOCK, COMPETITORS}) == (CLOCK, COMPETITORS)
    without_seams = missing_names(scenario, Policy.OFF, frozenset())
    assert set(without_seams) == {
        CLOCK,
        COMPETITORS,
        "consumer.load_finished",
        "producer.kv_final",
        "transfer.op_posted",
    }
    assert list(without_seams) == sorted(without_seams)


def test_a_scenario_without_faults_needs_nothing(scenario_of: Make, clean: dict[str, Any]) -> None:
    assert missing_names(scenario_of(**clean), Policy.OFF, frozenset()) == ()


# ---- what moves the KV


@pytest.mark.parametrize(
    ("topology", "asked", "connector"),
    [
        ({}, "pull", "pull"),
        ({}, "pull_offload", "pull_offload"),
        ({"transfer": "push"}, "pull", "push"),
        ({"connector": "offload_pull"}, "pull", "offload_pull"),
        ({"connector": "offload_pull"}, "pull_offload", "offload_pull"),
    ],
)
def test_the_scenario_and_the_command_line_say_what_moves_the_kv(
    scenario_of: Make, topology: dict[str, Any], asked: str, connector: str
) -> None:
    cells = plan_cells([scenario_of(topology=topology)], ALL, 0, PROVIDES, connector=asked)
    assert {cell.connector for cell in cells} == {connector}
    assert {cell.missing for cell in cells} == {()}


def test_a_connector_of_the_other_kind_of_transfer_does_not_apply(scenario_of: Make) -> None:
    (off, _) = plan_cells([scenario_of()], ALL, 0, PROVIDES, connector="push")
    assert off.missing == ("transfer.pull with the connector push",)
    (off, _) = plan_cells([scenario_of(topology={"transfer": "push"})], ALL, 0, PROVIDES, connector="pull_offload")
    assert off.missing == ("transfer.push with the connector pull_offload",)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"topology": {"transfer": "push"}}, "transfer.push"),
        ({"topology": {"connector": "offload"}}, "connectors"),
        ({"workload": {"bidirectional": True}}, "workload.bidirectional"),
    ],
)
def test_real_processes_lack_what_only_the_simulator_has(
    scenario_of: Make, changes: dict[str, Any], lacks: str
) -> None:
    scenario = scenario_of(**changes)
    assert missing_names(scenario, Policy.OFF, TARGETS["sim"].provides) == ()
    assert missing_names(scenario, Policy.OFF, TARGETS["local"].provides) == (lacks,)
