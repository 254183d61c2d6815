"""Ranks and KV cache groups, as scenarios: each comes out as it says, fail-open and fail-closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.api import run_scenario
from scenarios.loader import load_scenarios
from scenarios.words import Policy, Result

SEED = 5
CLEAN = [
    "clean-block-sizes-compared",
    "clean-indexer",
    "clean-indexer-unchecked",
    "clean-kernel-blocks",
    "clean-latent",
    "clean-one-rank-to-tp4-pp2",
    "clean-recurrent",
    "clean-shared-kv",
    "clean-skipped-groups",
    "clean-sliding-window",
    "clean-tp2-to-pp4",
    "clean-tp4-pp2-to-one-rank",
]
FAULTED = [
    pytest.param("flip-in-indexer", marks=pytest.mark.req("EXT-9")),
    pytest.param("flip-in-latent-replica", marks=pytest.mark.req("EXT-1")),
    pytest.param("flip-in-other-block-size", marks=pytest.mark.req("EXT-2", "DEF-6")),
    pytest.param("flip-in-second-replica", marks=pytest.mark.req("EXT-1")),
    pytest.param("flip-in-second-replica-unchecked", marks=pytest.mark.req("EXT-1", "VER-4")),
    pytest.param("flip-in-state", marks=pytest.mark.req("EXT-5")),
    pytest.param("flip-in-window", marks=pytest.mark.req("BLK-3")),
    "heads-swapped-between-ranks",
    "latents-swapped",
    "short-transfer-of-groups",
    "stale-read-across-ranks",
    "stale-read-of-hybrid",
]
GAPS = [
    pytest.param("flip-in-host-resident-kv", marks=pytest.mark.req("GAP-3", "FPR-2")),
    pytest.param("flip-in-state-after-verify", marks=pytest.mark.req("GAP-2")),
    pytest.param("flip-in-state-unchecked", marks=pytest.mark.req("GAP-3", "EXT-5")),
    pytest.param("flip-in-window-after-verify", marks=pytest.mark.req("GAP-2")),
]


def of(name: str, root: Path) -> Path:
    return root / "scenarios" / "topologies" / f"{name}.yaml"


def test_no_scenario_of_ranks_or_groups_is_forgotten(root: Path) -> None:
    paths = (root / "scenarios" / "topologies").glob("*.yaml")
    plain = {
        scenario.name
        for scenario in load_scenarios(list(paths))
        if scenario.topology.connector is None
        and scenario.topology.transfer == "pull"
        and not scenario.workload.bidirectional
        and scenario.topology.producer.speculator is scenario.topology.consumer.speculator is None
    }
    assert plain == {getattr(cell, "values", (cell,))[0] for cell in (*CLEAN, *FAULTED, *GAPS)}


@pytest.mark.parametrize("policy", [Policy.FAIL_OPEN, Policy.FAIL_CLOSED_RECOMPUTE])
@pytest.mark.parametrize("name", [*CLEAN, *FAULTED])
def test_it_comes_out_as_the_scenario_says(root: Path, name: str, policy: Policy) -> None:
    cell = run_scenario(of(name, root), policy=policy, seed=SEED)
    assert cell.why == ()
    assert cell.result is Result.PASS


@pytest.mark.parametrize("policy", [Policy.FAIL_OPEN, Policy.FAIL_CLOSED_FAIL])
@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_one_that_its_predicate_recognises(root: Path, name: str, policy: Policy) -> None:
    cell = run_scenario(of(name, root), policy=policy, seed=SEED)
    assert cell.why == ()
    assert cell.result is Result.KNOWN_GAP
