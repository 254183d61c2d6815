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
COVERS = {
    "bidirectional-clean": ("CAR-4",),
    "bidirectional-flip": ("CAR-4", "GAP-13"),
    "context-parallel-consumer": ("CAR-5",),
    "context-parallel-consumer-flip": ("CAR-5", "GAP-13"),
    "context-parallel-producer": ("CAR-5", "EXT-7"),
    "last-stage-only": ("CAR-5",),
    "multi-flip": ("CAR-2",),
    "multi-pull-first": ("CAR-2",),
    "no-carrier": ("CAR-1", "CAR-3"),
    "offload-clean": ("CAR-2", "VER-7"),
    "offload-flip-under-fail-closed": ("CAR-2", "GAP-13"),
    "offload-short": ("GAP-7",),
    "offload-tp4": ("CAR-2", "EXT-1"),
    "push-after-reuse": ("EXT-3",),
    "push-blocks-swapped": ("EXT-3",),
    "push-cancelled-reported-done": ("EXT-3",),
    "push-checksums-cut": ("EXT-3", "WIR-2"),
    "push-checksums-lost": ("EXT-3", "VER-3"),
    "push-clean": ("EXT-3", "CAR-1"),
    "push-failed-reported-done": ("EXT-3",),
    "push-flip-after-checksum": ("EXT-3",),
    "push-flip-before-verify": ("EXT-3",),
    "push-short": ("EXT-3",),
    "push-tp2-to-pp2": ("EXT-3", "EXT-2"),
    "speculator-clean": ("PRO-2", "DEF-8"),
    "speculator-flip-past-the-end": ("DEF-8",),
    "speculator-last": ("CAR-5",),
    "speculator-stale-read": ("PRO-2",),
}
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
    assert connectors == set(COVERS)


@pytest.mark.parametrize("policy", [Policy.FAIL_OPEN, Policy.FAIL_CLOSED_FAIL])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.req(*ids)) for name, ids in COVERS.items()])
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
