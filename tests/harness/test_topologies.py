"""Connectors, start-up and speculators, as scenarios: each comes out as it says, fail-open and fail-closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.api import run_scenario
from harness.history import History
from harness.judge import judge
from harness.observe import observe
from harness.plan import plan_cells
from harness.targets import TARGETS
from scenarios.loader import load_scenarios
from scenarios.words import Policy, Result

SEED = 5
CELLS = [
    pytest.param("bidirectional-clean", marks=pytest.mark.req("CAR-4")),
    pytest.param("bidirectional-flip", marks=pytest.mark.req("CAR-4", "GAP-13")),
    pytest.param("context-parallel-consumer", marks=pytest.mark.req("CAR-5")),
    pytest.param("context-parallel-consumer-flip", marks=pytest.mark.req("CAR-5", "GAP-13")),
    pytest.param("context-parallel-producer", marks=pytest.mark.req("CAR-5", "EXT-7")),
    pytest.param("last-stage-only", marks=pytest.mark.req("CAR-5")),
    pytest.param("multi-flip", marks=pytest.mark.req("CAR-2")),
    pytest.param("multi-pull-first", marks=pytest.mark.req("CAR-2")),
    pytest.param("no-carrier", marks=pytest.mark.req("CAR-1", "CAR-3")),
    pytest.param("offload-clean", marks=pytest.mark.req("CAR-2", "VER-7")),
    pytest.param("offload-flip-under-fail-closed", marks=pytest.mark.req("CAR-2", "GAP-13")),
    pytest.param("offload-short", marks=pytest.mark.req("GAP-7")),
    pytest.param("offload-tp4", marks=pytest.mark.req("CAR-2", "EXT-1")),
    pytest.param("push-after-reuse", marks=pytest.mark.req("EXT-3")),
    pytest.param("push-blocks-swapped", marks=pytest.mark.req("EXT-3")),
    pytest.param("push-cancelled-reported-done", marks=pytest.mark.req("EXT-3")),
    pytest.param("push-checksums-cut", marks=pytest.mark.req("EXT-3", "WIR-2")),
    pytest.param("push-checksums-lost", marks=pytest.mark.req("EXT-3", "VER-3")),
    pytest.param("push-clean", marks=pytest.mark.req("EXT-3", "CAR-1")),
    pytest.param("push-failed-reported-done", marks=pytest.mark.req("EXT-3")),
    pytest.param("push-flip-after-checksum", marks=pytest.mark.req("EXT-3")),
    pytest.param("push-flip-before-verify", marks=pytest.mark.req("EXT-3")),
    pytest.param("push-short", marks=pytest.mark.req("EXT-3")),
    pytest.param("push-tp2-to-pp2", marks=pytest.mark.req("EXT-3", "EXT-2")),
    pytest.param("speculator-clean", marks=pytest.mark.req("PRO-2", "DEF-8")),
    pytest.param("speculator-flip-past-the-end", marks=pytest.mark.req("DEF-8")),
    pytest.param("speculator-last", marks=pytest.mark.req("CAR-5")),
    pytest.param("speculator-stale-read", marks=pytest.mark.req("PRO-2")),
]
GAPS = {"bidirectional-flip", "context-parallel-consumer-flip", "offload-flip-under-fail-closed", "offload-short"}


def files(root: Path) -> dict[str, Path]:
    folders = root / "scenarios" / "topologies", root / "scenarios" / "startup"
    return {path.stem: path for folder in folders for path in folder.glob("*.yaml")}


def test_no_scenario_of_connectors_is_forgotten(root: Path) -> None:
    connectors = {
        name
        for name, path in files(root).items()
        for scenario in load_scenarios([path])
        if path.parent.name == "startup"
        or scenario.topology.connector is not None
        or scenario.topology.transfer == "push"
        or scenario.workload.bidirectional
        or name.startswith("speculator")
    }
    assert connectors == {cell.values[0] for cell in CELLS}


@pytest.mark.parametrize("policy", [Policy.FAIL_OPEN, Policy.FAIL_CLOSED_FAIL])
@pytest.mark.parametrize("name", CELLS)
def test_it_comes_out_as_the_scenario_says(root: Path, name: str, policy: Policy) -> None:
    cell = run_scenario(files(root)[name], policy=policy, seed=SEED)
    assert cell.why == ()
    assert cell.result is (Result.KNOWN_GAP if name in GAPS else Result.PASS)


@pytest.mark.req("CAR-3", "CAR-5")
@pytest.mark.parametrize(("name", "says"), [("no-carrier", "carries no checksums"), ("speculator-last", "repeat_last")])
def test_a_refusal_says_why(root: Path, name: str, says: str) -> None:
    cell = run_scenario(files(root)[name], policy=Policy.FAIL_CLOSED_FAIL, seed=SEED)
    assert all(says in str(load.error) for load in cell.loads)


@pytest.mark.parametrize("name", ["offload-clean", "offload-short", "push-clean"])
def test_the_bytes_alone_say_the_same_of_loads_of_a_part_of_a_prompt(root: Path, name: str) -> None:
    """Without the provenance oracle: what was read is judged by the bytes at the first use."""
    (scenario,) = load_scenarios([files(root)[name]])
    target = TARGETS["sim"]
    cell, *_ = plan_cells([scenario], [Policy.FAIL_OPEN], SEED, target.provides, provenance=False)
    history = History()
    target.run(cell, history)
    result = judge(observe(history.lines), "")
    assert result.why == ()
